"""Every allocation of two steps runs out of memory in turn, and the batch is tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fake_device as fake
import pytest
import torch

import torchguard
from support.fault_injection import transaction
from support.small_training import Case, Training, differences, identity_of, state_of

EVERY = 41  # allocations, so that the file takes seconds; all of them in the slow test
STAYS_FULL, COMES_BACK = 2**60, 1
CASES = [
    Case("AdamW", "foreach", device="cuda", feature="dropout"),
    Case("AdamW", "fused", device="cuda"),
    Case("AdamW", "fused", amp=True, device="cuda"),
    Case("AdamW", "foreach", amp=True, device="cuda", feature="accumulation"),
    Case("SGD", "foreach", device="cuda", feature="shared"),
    Case("AdamW", "capturable", device="cuda"),
]


def steps_of(case: Case) -> tuple[Training, list[Callable[[], None]]]:
    training = Training(case)
    return training, [*training.blocks, *training.blocks]


def run(case: Case) -> tuple[list[dict[str, Any]], int]:
    """Return the state after each of two steps without a failure, and the allocations of both."""
    training, steps = steps_of(case)
    states = []
    for step in steps:
        step()
        states.append(state_of(training))
    training, steps = steps_of(case)
    guard = transaction(training)
    before = fake.counts()
    for step in steps:
        with guard:
            step()
    assert differences(state_of(training), states[-1]) == []
    return states, fake.counts().since(before).allocations


def one_point(case: Case, at: int, count: int, expected: list[dict[str, Any]]) -> Iterator[str]:
    """Fail once in two steps; yield what is wrong.

    The copies of a transaction and the checks of its first two steps do without the memory.
    """
    training, steps = steps_of(case)
    guard, failed = transaction(training), False
    for step, after in zip(steps, expected, strict=True):
        before = state_of(training) | identity_of(training)
        try:
            with fake.failing(at, 0 if failed else count), guard:
                used = fake.counts()
                step()
                at -= fake.counts().since(used).allocations
        except torch.OutOfMemoryError:
            failed = True
            if not guard.committed:  # type: ignore[attr-defined]
                now = state_of(training) | identity_of(training)
                yield from (f"not restored: {each}" for each in differences(now, before))
                with guard:
                    step()
        yield from (f"differs: {each}" for each in differences(state_of(training), after))


def sweep(case: Case, every: int, offset: int = 0) -> list[str]:
    states, allocations = run(case)
    return [
        f"{case} at {at} of {allocations}, {count} fail: {each}"
        for at in range(offset, allocations, every)
        for count in (COMES_BACK, STAYS_FULL)
        for each in one_point(case, at, count, states)
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_without_memory_is_as_if_it_had_not_begun(case: Case) -> None:
    assert sweep(case, EVERY, offset=CASES.index(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_holds_at_every_allocation(case: Case) -> None:
    assert sweep(case, 1) == []


def test_without_a_transaction_it_does_not_hold() -> None:
    """The device and the comparison see what a retry on its own leaves."""
    case = CASES[1]
    training = Training(case)
    (step,), before = training.blocks, fake.counts()
    step()
    half = fake.counts().since(before).allocations // 2
    expected = state_of(training)
    training = Training(case)
    with fake.failing(half), pytest.raises(torch.OutOfMemoryError):
        step = training.blocks[0]
        step()
    step()
    assert differences(state_of(training), expected)


# ---- run(retry="halve") ----

HALVED = [Case("AdamW", each, device="cuda") for each in ("foreach", "capturable", "fused")]


class Halving:
    """Two steps of ``run(retry="halve")``, of which the second runs out of memory."""

    def __init__(self, case: Case) -> None:
        self.training = Training(case)
        self.step = torchguard.transaction(self.training.model, self.training.optimizers)
        self.run(0)

    def run(self, number: int, parts: int = 1) -> dict[str, Any]:
        def loss_of(batch: Any) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.training.model(batch[0]), batch[1])

        self.step.run(loss_of, self.training.batches[number], parts=parts, retry="halve")
        return state_of(self.training)

    def one_point(self, at: int, count: int, expected: list[dict[str, Any]]) -> Iterator[str]:
        """Let memory run out in the second step; yield what is wrong."""
        before = state_of(self.training) | identity_of(self.training)
        try:
            with fake.failing(at, count):
                found = self.run(1)
        except torch.OutOfMemoryError:
            now = state_of(self.training) | identity_of(self.training)
            yield from (f"not restored: {each}" for each in differences(now, before))
            found = self.run(1)
        # Parts are one or the other for all of a step, and not for each tensor.
        wrong = [differences(found, each) for each in expected]
        yield from min(wrong, key=len)


def sweep_halving(case: Case, every: int, offset: int) -> list[str]:
    """Fail at every so many allocations of the second step; parts may be of 4, 2 or 1 samples."""
    expected = [Halving(case).run(1, parts) for parts in (1, 2, 4)]
    whole = Halving(case)
    before = fake.counts()
    whole.run(1)
    allocations = fake.counts().since(before).allocations
    return [
        f"{case} at {at} of {allocations}, {count} fail: {each}"
        for at in range(offset, allocations, every)
        for count in (COMES_BACK, STAYS_FULL)
        for each in Halving(case).one_point(at, count, expected)
    ]


@pytest.mark.filterwarnings("ignore:.*a batch of 4 samples ran out of memory")
@pytest.mark.parametrize("case", HALVED, ids=str)
def test_a_batch_without_memory_is_run_in_parts_or_not_at_all(case: Case) -> None:
    assert sweep_halving(case, EVERY, offset=5) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*a batch of 4 samples ran out of memory")
@pytest.mark.parametrize("case", HALVED, ids=str)
def test_parts_hold_at_every_allocation(case: Case) -> None:
    assert sweep_halving(case, 1, offset=0) == []
