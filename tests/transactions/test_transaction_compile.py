"""transaction() around compiled code: the same bits and the same graphs as without it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import torchguard
from support.training import Failure
from torchguard.transactions.step import Transaction

PLACES = ("forward", "backward", "between the optimizers", "after the optimizers")


def batch(number: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


def train(
    *, guarded: bool, failing: str | None = None, step_compiled: bool = False
) -> tuple[list[Any], int]:
    """Train four steps, the third of which fails once; return all state, and the graphs made.

    A step that raises before both optimizers have stepped is taken again, as its rollback allows.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2)
    )
    first = torch.optim.AdamW(model[0].parameters(), lr=0.01, foreach=True)
    second = torch.optim.SGD([*model[1].parameters(), *model[4].parameters()], 0.01, momentum=0.9)
    compiled: Any = torch.compile(model, backend=counter)
    steps: list[Callable[[], Any]] = [first.step, second.step]
    if step_compiled:
        steps = [torch.compile(each, backend=counter) for each in steps]
    undo: Any = "copy" if step_compiled else "auto"
    block = torchguard.transaction(model, [first, second], undo=undo) if guarded else nullcontext()

    def one_step(number: int, fails: str | None) -> None:
        def reach(place: str) -> None:
            if place == fails:
                raise Failure

        with block:
            loss = compiled(batch(number)).square().mean()
            reach("forward")
            loss.backward()
            reach("backward")
            steps[0]()
            reach("between the optimizers")
            steps[1]()
            reach("after the optimizers")
        assert not isinstance(block, Transaction) or block.committed
        first.zero_grad()
        second.zero_grad()

    for number in range(4):
        if number == 2 and failing is not None:
            with pytest.raises(Failure):
                one_step(number, failing)
            # A failure after the optimizers leaves a step that counts; where the step is compiled,
            # its hooks do not run, and all of it is undone.
            if isinstance(block, Transaction) and block.committed:
                assert failing == "after the optimizers"
                first.zero_grad()
                second.zero_grad()
                continue
        one_step(number, None)
    tensors = [value.clone() for value in model.state_dict().values()]
    for optimizer in (first, second):
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return [*tensors, torch.get_rng_state()], counter.frame_count


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


STEPS = pytest.mark.parametrize("step_compiled", [False, True], ids=["eager step", "compiled step"])


@functools.cache
def never_failed(step_compiled: bool) -> tuple[list[Any], int]:
    return train(guarded=False, step_compiled=step_compiled)


@STEPS
def test_success_differs_in_no_bit_and_no_graph(step_compiled: bool) -> None:
    """Compared with the same loop without a transaction."""
    clean, graphs = never_failed(step_compiled)
    found, its_graphs = train(guarded=True, step_compiled=step_compiled)
    assert same(found, clean)
    assert its_graphs == graphs > 0


@STEPS
@pytest.mark.parametrize("failing", PLACES)
def test_a_step_that_fails_is_as_if_it_had_not_begun(failing: str, step_compiled: bool) -> None:
    """Compared with a run that never failed; without a transaction it is another one."""
    clean, _ = never_failed(step_compiled)
    found, _ = train(guarded=True, failing=failing, step_compiled=step_compiled)
    assert same(found, clean)
    if failing == "backward":
        bare, _ = train(guarded=False, failing=failing, step_compiled=step_compiled)
        assert not same(bare, clean)


def whole(model: Any, optimizer: Any) -> Any:
    def train() -> None:
        model(batch(0)).square().mean().backward()
        optimizer.step()

    return torch.compile(train, backend="eager")


def argument(_: Any, optimizer: Any) -> Any:
    def step(each: Any) -> None:
        each.step()

    return functools.partial(torch.compile(step, backend="eager"), optimizer)


Compiled = Callable[[Any, Any], Callable[[], Any]]
WAYS: dict[str, Compiled] = {
    "method": lambda _, o: torch.compile(o.step, backend="eager"),
    "function": lambda _, o: torch.compile(lambda: (o.step(), None)[1], backend="eager"),
    "argument": argument,
    "whole step": whole,
}


class Own(torch.optim.Optimizer):
    """Its step is one graph, unlike that of PyTorch's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "of one's own": Own,
}


# Each value of one column meets each of every other one.
CASES = [
    pytest.param(way, kind, bool((i + j) % 2), bool((i + j // 2) % 2), id=f"{way}, {kind}")
    for i, way in enumerate(WAYS)
    for j, kind in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("way", "kind", "warm", "installed"), CASES)
def test_a_compiled_step_is_refused_before_it_writes(
    way: str, kind: str, warm: bool, installed: bool
) -> None:
    """Also one that was compiled before its transaction was made. undo="copy" has it."""
    if installed:  # and gone again: Dynamo leaves our frames alone from the first time on
        torchguard.install("resize").uninstall()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = WAYS[way](model, optimizer)
    other = nn.Linear(2, 2)
    step_of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    other_block = torchguard.transaction(other, step_of_other)

    def train(block: Any) -> None:
        with block:
            if way != "whole step":
                model(batch(0)).square().mean().backward()
            step()

    if warm:
        train(nullcontext())
    block = torchguard.transaction(model, optimizer)
    before = model.weight.detach().clone()
    for _ in range(2):
        with pytest.raises(TypeError, match=r"is compiled.*undo='copy'"):
            train(block)
        assert torch.equal(model.weight, before)
    assert block.stats().rollbacks == {"TypeError": 2}
    del block
    gc.collect()
    copying = torchguard.transaction(model, optimizer, undo="copy")
    for _ in range(2):
        train(copying)
        assert copying.committed
        assert not torch.equal(model.weight, before)
    # Nothing else in the process is another one for it.
    with other_block:
        other(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            other.weight.mul_(0.5)
    assert not other_block.committed
    with other_block:
        step_of_other.step()
        assert other_block._blocks[0].snapshot._copies is None
    assert other_block.committed


def test_a_compiled_step_of_ones_own_is_one_graph_beside_a_transaction_of_another() -> None:
    torch._dynamo.reset()
    model, other = nn.Linear(6, 2), nn.Linear(6, 2)
    block = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = Own(other.parameters())
    other(batch(0)).sum().backward()
    torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    assert block.stats().commits == 0


def test_an_optimizer_is_not_taken_for_a_compiled_one_whose_id_it_has_got() -> None:
    """A block that only writes parameters does not count."""
    torch._dynamo.reset()
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    block = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
    compiled, later = (torch.optim.SGD(other.parameters(), lr=0.1) for _ in range(2))
    other(torch.ones(1, 2)).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchguard.transactions.hooks.id", lambda _: 7, raising=False)
        torch.compile(compiled.step, backend="eager")()
        new = torchguard.transaction(other, later)
        with new, torch.no_grad():
            other.weight.mul_(0.5)
    assert not new.committed
    assert not block.committed


def test_a_transaction_can_be_collected_while_another_step_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo has seen the hooks of the transaction, and looks them up when it makes its guards."""
    from torch._dynamo import guards  # noqa: PLC0415  compiles nothing else in this file

    torch._dynamo.reset()
    model = nn.Linear(2, 2)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    cycle: list[Any] = [torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))]
    cycle.append(cycle)
    make: Any = guards.CheckFunctionManager.__init__

    def collect_first(*given: Any, **options: Any) -> None:
        cycle.clear()
        gc.collect()
        make(*given, **options)

    monkeypatch.setattr(guards.CheckFunctionManager, "__init__", collect_first)
    model(torch.ones(1, 2)).sum().backward()
    torch.compile(other.step, backend="eager")()
    assert not cycle
