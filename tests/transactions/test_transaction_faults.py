"""Each operator of a training step fails in turn, and the batch is tried again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.fault_injection import (
    FEATURES,
    Case,
    Count,
    Way,
    composer,
    count,
    covering,
    deep_copy,
    every_case,
    nothing,
    transaction,
    zero_grad,
)

EVERY = 3  # operators, so that the file takes seconds; bench_transaction.py --faults takes all
EVERY_PAIR = 23
CASES = covering(list(every_case()))
TABLE = [Case("AdamW", implementation, amp=True) for implementation in ("loop", "fused")]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Operators of a few hundred elements are slower with threads, by twenty times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def total(way: Way, cases: list[Case], *, every: int = EVERY, restores: bool = False) -> Count:
    """Add up the cases; each begins at another operator, so that all kinds of them fail."""
    found = Count()
    for offset, case in enumerate(cases):
        found += count(case, way, every=every, offset=offset, restores=restores)
    return found


@pytest.mark.parametrize("case", TABLE, ids=str)
@pytest.mark.parametrize("way", [nothing, zero_grad, composer])
def test_without_a_transaction_a_retry_is_wrong_or_raises_for_ever(way: Way, case: Case) -> None:
    found = total(way, [case], every=5)
    assert found.wrong > found.points / 3
    assert found.stuck > 0


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_a_copy_of_everything_shows_that_zero_can_be_reached(case: Case) -> None:
    found = total(deep_copy, [case], every=5, restores=True)
    assert (found.wrong, found.stuck, found.not_restored) == (0, 0, 0), found.examples


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_with_a_transaction_nothing_is_wrong_and_nothing_raises_again(case: Case) -> None:
    found = total(transaction, [case], restores=True)
    assert found.points > 50
    assert (found.wrong, found.stuck, found.not_restored) == (0, 0, 0), found.examples


@pytest.mark.parametrize("feature", FEATURES)
def test_it_holds_for_each_pair_of_optimizer_and_surroundings(feature: str) -> None:
    cases = [case for case in CASES if case.feature == feature]
    found = total(transaction, cases, every=EVERY_PAIR, restores=True)
    assert (found.wrong, found.stuck, found.not_restored) == (0, 0, 0), found.examples
    assert found.committed < found.points


def test_the_cases_cover_each_pair_of_values() -> None:
    assert {case.feature for case in CASES} == {case.feature for case in every_case()}
    assert {(case.optimizer, case.implementation) for case in CASES} == {
        (case.optimizer, case.implementation) for case in every_case()
    }
    assert len(CASES) < len(list(every_case())) / 5
