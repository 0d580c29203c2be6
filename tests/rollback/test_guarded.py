"""guarded(): where a scope begins and ends, scopes that overlap, and install() inside of one."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import torchguard
from support.child_process import output_of
from support.kinds import locked
from support.ways import outcome_of
from torchguard import guarded
from torchguard.rollback import interception

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator


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
        assert not is_on()
        scope = guarded()
        for inner in (scope, guarded(), guarded(data=True)):
            with scope:
                assert is_on()
                with inner:
                    assert is_on()
                assert is_on()
            assert not is_on()

    @pytest.mark.parametrize("decorate", [guarded, guarded(), guarded(data=True)])
    def test_decorates_functions_and_methods(self, decorate: Any) -> None:
        @decorate  # type: ignore[untyped-decorator]
        def function(depth: int) -> int:
            """Documented."""
            assert is_on()
            return 0 if depth == 0 else 1 + function(depth - 1)

        class Owner:
            @decorate  # type: ignore[untyped-decorator]
            def method(self, value: bool) -> bool:
                return is_on() is value

        assert function(3) == 3
        assert (function.__name__, function.__doc__) == ("function", "Documented.")
        assert Owner().method(value=True)
        assert not is_on()

    def test_covers_the_body_of_a_generator_it_decorates(self) -> None:
        @guarded()
        def generator() -> Iterator[bool]:
            yield is_on()
            yield is_on()

        found = []
        for each in generator():
            found += [each, is_on()]
        assert found == [True, False, True, False]

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

    def test_lets_exceptions_through_and_ends(self) -> None:
        error = ValueError("mine")
        with pytest.raises(ValueError, match="mine") as caught, guarded(), guarded(data=True):
            raise error
        assert caught.value is error
        assert not is_on()

    def test_is_of_one_thread(self) -> None:
        found: list[bool] = []
        with guarded():
            thread = threading.Thread(target=lambda: found.append(is_on()))
            thread.start()
            thread.join()
        assert found == [False]

    def test_shared_by_8_threads_that_enter_and_leave_at_will(self) -> None:
        scope = guarded()
        wrong: list[str] = []
        start = threading.Barrier(8)

        def work(number: int) -> None:
            start.wait()
            try:
                for turn in range(20):
                    with scope if number % 2 else guarded(data=bool(turn % 2)):
                        if not is_on():
                            wrong.append(f"{number}.{turn} inside")
                        with scope:
                            torch.add(torch.ones(2), 1, out=torch.empty(2))
                    if is_on():
                        wrong.append(f"{number}.{turn} outside")
            except BaseException as error:  # noqa: BLE001  of a thread that is not joined
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert not is_on()

    def test_copies_only_what_an_inner_scope_asks_for(self) -> None:
        with guarded():
            assert spoiled() == [7, 0]
            with guarded(data=True):
                assert spoiled() == [0, 0]
                with guarded():
                    assert spoiled() == [0, 0]
            assert spoiled() == [7, 0]


class TestScopesThatOverlap:
    def test_of_two_tasks_are_each_its_own(self) -> None:
        found: dict[str, list[bool]] = {"first": [], "second": [], "none": []}
        turns: list[asyncio.Event] = []

        async def first() -> None:
            with guarded():
                found["first"].append(is_on())
                turns[0].set()
                await turns[1].wait()
                found["first"].append(is_on())
            found["first"].append(is_on())
            turns[2].set()

        async def second() -> None:
            await turns[0].wait()
            with guarded():
                found["second"].append(is_on())
                turns[1].set()
                await turns[2].wait()
                found["second"].append(is_on())
            found["second"].append(is_on())

        async def none() -> None:
            for turn in turns:
                await turn.wait()
                found["none"].append(is_on())

        async def run() -> None:
            turns.extend(asyncio.Event() for _ in range(3))
            await asyncio.gather(first(), second(), none())

        asyncio.run(run())
        assert found == {
            "first": [True, True, False],
            "second": [True, True, False],
            "none": [False, False, False],
        }

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

        @guarded()
        async def inside() -> None:
            found.append(is_on())
            await asyncio.sleep(0)
            found.append(is_on())

        async def outside() -> None:
            found.append(is_on())
            await asyncio.sleep(0)
            found.append(is_on())

        async def run() -> None:
            await asyncio.gather(inside(), outside())

        asyncio.run(run())
        assert found == [True, False, True, False]

    @pytest.mark.parametrize("first", [0, 1])
    def test_of_two_generators_end_in_either_order(self, first: int) -> None:
        def generator() -> Generator[None]:
            with guarded():
                yield

        generators = [generator(), generator()]
        for each in generators:
            next(each)
        assert is_on()
        generators[first].close()
        assert is_on()
        generators[1 - first].close()
        assert not is_on()

    def test_copy_as_long_as_one_that_copies_is_open(self) -> None:
        outer, inner = guarded(data=True), guarded()
        outer.__enter__()
        inner.__enter__()
        assert spoiled() == [0, 0]
        outer.__exit__(None, None, None)
        assert spoiled() == [7, 0]
        assert is_on()
        inner.__exit__(None, None, None)
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

    def test_overlapping_for_ever_leave_nothing_behind(self) -> None:
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


class TestInstallInsideAScope:
    def test_is_not_skipped_and_outlives_the_scope(self) -> None:
        with guarded():
            installation = torchguard.install("resize", "out")
            assert installation.skipped == {}
            assert torchguard.installed() == ("resize", "out")
            assert is_on()
        assert torchguard.installed() == ("resize", "out")
        assert is_on()
        installation.uninstall()
        assert not is_on()

    def test_can_be_undone_there(self) -> None:
        with torchguard.install("resize", "out") as installation:
            with guarded():
                installation.uninstall()
                assert torchguard.installed() == ()
                assert is_on()
            assert not is_on()

    def test_around_it_or_inside_copies_are_made_all_the_same(self) -> None:
        with guarded(data=True), torchguard.install():
            assert spoiled() == [0, 0]
        with torchguard.install(), guarded(data=True):
            assert spoiled() == [0, 0]

    def test_says_what_is_torchs_own(self) -> None:
        add, resize_ = torch.add, torch.Tensor.resize_
        with guarded():
            assert torchguard.get_original("torch.add") is add
            assert torchguard.get_original("torch.Tensor.resize_") is resize_


def test_the_first_scope_may_be_opened_under_install() -> None:
    """What a scope guards is found out once per process, from torch's own functions."""
    program = """
        import numpy as np, torch, torchguard

        def shape_after(data):
            out = torch.from_numpy(np.empty(0, dtype=np.float32))
            with torchguard.guarded(data=data):
                try:
                    torch.add(torch.ones(3), 1, out=out)
                except RuntimeError:
                    return tuple(out.shape)

        with torchguard.install("resize", "out"):
            print(shape_after(False), shape_after(True))
        print(shape_after(False), shape_after(True))
    """
    assert output_of(program).split() == ["(0,)"] * 4


class TestManyScopes:
    """A program that opens scopes in a loop keeps Tensor's guarded methods between them."""

    def open_many(self) -> None:
        for _ in range(100):
            with torchguard.guarded():
                pass

    def test_what_is_kept_does_nothing(self) -> None:
        """A failing write outside moves no version counter; in the next scope it does."""
        self.open_many()
        assert "add_" in vars(torch.Tensor)
        tensor = torch.zeros(3)

        def fail() -> int:
            before = tensor._version
            with pytest.raises(IndexError):
                tensor[[0, 9]] = 1.0
            return tensor._version - before

        assert fail() == 0
        with torchguard.guarded():
            assert fail() > 0
        assert fail() == 0

    def test_uninstall_takes_it_away(self) -> None:
        before = dict(vars(torch.Tensor))
        self.open_many()
        with torchguard.guarded():
            torchguard.uninstall()  # a scope is open, so it stays
            assert "add_" in vars(torch.Tensor)
        torchguard.uninstall()
        assert dict(vars(torch.Tensor)) == before

    def test_install_beside_it(self) -> None:
        """install() finds torch's own functions below, and undoing leaves them."""
        torchs = torch.Tensor.resize_
        self.open_many()
        tensor = torch.from_numpy(np.zeros(4))
        with torchguard.install("resize"):
            assert "resize" in torchguard.installed()
            assert torchguard.get_original("torch.Tensor.resize_") is torchs
            with pytest.raises(RuntimeError):
                tensor.resize_(5, 5)
            assert tensor.shape == (4,)
        torchguard.uninstall()
        assert torch.Tensor.resize_ is torchs

    def test_a_class_changes_rarely(self) -> None:
        """Since Python 3.13 a class that has changed 1,000 times loses the interpreter's cache."""
        self.open_many()
        methods = vars(torch.Tensor)["add_"]
        with torchguard.guarded():
            assert vars(torch.Tensor)["add_"] is methods


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_function_whose_signature_cannot_be_read_is_called_as_it_is() -> None:
    # Tensor.__rpow__ of torch 2.6 is one: a Python function that wraps a builtin.
    @functools.wraps(dict.update)
    def wrapping_(tensor: torch.Tensor) -> torch.Tensor:
        if torch.overrides.has_torch_function_unary(tensor):
            return torch.overrides.handle_torch_function(wrapping_, (tensor,), tensor)
        return tensor + 1

    with pytest.raises(ValueError, match="signature"):
        inspect.signature(wrapping_)
    with guarded():
        assert wrapping_(torch.ones(2)).tolist() == [2, 2]
        assert (2 ** torch.ones(2)).tolist() == [2, 2]


def test_imports_dynamo_inside_a_scope_and_compiles_there() -> None:
    program = """
        import sys, torch, torchguard
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
