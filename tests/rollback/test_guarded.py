"""guarded(): where a scope begins and ends, and what it leaves as it is."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from support.child_process import output_of
from support.kinds import empty_locked, plain
from support.scopes import is_on
from torchguard import guarded
from torchguard._torch.mutation import writes_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class TestAScope:
    def test_is_off_outside_so_these_tests_can_fail(self) -> None:
        assert not is_on()

    def test_ends_where_it_ends(self) -> None:
        with guarded():
            assert is_on()
        assert not is_on()

    def test_may_be_nested(self) -> None:
        with guarded():
            with guarded():
                assert is_on()
            assert is_on()
            with guarded(data=True):
                assert is_on()
            assert is_on()
        assert not is_on()

    def test_object_may_be_used_again_and_inside_itself(self) -> None:
        scope = guarded()
        for _ in range(2):
            with scope:
                with scope:
                    assert is_on()
                assert is_on()
            assert not is_on()

    def test_decorates_a_function_and_keeps_its_name(self) -> None:
        @guarded()
        def function(value: int) -> int:
            """Documented."""
            assert is_on()
            return value + 1

        assert function(1) == 2
        assert function.__name__ == "function"
        assert function.__doc__ == "Documented."
        assert not is_on()

    def test_decorates_a_function_that_calls_itself(self) -> None:
        @guarded()
        def function(depth: int) -> bool:
            return is_on() and (depth == 0 or function(depth - 1))

        assert function(3)
        assert not is_on()

    def test_decorates_a_method(self) -> None:
        class Owner:
            @guarded()
            def method(self, value: bool) -> bool:
                return is_on() is value

        assert Owner().method(value=True)

    def test_covers_the_body_of_a_generator_it_decorates(self) -> None:
        @guarded()
        def generator() -> Iterator[bool]:
            yield is_on()
            yield is_on()

        found = []
        for each in generator():
            found += [each, is_on()]
        assert found == [True, False, True, False]

    def test_covers_the_body_of_a_coroutine_it_decorates_or_refuses(self) -> None:
        import asyncio  # noqa: PLC0415

        async def coroutine() -> bool:
            return is_on()

        try:
            inside = guarded()(coroutine)
        except TypeError as refused:
            assert "async" in str(refused)  # noqa: PT017  either is right; silence is not
        else:
            assert asyncio.run(inside())
        assert not is_on()

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

    def test_inside_which_another_thread_leaves_its_own_goes_on(self) -> None:
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with guarded():
                inside.set()
                leave.wait(10)

        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(10)
        with guarded():
            leave.set()
            thread.join()
            assert is_on()

    def test_copies_only_what_an_inner_scope_asks_for(self) -> None:
        def spoil(tensor: torch.Tensor) -> list[float]:
            with pytest.raises(IndexError):
                tensor.index_put_((torch.tensor([0, 99]),), torch.tensor(7.0))
            return tensor.tolist()

        with guarded():
            assert spoil(torch.zeros(2)) == [7, 0]
            with guarded(data=True):
                assert spoil(torch.zeros(2)) == [0, 0]
                with guarded():
                    assert spoil(torch.zeros(2)) == [0, 0]
            assert spoil(torch.zeros(2)) == [7, 0]


def test_copies_and_pickles_are_made_inside_as_outside() -> None:
    import io  # noqa: PLC0415

    module = torch.nn.Linear(2, 2)
    with guarded(data=True):
        twin = copy.deepcopy(module)
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        twin.load_state_dict(torch.load(file))
        loss = twin(torch.ones(1, 2)).sum()
        loss.backward()
        torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert twin.weight.grad is not None
    assert not torch.equal(twin.weight, module.weight)


def test_is_seen_by_the_fixture_if_it_does_not_end() -> None:
    from conftest import residue  # noqa: PLC0415

    scope = guarded()
    scope.__enter__()
    assert residue() != []
    scope.__exit__(None, None, None)
    assert residue() == []


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


def test_empty_plain_kinds_are_what_these_tests_think() -> None:
    assert plain().numel() == 6
    assert empty_locked(torch.float32).is_contiguous()


@pytest.mark.parametrize("name", ["add_", "mul_", "copy_", "div_", "zero_", "addcmul_"])
def test_everyday_in_place_methods_take_the_short_way(name: str) -> None:
    # add_ and mul_ have overloads for lists, which are TorchScript's alone.
    writes = writes_of(getattr(torch.Tensor, name))
    assert writes is not None
    assert writes.only_first


def test_what_writes_more_than_its_first_argument_does_not() -> None:
    for function in (torch.ops.aten.batch_norm.default, torch.ops.aten.sort.values):
        writes = writes_of(function)
        assert writes is not None
        assert not writes.only_first
