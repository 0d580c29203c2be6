"""The steps of an epoch: how many of which bucket, and which items each takes.

A step is one batch on every rank, all of one bucket. What is left over in a bucket when its
full steps are taken either makes a step that is not full, or moves up to the next larger
bucket, where it fits too. Which costs less depends on what is left over there, so all
combinations are compared, by dynamic programming over the buckets in which leftovers end:
what moves up to one of them does not depend on the others. (To decide bucket by bucket, with a
look at the next one, costs up to twelve full batches more: measured on 4,000 drawn datasets.)

Shapes: N items, K buckets in ascending order, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchguard.bucketing.fit import Cost, costs_of
from torchguard.bucketing.histogram import positive_integer

_Integers = NDArray[np.int64]


class Steps(NamedTuple):
    """How many steps of each bucket an epoch has."""

    rows: tuple[int, ...]
    """(K,) the rows of a full batch of each bucket."""

    counts: tuple[int, ...]
    """(K,) the batches of each bucket, those that are not full included."""

    ends: tuple[bool, ...]
    """(K,) whether what is left over stays in its bucket; else it moves up."""

    cost: float
    """The cost of all steps, each counted as full."""


def full_batches(
    sizes: Sequence[int],
    items: Sequence[float],
    *,
    tokens: int | None,
    batch_size: int | None,
    cost: Cost,
    operation: str,
) -> list[int]:
    """Return how many items a full batch of each size of the ladder (K,) holds.

    ``tokens`` is what a batch may cost, ``items`` (K,) how many there are of each bucket.
    """
    if (tokens is None) == (batch_size is None):
        raise ValueError(
            f"{operation}: tokens is {tokens} and batch_size is {batch_size}: pass one of them, "
            "tokens=16384 for as many items as the budget allows at the bucket's size, or "
            "batch_size=32"
        )
    if tokens is None:
        return [positive_integer(batch_size, "batch_size", operation)] * len(sizes)
    tokens = positive_integer(tokens, "tokens", operation)
    prices = costs_of(sizes, cost, operation).tolist()
    for size, price, number in zip(sizes, prices, items, strict=True):
        if number and price > tokens:
            raise ValueError(
                f"{operation}: tokens is {tokens}, but one item of bucket {size} costs {price:g}: "
                f"pass tokens={math.ceil(price)} or more, or leave such items out"
            )
    return [max(1, int(tokens // price)) for price in prices]


def count_steps(
    items: Sequence[int],
    rows: Sequence[int],
    prices: Sequence[float],
    *,
    ranks: int = 1,
    drop_last: bool = False,
) -> Steps:
    """Choose the buckets in which leftovers end, so that an epoch costs least.

    With ``drop_last`` they are dropped there, and as few as possible are. (K,) ``items`` are to be
    dealt, (K,) ``rows`` fill a batch, and (K,) ``prices`` are those of one item.
    """
    full = [ranks * each for each in rows]
    # The least cost of the first buckets, and where what ends in the last of them began.
    best, begins = [0.0, *[math.inf] * len(items)], [0] * (len(items) + 1)
    for begin in range(len(items)):
        # best[begin] is final here: nothing that begins later ends earlier.
        cost, moved = best[begin], 0
        for bucket in range(begin, len(items)):
            whole, left = divmod(items[bucket] + moved, full[bucket])
            step_cost = 0.0 if drop_last else full[bucket] * prices[bucket]
            more = 1 if left and not drop_last else 0
            at_end = cost + (whole + more) * step_cost + (left if drop_last else 0)
            # Every batch needs an item that fits no smaller bucket: BucketCollator takes the
            # bucket from the longest, and would take another one on another rank.
            if (not moved or items[bucket] >= ranks * (whole + more)) and at_end < best[bucket + 1]:
                best[bucket + 1], begins[bucket + 1] = at_end, begin
            if not left or (moved and items[bucket] < ranks * whole):
                break
            cost, moved = cost + whole * step_cost, left
    ends = [False] * len(items)
    end = len(items)
    # Walk back over the choices, from the largest bucket to the smallest.
    while end:
        ends[end - 1] = True
        end = begins[end]
    counts, moved = [], 0
    for number, each, is_end in zip(items, full, ends, strict=True):
        whole, left = divmod(number + moved, each)
        counts.append(whole + (1 if left and is_end and not drop_last else 0))
        moved = 0 if is_end else left
    total = sum(n * each * price for n, each, price in zip(counts, full, prices, strict=True))
    return Steps(tuple(rows), tuple(counts), tuple(ends), total)


def draw_steps(
    items: Sequence[_Integers],
    steps: Steps,
    ranks: int,
    random: np.random.Generator | None,
) -> Iterator[_Integers]:
    """Yield the steps, bucket by bucket: the indices (W, rows) of each.

    ``items`` (K,) are the indices of each bucket's items; ``random`` shuffles them.
    """
    moved: _Integers = np.empty(0, np.int64)
    for own, each, count, is_end in zip(items, *steps[:3], strict=True):
        shuffled = own if random is None else random.permutation(own)
        # Where others have moved up, each batch begins with an item of the bucket's own.
        first = count * ranks if moved.size else 0
        leaders = shuffled[:first]
        followers: _Integers = np.concatenate((moved, shuffled[first:]))
        if moved.size and random is not None:
            followers = random.permutation(followers)
        share = ranks * each - (ranks if first else 0)
        for number in range(count):
            leading = leaders[number * ranks : (number + 1) * ranks]
            step = np.concatenate((leading, followers[number * share : (number + 1) * share]))
            # resize repeats the first items where the ranks would not get equally many.
            yield np.resize(step, (-(-len(step) // ranks), ranks)).T
        moved = followers[:0] if is_end else followers[count * share :]
