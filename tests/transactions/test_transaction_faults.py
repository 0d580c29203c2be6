"""Each operator of a training step fails in turn, and the batch is tried again."""

from __future__ import annotations

import pytest

from support.fault_injection import (
    Case,
    Count,
    Way,
    count,
    nothing,
    transaction,
    zero_grad,
)
from support.slow import slow_except
from support.small_training import FEATURES, covering, every_case

EVERY = 4  # operators, so that the file takes seconds
EVERY_PAIR = 37
CASES = covering(list(every_case()))
TABLE = [Case("AdamW", implementation, amp=True) for implementation in ("loop", "fused")]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "case"), [(nothing, TABLE[0]), (zero_grad, TABLE[1])])
def test_without_a_transaction_a_retry_is_wrong_or_raises_for_ever(way: Way, case: Case) -> None:
    found = count(case, way, every=4 * EVERY)
    assert found.wrong > found.points / 3
    assert found.stuck > 0


@pytest.mark.parametrize("case", slow_except(TABLE, str(TABLE[1])), ids=str)
def test_with_a_transaction_nothing_is_wrong_and_nothing_raises_again(case: Case) -> None:
    found = count(case, transaction, every=EVERY, restores=True)
    assert found.points > 50
    assert (found.wrong, found.stuck, found.not_restored) == (0, 0, 0), found.examples


@pytest.mark.parametrize("feature", slow_except(FEATURES, "plain"))
def test_it_holds_for_each_pair_of_optimizer_and_surroundings(feature: str) -> None:
    """Each case begins at another operator, so that all kinds of them fail."""
    found = Count()
    for offset, case in enumerate(case for case in CASES if case.feature == feature):
        found += count(case, transaction, every=EVERY_PAIR, offset=offset, restores=True)
    assert (found.wrong, found.stuck, found.not_restored) == (0, 0, 0), found.examples
    assert found.committed < found.points
