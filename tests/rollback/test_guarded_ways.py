"""guarded() leaves code on its way: fast paths, recorded graphs, other tasks, install() inside."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchguard
from support.child_process import output_of
from support.kinds import locked
from support.ways import outcome_of
from torchguard import guarded
from torchguard.rollback import interception

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "guarded": guarded,
    "guarded(data=True)": lambda: guarded(data=True),
}
each_scope = pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)


def is_on() -> bool:
    """Whether a failing operation is undone here: resize_, an index write, and out=."""
    tensor, out = locked([1.0]), torch.empty(0)
    outcome_of(lambda: tensor.resize_(100))
    outcome_of(lambda: torch.index_select(torch.ones(3), 0, torch.tensor([99]), out=out))
    assert (tensor.shape == (1,)) == (out.shape == (0,))
    return tensor.shape == (1,)


def _encoder(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    found: torch.Tensor = encoder(x, src_key_padding_mask=padding)
    return found


def _encoder_layer(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()(x)
    return found


def _attention(x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    found, weights = attention(x, x, x, key_padding_mask=padding)
    return torch.cat([found.flatten(), weights.flatten()])


def _convolutions(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    layers = (nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.5, True))
    network = nn.Sequential(*layers, nn.Hardswish(inplace=True), nn.InstanceNorm1d(4))
    found: torch.Tensor = network.train()(x)
    return found


def _recurrent(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = nn.LSTM(8, 4, batch_first=True)(x)[0]
    return found


MODULES = (_encoder, _encoder_layer, _attention, _convolutions, _recurrent)


@each_scope
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_modules_compute_bit_for_bit_what_they_compute_outside(
    module: Callable[..., torch.Tensor], scope: Callable[[], AbstractContextManager[Any]]
) -> None:
    found = []
    for each in (nullcontext, scope):
        torch.manual_seed(0)
        x = torch.randn(2, 4, 8)
        padding = torch.tensor([[False, False, False, True], [False, False, True, True]])
        with torch.no_grad(), each():
            found.append(module(x, padding))
    assert torch.equal(found[0], found[1])


@each_scope
def test_code_that_asks_for_overrides_finds_none(
    scope: Callable[[], AbstractContextManager[Any]],
) -> None:
    """All that asks ``has_torch_function`` for its way, in torch and elsewhere, asks these."""
    x = torch.ones(2)
    with scope():
        assert not torch.overrides.has_torch_function((x, nn.Parameter(x)))
        assert not torch.overrides.has_torch_function_unary(x)
        assert not torch.overrides.has_torch_function_variadic(x, x)
        assert torch._C._len_torch_function_stack() == 0
        assert not torch._C._is_torch_function_mode_enabled()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.1, centered=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_end_bit_for_bit_where_they_end_outside(name: str) -> None:
    found = []
    for scope in (nullcontext, *SCOPES.values()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = OPTIMIZERS[name](model.parameters())
        x = torch.randn(8, 4)

        def closure(
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            x: torch.Tensor = x,
        ) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return float(loss.detach())

        with scope():
            for _ in range(3):
                optimizer.step(closure)
        found.append([parameter.tolist() for parameter in model.parameters()])
    assert found[1] == found[2] == found[0]


@pytest.mark.parametrize("name", ["_foreach_add_", "_foreach_mul_", "_foreach_copy_"])
def test_a_list_update_of_another_thread_is_not_guarded(name: str) -> None:
    found = []

    def work() -> None:
        found.append(getattr(torch, name))

    own = getattr(torch, name)
    with guarded():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert getattr(torch, name) is not own
    assert found == [own]


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
        def spoil() -> list[float]:
            tensor = torch.zeros(2)
            outcome_of(lambda: tensor.index_put_((torch.tensor([0, 9]),), torch.tensor(7.0)))
            return tensor.tolist()

        outer, inner = guarded(data=True), guarded()
        outer.__enter__()
        inner.__enter__()
        assert spoil() == [0, 0]
        outer.__exit__(None, None, None)
        assert spoil() == [7, 0]
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
        for first, second in ((guarded, torchguard.install), (torchguard.install, guarded)):
            tensor = torch.zeros(2)
            with (
                first(**({"data": True} if first is guarded else {})),
                second(**({"data": True} if second is guarded else {})),
            ):
                outcome_of(lambda: tensor.index_put_((torch.tensor([0, 9]),), torch.tensor(7.0)))  # noqa: B023
            assert tensor.tolist() == [0, 0]

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
