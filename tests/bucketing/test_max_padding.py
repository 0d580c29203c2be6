"""Buckets.fit(max_padding=): no size observed is padded by more than a share of it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchguard import Buckets

SIZES = st.lists(st.integers(1, 24), min_size=1, max_size=7)


def allowed(ladder: Iterable[int], sizes: Iterable[int], share: float) -> bool:
    buckets = Buckets(ladder)
    return all(buckets.bucket_for(size) <= size * (1 + share) * (1 + 1e-12) for size in sizes)


def brute(
    sizes: list[int], share: float, step: int, cost: Any, maximum: int | None
) -> dict[int, float]:
    """Return the least cost of each number of buckets, by trying all ladders."""
    top = maximum or -(-max(sizes) // step) * step
    candidates = sorted({min(-(-size // step) * step, top) for size in sizes} - {top})
    found: dict[int, float] = {}
    for count in range(len(candidates) + 1):
        for inner in itertools.combinations(candidates, count):
            ladder = Buckets([*inner, top])
            if allowed(ladder, sizes, share):
                total = sum(cost(ladder.bucket_for(size)) for size in sizes)
                found[count + 1] = min(found.get(count + 1, total), total)
    return found


COSTS: dict[str, Any] = {
    "linear": lambda n: n,
    "quadratic": lambda n: n * n,
    "falls": lambda n: n + 20 * (n % 3),
}


@settings(deadline=None, max_examples=300)
@given(
    sizes=SIZES,
    share=st.sampled_from([0.0, 0.15, 0.25, 0.5, 1.0, 3.0]),
    step=st.sampled_from([1, 2, 8]),
    count=st.integers(1, 7),
    cost=st.sampled_from(sorted(COSTS)),
    above=st.sampled_from([None, 0, 9]),
)
def test_the_ladder_is_the_best_of_all_within_the_bound(
    sizes: list[int], share: float, step: int, count: int, cost: str, above: int | None
) -> None:
    """Against brute force; where there is none, the error says how many buckets it takes."""
    maximum = None if above is None else max(sizes) + above
    given_cost: Any = COSTS[cost] if cost == "falls" else cost
    possible = brute(sizes, share, step, COSTS[cost], maximum)

    def fit(**options: Any) -> Buckets:
        return Buckets.fit(
            sizes, multiple_of=step, maximum=maximum, prior=0, max_padding=share,
            cost=given_cost, **options,
        )  # fmt: skip

    if not possible:
        with pytest.raises(ValueError, match=f"multiple_of={step} makes"):
            fit(count=count)
        return
    if min(possible) > count:
        with pytest.raises(
            ValueError, match=f"takes {min(possible)} buckets, but count is {count}"
        ):
            fit(count=count)
    else:
        ladder = fit(count=count)
        assert len(ladder) <= count
        assert allowed(ladder, sizes, share)
        total = sum(COSTS[cost](ladder.bucket_for(size)) for size in sizes)
        assert total == pytest.approx(min(c for k, c in possible.items() if k <= count))
    priced = fit(count=None, compile_cost=7)
    assert allowed(priced, sizes, share)
    total = sum(COSTS[cost](priced.bucket_for(size)) for size in sizes) + 7 * len(priced)
    assert total == pytest.approx(min(c + 7 * k for k, c in possible.items()))


@settings(deadline=None, max_examples=100)
@given(sizes=SIZES, count=st.integers(1, 7))
def test_a_bound_that_nothing_reaches_changes_nothing(sizes: list[int], count: int) -> None:
    loose = Buckets.fit(sizes, count, max_padding=1000)
    assert loose.waste(sizes) == pytest.approx(Buckets.fit(sizes, count).waste(sizes))


def test_compiled_buckets_are_used_within_the_bound_only() -> None:
    sizes = [40] * 10 + [45] * 20
    options: Any = {"compile_cost": 160, "already_compiled": [50, 90]}
    assert Buckets.fit(sizes, None, max_padding=0.3, **options) == Buckets([50])
    assert Buckets.fit(sizes, None, max_padding=0.2, **options) == Buckets([45])
    assert Buckets.fit(sizes, None, max_padding=0.12, **options) == Buckets([40, 50])


def test_a_prior_is_not_bound() -> None:
    """Between what was seen and the maximum there may be anything; that is no padding seen."""
    sizes = Counter({10: 5, 11: 5})
    ladder = Buckets.fit(sizes, 3, maximum=1000, max_padding=0.1)
    assert ladder.sizes[-1] == 1000
    assert allowed(ladder, sizes, 0.1)


@pytest.mark.parametrize("share", [-0.1, float("nan"), float("inf"), "0.25", True])
def test_a_bad_share_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match=r"max_padding is .*, expected a share from 0 on"):
        Buckets.fit([3, 9], max_padding=share)
