"""The optimal ladder of which no bucket pads an observed size by more than a share of it.

A run of sizes i..j may have a common bucket only if that is at most ``1 + max_padding`` times the
smallest observed of them, so the run that ends at j begins in a window of sizes. The hull of
fit.py has no windows: here each is looked through, which takes D * K numpy calls.

Shapes: D distinct sizes, K buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchguard.bucketing.fit import Cost, costs_of
from torchguard.bucketing.histogram import Observed

__all__ = ["Bound", "plan_with_bound"]

_Floats: TypeAlias = NDArray[np.float64]
# 1.15 * 20 is 22.999999999999996, and 23 is 15 % more than 20.
_ROUNDING = 1 + 1e-12


class Bound(NamedTuple):
    """What :func:`plan_with_bound` is to keep to."""

    max_padding: float
    observed: Observed
    """The sizes that it is about; those planned may have a prior among them."""


class _End(NamedTuple):
    """Where a run of sizes may end, and what its bucket would be."""

    bucket: int
    position: int
    """How many sizes are not larger than the bucket."""
    first: int
    """Where the longest run begins that the bound allows."""
    cost: float
    penalty: float


def plan_with_bound(
    planned: Observed,
    bound: Bound,
    *,
    cost: Cost,
    multiple_of: int,
    top: int,
    count: int | None,
    compile_cost: float = 0.0,
    step_cost: float = 1.0,
    already_compiled: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return the cheapest ladder within a bound, of ``count`` buckets at most.

    Without ``count`` each bucket has a price, as in ``fit.plan_with_compile_cost``. A bucket is
    the largest of its sizes, aligned: no larger one, also where a cost falls.

    Raises:
        ValueError: ``count`` is too small, or a size can't be aligned within the bound.
    """
    sizes, weights = planned
    # The largest bucket has to reach top, which nobody may have seen: a size of no weight.
    if sizes[-1] < top and top - sizes[-1] >= multiple_of:
        sizes, weights = np.append(sizes, top), np.append(weights, 0.0)
    below = np.concatenate(([0.0], np.cumsum(weights)))
    # By position, the smallest observed size that a run which begins there has.
    reals = np.append(bound.observed.sizes.astype(np.float64), math.inf)
    limits = reals[np.searchsorted(reals, sizes)] * (1 + bound.max_padding) * _ROUNDING
    targets = np.minimum(-(-sizes // multiple_of) * multiple_of, top)
    paid = [(int(size), compile_cost) for size in targets]
    # What is compiled already is a bucket at no price, aligned or not.
    free = [(size, 0.0) for size in already_compiled if size >= sizes[0]]
    buckets = sorted({*paid, *free})
    prices = step_cost * costs_of([size for size, _ in buckets], cost, "Buckets.fit")
    ends = [
        _End(
            size,
            int(np.searchsorted(sizes, size, side="right")),
            int(np.searchsorted(limits, size)),
            float(price),
            penalty,
        )
        for (size, penalty), price in zip(buckets, prices, strict=True)
    ]
    _check_each(bound, multiple_of, top)
    if count is None:
        return _priced(ends, below)
    return _counted(ends, below, count, bound.max_padding)


def _check_each(bound: Bound, multiple_of: int, top: int) -> None:
    """Raise unless the alignment alone keeps to the bound."""
    sizes = bound.observed.sizes
    aligned = np.minimum(-(-sizes // multiple_of) * multiple_of, top)
    above = np.flatnonzero(aligned > sizes * (1 + bound.max_padding) * _ROUNDING)
    if above.size:
        size, bucket = int(sizes[above[0]]), int(aligned[above[0]])
        raise ValueError(
            f"Buckets.fit: max_padding is {bound.max_padding}, but multiple_of={multiple_of} makes "
            f"{bucket} of {size}, which is {100 * (bucket / size - 1):.0f} % more: pass a smaller "
            "multiple_of or a larger max_padding"
        )


def _best_begin(end: _End, reached: _Floats, below: _Floats) -> tuple[float, int]:
    """Return the least cost of all sizes up to an end, and where its run begins."""
    window = slice(end.first, end.position)
    if window.start >= window.stop:
        return math.inf, 0
    costs = reached[window] + end.cost * (below[end.position] - below[window])
    begin = int(costs.argmin())
    return float(costs[begin]) + end.penalty, end.first + begin


def _priced(ends: list[_End], below: _Floats) -> tuple[int, ...]:
    reached = np.full(len(below), math.inf)
    reached[0] = 0.0
    cuts: dict[int, tuple[int, int]] = {}
    for end in ends:
        total, begin = _best_begin(end, reached, below)
        if total < reached[end.position]:
            reached[end.position] = total
            cuts[end.position] = (begin, end.bucket)
    return _read([cuts] * len(below), len(below) - 1)


def _counted(ends: list[_End], below: _Floats, count: int, max_padding: float) -> tuple[int, ...]:
    reached = np.full(len(below), math.inf)
    reached[0] = 0.0
    least, best = math.inf, list[dict[int, tuple[int, int]]]()
    layers: list[dict[int, tuple[int, int]]] = []
    while len(layers) < len(ends):
        cuts, further = {}, np.full(len(below), math.inf)
        for end in ends:
            total, begin = _best_begin(end, reached, below)
            if total < further[end.position]:
                further[end.position] = total
                cuts[end.position] = (begin, end.bucket)
        layers.append(cuts)
        reached = further
        # Beyond count only to say in the error how many it takes.
        if len(layers) > count:
            if best:
                break
            if reached[-1] < math.inf:
                raise ValueError(
                    f"Buckets.fit: max_padding={max_padding} takes {len(layers)} buckets, but "
                    f"count is {count}: pass count={len(layers)} or more, or a larger max_padding"
                )
        elif reached[-1] < least:
            least, best = float(reached[-1]), list(layers)
    return _read(best[::-1], len(below) - 1)


def _read(layers: list[dict[int, tuple[int, int]]], position: int) -> tuple[int, ...]:
    """Walk back from the last size to the first, collecting each run's bucket."""
    found = []
    for cuts in layers:
        if not position:
            break
        position, bucket = cuts[position]
        found.append(bucket)
    return tuple(sorted(found))
