"""Buckets.fit against brute force with every option; max_padding= bounds the padding seen."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchguard import BucketBatchSampler, Buckets

PRICES: dict[str, Callable[[int], float]] = {"linear": lambda n: n, "quadratic": lambda n: n * n}


def held(ladder: Iterable[int], sizes: Iterable[int]) -> dict[int, int]:
    """The bucket of each size."""
    return {size: min(each for each in ladder if each >= size) for size in sizes}


def allowed(ladder: Iterable[int], sizes: Iterable[int], share: float | None) -> bool:
    most = math.inf if share is None else (1 + share) * (1 + 1e-12)
    return all(bucket <= size * most for size, bucket in held(ladder, sizes).items())


@settings(max_examples=300)
@given(
    seen=st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1, max_size=5),
    count=st.sampled_from([1, 2, 3, 4, None, None]),
    cost=st.one_of(
        st.sampled_from(["linear", "quadratic"]),
        st.lists(st.integers(1, 30), min_size=30, max_size=30),
    ),
    step=st.sampled_from([1, 2, 3, 8]),
    above=st.sampled_from([None, 0, 3]),
    share=st.sampled_from([None, None, 0.0, 0.15, 0.25, 0.5, 1.0, 3.0]),
    free=st.sets(st.integers(1, 16), max_size=3),
)
def test_the_ladder_is_the_best_of_all(
    seen: dict[int, int],
    count: int | None,
    cost: Any,
    step: int,
    above: int | None,
    share: float | None,
    free: set[int],
) -> None:
    """Also where a cost falls; with a bound, an error says how many buckets it takes."""
    price = PRICES[cost] if isinstance(cost, str) else cost.__getitem__
    maximum = None if above is None else max(seen) + above
    options: dict[str, Any] = {"multiple_of": step, "maximum": maximum, "prior": 0}
    options |= {"cost": cost if isinstance(cost, str) else price, "max_padding": share}
    if count is None:
        options |= {"compile_cost": 7, "step_cost": 2, "already_compiled": free}

    def total(ladder: Iterable[int]) -> float:
        running = sum(seen[size] * price(each) for size, each in held(ladder, seen).items())
        return running if count else 2 * running + 7 * sum(each not in free for each in ladder)

    top = maximum or -(-max(seen) // step) * step
    aligned = {min(-(-size // step) * step, top) for size in seen}
    if not allowed(aligned, seen, share):
        with pytest.raises(ValueError, match=f"multiple_of={step} makes"):
            Buckets.fit(seen, count, **options)
        return
    # A bound makes the largest of its sizes, aligned, the bucket.
    choices = {*(range(step, top, step) if share is None else aligned), top}
    choices |= set() if count else {size for size in free if size <= (maximum or size)}
    useful = sorted(each for each in choices if each >= min(seen))
    possible: dict[int, float] = {}
    for number in range(1, len(seen) + 2):
        for ladder in itertools.combinations(useful, number):
            if ladder[-1] >= (maximum or max(seen)) and allowed(ladder, seen, share):
                possible[number] = min(possible.get(number, math.inf), total(ladder))
    if count and min(possible) > count:
        with pytest.raises(
            ValueError, match=f"takes {min(possible)} buckets, but count is {count}"
        ):
            Buckets.fit(seen, count, **options)
        return
    found = Buckets.fit(seen, count, **options)
    assert len(found) <= (count or len(found))
    assert not count or found.sizes[-1] == top
    assert allowed(found, seen, share)
    assert total(found) == min(possible[number] for number in possible if number <= (count or 9))


def test_no_bucket_is_compiled_for_what_only_a_prior_has() -> None:
    """The alignment makes 50 of 7, so the prior reaches 50; what was seen fits the compiled 7."""
    options: Any = {"compile_cost": 10, "step_cost": 0.5, "already_compiled": [7]}
    assert Buckets.fit([1, 5, 7], None, multiple_of=50, prior=1, **options).sizes == (7,)


def test_compiled_buckets_are_used_within_the_bound_only() -> None:
    sizes = [40] * 10 + [45] * 20
    options: Any = {"compile_cost": 160, "already_compiled": [50, 58, 90]}
    assert Buckets.fit(sizes, None, max_padding=0.3, **options) == Buckets([50])
    assert Buckets.fit(sizes, None, max_padding=0.2, **options) == Buckets([45])
    assert Buckets.fit(sizes, None, max_padding=0.12, **options) == Buckets([40, 50])
    # Nor does one between the longest and the maximum take the maximum's place.
    options |= {"multiple_of": 8, "maximum": 60, "prior": 0}
    assert Buckets.fit([57], None, max_padding=0.3, **options).sizes[-1] == 60


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


def test_a_maximum_may_be_above_the_budget_of_a_batch() -> None:
    lengths = list(range(1, 500))
    ladder = Buckets.fit(lengths, 8, tokens=2048, maximum=4096)
    assert ladder.sizes[-1] == 4096
    assert len(BucketBatchSampler(lengths, ladder, tokens=2048)) > 0
    with pytest.raises(ValueError, match="tokens is 400, but one item of bucket"):
        Buckets.fit(lengths, 8, tokens=400, maximum=4096)
