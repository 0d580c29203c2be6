"""guarded(): where a scope begins and ends, scopes that overlap, and install() inside of one."""

from __future__ import annotations

import asyncio
import contextvars
import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchguard
from support.child_process import output_of
from support.kinds import locked
from support.ways import outcome_of
from torchguard import guarded
from torchguard.rollback import interception

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


def is_on() -> bool:
    """Whether a failing operation is undone here: resize_, an index write, and out=."""
    tensor, out = locked([1.0]), torch.empty(0)
    outcome_of(lambda: tensor.resize_(100))
    outcome_of(lambda: torch.index_select(torch.ones(3), 0, torch.tensor([99]), out=out))
    assert (tensor.shape == (1,)) == (out.shape == (0,))
    return tensor.shape == (1,)


def spoiled() -> list[float]:
    """Two zeros, of which an operation writes one before it fails."""
    tensor = torch.zeros(2)
    with pytest.raises(IndexError):
        tensor.index_put_((torch.tensor([0, 99]),), torch.tensor(7.0))
    return tensor.tolist()


class TestAScope:
    def test_may_be_nested_and_used_again_and_inside_itself(self) -> None:
        """Elements are copied where one asks for it; exceptions pass through."""
        assert not is_on()
        scope = guarded()
        kept, copied = [7, 0], [0, 0]
        for inner, expected in ((scope, kept), (guarded(), kept), (guarded(data=True), copied)):
            error = ValueError("mine")
            with pytest.raises(ValueError, match="mine") as caught, scope:
                assert is_on()
                with inner:
                    assert is_on()
                    assert spoiled() == expected
                    with guarded():
                        assert spoiled() == expected
                assert is_on()
                assert spoiled() == kept
                raise error
            assert caught.value is error
            assert not is_on()

    @pytest.mark.parametrize("decorate", [guarded, guarded(), guarded(data=True)])
    def test_decorates_functions_methods_and_generators(self, decorate: Any) -> None:
        @decorate  # type: ignore[untyped-decorator]
        def function(depth: int) -> int:
            """Documented."""
            assert is_on()
            return 0 if depth == 0 else 1 + function(depth - 1)

        class Owner:
            @decorate  # type: ignore[untyped-decorator]
            def method(self, value: bool) -> bool:
                return is_on() is value

        @decorate  # type: ignore[untyped-decorator]
        def generator() -> Iterator[bool]:
            yield is_on()
            yield is_on()

        assert [(each, is_on()) for each in generator()] == [(True, False)] * 2
        assert function(3) == 3
        assert (function.__name__, function.__doc__) == ("function", "Documented.")
        assert Owner().method(value=True)
        assert not is_on()

    def test_decorates_nothing_that_has_no_operations(self) -> None:
        class Adder:
            """A class."""

        async def steps() -> AsyncIterator[int]:
            yield 1

        wrong: dict[str, Any] = {
            "function is the class .*Adder, expected a function": Adder,
            "function is 3, expected a function": 3,
            "function is a Tensor": torch.ones(1),
            "steps is an async generator": steps,
        }
        for decorate in (guarded, guarded()):
            for message, each in wrong.items():
                with pytest.raises(TypeError, match=message):
                    decorate(each)


class TestScopesThatOverlap:
    def test_a_task_that_is_started_inside_is_covered_until_the_scope_ends(self) -> None:
        found = []

        async def child(ended: asyncio.Event, left: asyncio.Event) -> None:
            found.append(is_on())
            ended.set()
            await left.wait()
            found.append(is_on())
            with guarded():
                found.append(is_on())

        async def run() -> None:
            ended, left = asyncio.Event(), asyncio.Event()
            with guarded():
                task = asyncio.create_task(child(ended, left))
                await ended.wait()
            with guarded():  # another one: it is not the child's
                left.set()
                await task

        asyncio.run(run())
        assert found == [True, False, True]

    def test_a_decorated_coroutine_is_covered_between_its_awaits(self) -> None:
        found = []

        async def task() -> None:
            for _ in range(2):
                found.append(is_on())
                await asyncio.sleep(0)

        async def run() -> None:
            await asyncio.gather(guarded()(task)(), task())

        asyncio.run(run())
        assert found == [True, False, True, False]

    @pytest.mark.parametrize("first", [0, 1])
    def test_of_one_context_end_in_either_order(self, first: int) -> None:
        """Elements are copied as long as one that copies is open."""
        scopes = [guarded(data=True), guarded()]
        for each in scopes:
            each.__enter__()
        assert spoiled() == [0, 0]
        scopes[first].__exit__(None, None, None)
        assert is_on()
        assert spoiled() == ([0, 0] if first else [7, 0])
        scopes[1 - first].__exit__(None, None, None)
        assert not is_on()

    def test_one_object_in_many_contexts(self) -> None:
        scope = guarded()
        contexts = [contextvars.copy_context() for _ in range(3)]
        for context in contexts:
            context.run(scope.__enter__)
        assert not is_on()
        assert [context.run(is_on) for context in contexts] == [True, True, True]
        contexts[0].run(scope.__exit__, None, None, None)
        assert [context.run(is_on) for context in contexts] == [False, True, True]
        scope.__exit__(None, None, None)  # from a context that never entered it
        contexts[1].run(scope.__exit__, None, None, None)
        assert [context.run(is_on) for context in contexts] == [False, False, False]

    def test_for_ever_leave_nothing_behind(self) -> None:
        last = guarded()
        last.__enter__()
        for _ in range(50):
            following = guarded()
            following.__enter__()
            last.__exit__(None, None, None)
            last = following
        depth, scope = 0, interception.current()
        while scope is not None:
            depth, scope = depth + 1, scope.around
        last.__exit__(None, None, None)
        assert depth == 1
        assert interception.current() is None


def test_install_inside_a_scope_is_not_skipped_and_outlives_it() -> None:
    """Or is undone there; either way the other goes on, and originals are torch's own."""
    add, resize_ = torch.add, torch.Tensor.resize_
    with guarded(data=True):
        assert torchguard.get_original("torch.add") is add
        assert torchguard.get_original("torch.Tensor.resize_") is resize_
        installation = torchguard.install("resize", "out")
        assert installation.skipped == {}
        assert spoiled() == [0, 0]
    assert torchguard.installed() == ("resize", "out")
    assert is_on()
    with guarded(data=True):
        assert spoiled() == [0, 0]
        installation.uninstall()
        assert torchguard.installed() == ()
        assert is_on()
    assert not is_on()


def test_the_first_scope_may_be_opened_under_install_and_import_dynamo() -> None:
    """What a scope guards is found out once per process, from torch's own functions."""
    program = """
        import sys
        import numpy as np, torch, torchguard

        def shape_after(data):
            out = torch.from_numpy(np.empty(0, dtype=np.float32))
            with torchguard.guarded(data=data):
                try:
                    torch.add(torch.ones(3), 1, out=out)
                except RuntimeError:
                    return tuple(out.shape)

        with torchguard.install("resize", "out"):
            assert (shape_after(False), shape_after(True)) == ((0,), (0,))
        assert (shape_after(False), shape_after(True)) == ((0,), (0,))

        assert "torch._dynamo" not in sys.modules
        graphs = []
        def backend(graph, _):
            graphs.append(graph)
            return graph.forward
        with torchguard.guarded():
            function = torch.compile(lambda x: x.add(1).mul(2), backend=backend)
            assert function(torch.ones(2)).tolist() == [4, 4]
        assert function(torch.ones(2)).tolist() == [4, 4]
        from torch._dynamo import eval_frame
        code = getattr(eval_frame._maybe_set_eval_frame, "__code__", None)
        assert "torchguard" not in getattr(code, "co_filename", "")
        print(len(graphs))
    """
    assert output_of(program).split() == ["1"]


def open_many() -> None:
    """A program that opens scopes in a loop keeps Tensor's guarded methods between them."""
    for _ in range(100):
        with guarded():
            pass


def test_what_many_scopes_keep_does_nothing_outside() -> None:
    """A failing write outside moves no version counter; in the next scope it does."""
    open_many()
    methods = vars(torch.Tensor)["add_"]
    tensor = torch.zeros(3)

    def fail() -> int:
        before = tensor._version
        with pytest.raises(IndexError):
            tensor[[0, 9]] = 1.0
        return tensor._version - before

    assert fail() == 0
    with guarded():
        assert fail() > 0
        # Since Python 3.13 a class that has changed 1,000 times loses the interpreter's cache.
        assert vars(torch.Tensor)["add_"] is methods
    assert fail() == 0


def test_install_beside_what_many_scopes_keep_and_uninstall() -> None:
    """install() finds torch's own functions below; uninstall() takes away what no scope needs."""
    before, torchs = dict(vars(torch.Tensor)), torch.Tensor.resize_
    open_many()
    with torchguard.install("resize"):
        assert torchguard.installed() == ("resize",)
        assert torchguard.get_original("torch.Tensor.resize_") is torchs
        tensor = locked([1.0])
        outcome_of(lambda: tensor.resize_(100))
        assert tensor.shape == (1,)
    with guarded():
        torchguard.uninstall()
        assert "add_" in vars(torch.Tensor)
    torchguard.uninstall()
    assert dict(vars(torch.Tensor)) == before


@pytest.mark.parametrize("scope", [guarded, torchguard.install])
def test_a_typed_storage_is_read_without_a_warning(
    scope: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """copy.deepcopy gives ``set_`` one; torch warns of it once in a process."""
    warned: list[int] = []
    monkeypatch.setattr(torch.storage, "_warn_typed_storage_removal", lambda *_: warned.append(1))
    with scope():
        copied = copy.deepcopy(torch.ones(2))
    assert copied.tolist() == [1.0, 1.0]
    assert warned == []
