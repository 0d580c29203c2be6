"""The optimal ladder of bucket sizes for observed sizes: a dynamic program.

With the sizes sorted, a bucket serves a run of them, so the best way to serve the
first j of them with k buckets ends with some run i..j at the cost of its largest:

    D[k, j] = min over i of  D[k-1, i] + cost(size[j]) * (W[j] - W[i])

W counts the observations below a position. For each j the candidates i are the lines
``D[k-1, i] - W[i] * x`` at ``x = cost(size[j])``, and the lowest of many lines is the lower
convex hull of the points (W[i], D[k-1, i]): O(D) for each k, not O(D^2).

That holds for a cost that never falls; another is refused.

Shapes: D distinct sizes, K buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchguard.bucketing.histogram import Observed, grouped

Cost: TypeAlias = Literal["linear", "quadratic"] | Callable[[int], float]
"""What a call at a size costs: the size, its square, or a function of it."""

_Floats: TypeAlias = NDArray[np.float64]
_Integers: TypeAlias = NDArray[np.int64]


def costs_of(sizes: Iterable[int] | _Integers, cost: Cost, operation: str) -> _Floats:
    """Ask what a call costs at each size."""
    if isinstance(cost, str) and cost in {"linear", "quadratic"}:
        linear = np.asarray(sizes, dtype=np.float64)
        return linear if cost == "linear" else linear * linear
    if not callable(cost):
        raise ValueError(  # noqa: TRY004 - a word may be of the right type
            f"{operation}: cost is {cost!r}, expected 'linear', 'quadratic' or a function of a size"
        )
    listed = np.asarray(sizes, dtype=np.int64).tolist()
    answers = [cost(size) for size in listed]
    for size, answer in zip(listed, answers, strict=True):
        if not isinstance(answer, (int, float, np.number)) or not 0 < answer < math.inf:
            raise ValueError(
                f"{operation}: cost({size}) is {answer!r}, expected a positive, finite number"
            )
    return np.array(answers, dtype=np.float64)


class FittedLadder(NamedTuple):
    """The cheapest ladder of at most so many buckets."""

    sizes: tuple[int, ...]
    cost: float


def best_ladders(
    observed: Observed,
    count: int,
    *,
    cost: Cost = "linear",
    multiple_of: int = 1,
    top: int,
) -> list[FittedLadder]:
    """Return the cheapest ladders of at most 1, 2, ... ``count`` buckets, the largest ``top``.

    There are fewer than ``count`` of them where one more bucket would save nothing.
    """
    # All sizes that the alignment gives the same bucket are one.
    # Rounded up to the alignment, and none of them past the top of the ladder.
    aligned = np.minimum(-(-np.append(observed.sizes, top) // multiple_of) * multiple_of, top)
    wanted, weights = grouped(aligned, np.append(observed.weights, 0.0))
    below = np.cumsum(weights)
    buckets, costs = wanted, costs_of(wanted, cost, "Buckets.fit")
    falls = np.flatnonzero(np.diff(costs) < 0)
    if falls.size:
        below_it, size = wanted[falls[0]], wanted[falls[0] + 1]
        raise ValueError(
            f"Buckets.fit: cost({size}) is less than cost({below_it}), expected a cost that never "
            "falls; to prefer sizes that are fast, pass multiple_of"
        )
    # A weight too small to change the sum leaves two points above each other: no slope.
    seen = np.append(np.diff(below, prepend=0.0)[:-1] > 0, True)
    buckets, costs, below = buckets[seen], costs[seen], np.append(0.0, below[seen])
    count = min(count, len(costs))
    reached = np.append(0.0, costs * below[1:])  # D[k, :]
    cuts: list[NDArray[np.int32]] = [np.zeros(len(costs), np.int32)]
    found = [_read(buckets, cuts, float(reached[-1]))]
    while len(found) < count:
        reached, cut = _one_more_bucket(reached, below, costs)
        if reached[-1] >= found[-1].cost:
            break
        cuts.append(cut)
        found.append(_read(buckets, cuts, float(reached[-1])))
    return found


def _one_more_bucket(
    reached: _Floats, below: _Floats, costs: _Floats
) -> tuple[_Floats, NDArray[np.int32]]:
    """Go from D[k-1] to D[k]; also return where each position's last run begins.

    The hull is taken over all positions, those above j too. They never win: what
    D[k-1, i] pays for the sizes between j and i is at least what the line takes off.
    """
    hull = _lower_hull(below[:-1], reached[:-1])
    slopes = np.diff(reached[hull]) / np.diff(below[hull])
    positions = np.arange(1, len(below))
    begins = np.minimum(hull[np.searchsorted(slopes, costs)], positions)
    candidates = reached[begins] + costs * (below[1:] - below[begins])
    better = candidates < reached[1:]
    result = reached.copy()
    result[1:][better] = candidates[better]
    begins[~better] = positions[~better]  # the last bucket stays idle
    return result, begins.astype(np.int32)


def _lower_hull(x: _Floats, y: _Floats) -> NDArray[np.intp]:
    """Find the points on the lower convex hull; ``x`` strictly ascends.

    Slopes that are equal after rounding are left in: dropping them could lose a point of the hull,
    keeping them costs nothing.
    """
    hull: list[int] = []
    slopes = [-math.inf]  # of the line that ends in each point of the hull
    xs, ys = x.tolist(), y.tolist()
    for point, (right, height) in enumerate(zip(xs, ys, strict=True)):
        slope = -math.inf
        while hull:
            slope = (height - ys[hull[-1]]) / (right - xs[hull[-1]])
            if slopes[-1] <= slope:
                break
            hull.pop()
            slopes.pop()
        hull.append(point)
        slopes.append(slope)
    return np.array(hull)


def _read(buckets: _Integers, cuts: list[NDArray[np.int32]], cost: float) -> FittedLadder:
    """Walk back from the last size to the first, collecting each run's bucket."""
    end, sizes = len(buckets), set()
    for cut in reversed(cuts):
        sizes.add(int(buckets[end - 1]))
        end = int(cut[end - 1])
    return FittedLadder(tuple(sorted(sizes)), cost)
