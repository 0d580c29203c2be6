"""The optimal ladder of bucket sizes for observed sizes: a dynamic program.

With the sizes sorted, a bucket serves a run of them, so the best way to serve the
first j of them with k buckets ends with some run i..j at the cost of its largest:

    D[k, j] = min over i of  D[k-1, i] + cost(size[j]) * (W[j] - W[i])

W counts the observations below a position. For each j the candidates i are the lines
``D[k-1, i] - W[i] * x`` at ``x = cost(size[j])``, and the lowest of many lines is the lower
convex hull of the points (W[i], D[k-1, i]): O(D) for each k, not O(D^2).

Where the cost falls somewhere, padding further can be cheaper. What a size costs is
then the cheapest size that holds it, and that never falls: every cost becomes one
for which the hull is right, and no second, slower method is needed.

Shapes: D distinct sizes, K buckets.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchguard.bucketing.histogram import Observed, sums

Cost: TypeAlias = Literal["linear", "quadratic"] | Callable[[int], float]
"""What a call at a size costs: the size, its square, or a function of it."""

_Floats: TypeAlias = NDArray[np.float64]
_Integers: TypeAlias = NDArray[np.int64]

# A cost function is asked for every aligned size in the range, seen or not, up to this many.
_GRID_LIMIT = 1 << 20

# Passes over the points that each drop all those above their neighbours, before the rest is
# done one point at a time.
_PASSES = 48


def costs_of(sizes: Iterable[int] | _Integers, cost: Cost, operation: str) -> _Floats:
    """Ask what a call costs at each size."""
    if isinstance(cost, str) and cost in {"linear", "quadratic"}:
        linear = np.asarray(sizes, dtype=np.float64)
        return linear if cost == "linear" else linear * linear
    if isinstance(cost, str):
        raise ValueError(  # noqa: TRY004 - of the right type
            f"{operation}: cost is {cost!r}, expected 'linear', 'quadratic' or a function of a size"
        )
    if not callable(cost):
        raise TypeError(
            f"{operation}: cost is of type {type(cost).__name__}, expected 'linear', 'quadratic' "
            "or a function of a size"
        )
    listed = np.asarray(sizes, dtype=np.int64).tolist()
    answers = np.empty(len(listed))
    for position, size in enumerate(listed):
        answer = cost(size)
        try:
            answers[position] = float(answer)
        except (TypeError, ValueError):
            raise TypeError(f"{operation}: cost({size}) is {answer!r}, expected a number") from None
    wrong = np.flatnonzero(~((answers > 0) & (answers < math.inf)))
    if wrong.size:
        raise ValueError(
            f"{operation}: cost({listed[wrong[0]]}) is {answers[wrong[0]]}, expected a positive, "
            "finite number"
        )
    return answers


class FittedLadder(NamedTuple):
    """The cheapest ladder of at most so many buckets."""

    sizes: tuple[int, ...]
    cost: float


class _Problem(NamedTuple):
    """What the dynamic programs work on."""

    sizes: _Integers
    """(D,) distinct, ascending; the last is the top of the ladder."""

    targets: _Integers
    """(D,) the bucket that a run ending here gets."""

    costs: _Floats
    """(D,) what a call at that bucket costs; never falls."""

    below: _Floats
    """(D + 1,) observations below each position."""


def _aligned(sizes: _Integers, multiple_of: int, top: int) -> _Integers:
    """Round sizes up to the alignment, none of them past the top of the ladder."""
    return np.minimum(-(-sizes // multiple_of) * multiple_of, top)


def _merged(observed: Observed, multiple_of: int, top: int) -> Observed:
    """Make one size of all those that the alignment gives the same bucket."""
    if multiple_of == 1:
        return observed
    distinct, where = np.unique(_aligned(observed.sizes, multiple_of, top), return_inverse=True)
    return Observed(distinct, sums(where, observed.weights))


def _problem(observed: Observed, cost: Cost, multiple_of: int, top: int) -> _Problem:
    """Put the top on the ladder, and find which bucket each run would get at what cost."""
    sizes, weights = observed
    if sizes[-1] < top:
        sizes, weights = np.append(sizes, top), np.append(weights, 0.0)
    below = np.concatenate(([0.0], np.cumsum(weights)))
    wanted = _aligned(sizes, multiple_of, top)
    candidates = np.unique(wanted)
    if callable(cost) and (top - int(candidates[0])) // multiple_of < _GRID_LIMIT:
        # Where the cost falls, the cheapest size that fits may be one that was not observed.
        first = -(-int(candidates[0]) // multiple_of) * multiple_of
        candidates = np.union1d(candidates, np.arange(first, top, multiple_of))
    costs = costs_of(candidates, cost, "Buckets.fit")
    # From the top down: the cheapest candidate so far, and the smallest where they tie.
    cheapest = np.minimum.accumulate(costs[::-1])[::-1]
    places = np.where(costs == cheapest, np.arange(len(costs)), len(costs))
    best = np.minimum.accumulate(places[::-1])[::-1][np.searchsorted(candidates, wanted)]
    return _Problem(sizes, candidates[best], costs[best], below)


def best_ladder(
    observed: Observed,
    count: int,
    *,
    cost: Cost = "linear",
    multiple_of: int = 1,
    top: int,
) -> FittedLadder:
    """Return the cheapest ladder of at most ``count`` buckets, the largest of them ``top``."""
    return best_ladders(observed, count, cost=cost, multiple_of=multiple_of, top=top)[-1]


def best_ladders(
    observed: Observed,
    count: int,
    *,
    cost: Cost = "linear",
    multiple_of: int = 1,
    top: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[FittedLadder]:
    """Return the cheapest ladders of at most 1, 2, ... ``count`` buckets.

    There are fewer than ``count`` of them where one more bucket would save nothing.
    ``progress`` is called after each with how many are done, and of how many.
    """
    problem = _problem(_merged(observed, multiple_of, top), cost, multiple_of, top)
    # A weight too small to change the sum leaves two points above each other: no slope.
    seen = np.append(np.diff(problem.below)[:-1] > 0, True)
    problem = _Problem(
        problem.sizes[seen],
        problem.targets[seen],
        problem.costs[seen],
        np.concatenate(([0.0], problem.below[1:][seen])),
    )
    costs, below = problem.costs, problem.below
    count = min(count, len(costs))
    reached = np.concatenate(([0.0], costs * below[1:]))  # D[k, :]
    cuts: list[NDArray[np.int32]] = []
    found = [_read(problem, cuts, float(reached[-1]))]
    while len(found) < count:
        if progress is not None:
            progress(len(found), count)
        reached, cut = _one_more_bucket(reached, below, costs)
        if reached[-1] >= found[-1].cost:
            break
        cuts.append(cut)
        found.append(_read(problem, cuts, float(reached[-1])))
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

    A point above the line between its neighbours is above the hull, so all such can
    go at once. Slopes that are equal after rounding are left in: dropping them could lose
    a point of the hull, keeping them costs nothing.
    """
    kept = np.arange(len(x))
    for _ in range(_PASSES):
        slopes = np.diff(y[kept]) / np.diff(x[kept])
        above = np.flatnonzero(slopes[:-1] > slopes[1:]) + 1
        if not above.size:
            return kept
        kept = np.delete(kept, above)
    hull: list[int] = []
    xs, ys = x.tolist(), y.tolist()
    for point in kept.tolist():
        while len(hull) > 1 and _slope(xs, ys, hull[-2], hull[-1]) > _slope(
            xs, ys, hull[-1], point
        ):
            hull.pop()
        hull.append(point)
    return np.array(hull)


def _slope(xs: Sequence[float], ys: Sequence[float], left: int, right: int) -> float:
    return (ys[right] - ys[left]) / (xs[right] - xs[left])


def _read(problem: _Problem, cuts: list[NDArray[np.int32]], cost: float) -> FittedLadder:
    """Walk back from the last size to the first, collecting each run's bucket."""
    end = len(problem.costs)
    sizes = set()
    for cut in reversed(cuts):
        begin = int(cut[end - 1])
        if begin < end:
            sizes.add(int(problem.targets[end - 1]))
        end = begin
    sizes.add(int(problem.targets[end - 1]))
    return FittedLadder(tuple(sorted(sizes)), cost)


def ladder_with_compile_cost(
    observed: Observed,
    *,
    compile_cost: float,
    step_cost: float,
    already_compiled: Sequence[int],
    cost: Cost = "linear",
    multiple_of: int = 1,
    top: int,
    reach: int,
) -> FittedLadder:
    """Return the ladder with the least sum of running and compiling; ``cost`` is that sum.

    The same lines as above, each bucket one price dearer unless it is compiled already.
    There is no k: a position's line joins the hull as soon as its D is known. The largest
    bucket is ``top``, or a compiled one from ``reach`` on.
    """
    ends = _ends(_problem(observed, cost, multiple_of, top), already_compiled, cost, compile_cost)
    xs, ys, hull, slopes, came_from = [0.0], [0.0], [0], list[float](), [0]
    for number, end in enumerate(ends, start=1):
        price = step_cost * end.cost
        start = hull[bisect_left(slopes, price)]
        y = ys[start] + price * (end.below - xs[start]) + end.penalty
        xs.append(end.below)
        ys.append(y)
        came_from.append(start)
        if xs[hull[-1]] == end.below:
            if ys[hull[-1]] <= y:
                continue  # that line is nowhere above this one
            hull.pop()
            del slopes[-1:]
        while slopes and slopes[-1] > _slope(xs, ys, hull[-1], number):
            hull.pop()
            slopes.pop()
        if hull:
            slopes.append(_slope(xs, ys, hull[-1], number))
        hull.append(number)
    last = min(
        (number for number, end in enumerate(ends, start=1) if end.size >= reach),
        key=ys.__getitem__,
    )
    total, sizes = ys[last], set()
    while last:
        sizes.add(ends[last - 1].bucket)
        last = came_from[last]
    return FittedLadder(tuple(sorted(sizes)), total)


class _End(NamedTuple):
    """A place at which a run of sizes may end, and the bucket it would have."""

    size: int
    bucket: int
    cost: float
    below: float
    penalty: float


def _ends(
    problem: _Problem, compiled: Sequence[int], cost: Cost, compile_cost: float
) -> list[_End]:
    """List the ends: a run may end at any size seen, and wherever one is compiled."""
    columns = (problem.sizes, problem.targets, problem.costs, problem.below[1:])
    seen = zip(*(column.tolist() for column in columns), strict=True)
    ends = [_End(size, bucket, price, below, compile_cost) for size, bucket, price, below in seen]
    usable = np.array(sorted(size for size in compiled if size >= problem.sizes[0]), dtype=np.int64)
    prices = costs_of(usable, cost, "Buckets.fit").tolist()
    counts = problem.below[np.searchsorted(problem.sizes, usable, side="right")].tolist()
    known = zip(usable.tolist(), prices, counts, strict=True)
    ends += [_End(size, size, price, below, 0.0) for size, price, below in known]
    return sorted(ends)


# ---- with a bound on the padding ----
#
# A run of sizes i..j may have a common bucket only if that is at most ``1 + max_padding`` times the
# smallest observed of them, so the run that ends at j begins in a window of positions. The hull has
# no windows: here each is looked through, which takes D * K numpy calls.


class Bound(NamedTuple):
    """What :func:`ladder_with_bound` is to keep to."""

    max_padding: float
    observed: Observed
    """The sizes that it is about; those observed_and_prior may have a prior among them."""

    def limits(self, sizes: NDArray[Any]) -> _Floats:
        """Return the largest bucket of each size; 1.15 * 20 is 22.999999999999996, not 23."""
        largest: _Floats = sizes * (1 + self.max_padding) * (1 + 1e-12)
        return largest


class _Window(NamedTuple):
    """The runs of sizes that a bucket may serve: where they begin and end."""

    bucket: int
    begin: int
    end: int
    cost: float
    penalty: float


_Cuts: TypeAlias = dict[int, tuple[int, int]]
"""The beginning of a run and its bucket, by the position of the run's end."""


def ladder_with_bound(
    observed_and_prior: Observed,
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

    Without ``count`` each bucket has a price, as in :func:`ladder_with_compile_cost`. A bucket is
    the largest of its sizes, aligned: no larger one, also where a cost falls.
    """
    seen = bound.observed.sizes
    sizes, weights = observed_and_prior
    # The largest bucket has to reach top, even where no size up there was observed: no weight.
    if sizes[-1] < top and top - sizes[-1] >= multiple_of:
        sizes, weights = np.append(sizes, top), np.append(weights, 0.0)
    below = np.concatenate(([0.0], np.cumsum(weights)))
    # By position, the smallest observed size that a run which begins there has.
    limits = bound.limits(np.append(seen, math.inf)[np.searchsorted(seen, sizes)])
    paid = [(size, compile_cost) for size in _aligned(sizes, multiple_of, top).tolist()]
    # What is compiled already is a bucket at no price, aligned or not.
    free = [(size, 0.0) for size in already_compiled if size >= sizes[0]]
    buckets = sorted({*paid, *free})
    prices = step_cost * costs_of([size for size, _ in buckets], cost, "Buckets.fit")
    windows = [
        _Window(
            size,
            int(np.searchsorted(limits, size)),
            int(np.searchsorted(sizes, size, side="right")),
            float(price),
            penalty,
        )
        for (size, penalty), price in zip(buckets, prices, strict=True)
    ]
    _check_alignment(bound, multiple_of, top)
    reached = np.concatenate(([0.0], np.full(len(sizes), math.inf)))
    if count is None:
        # One pass: a run may begin wherever an earlier one of the same pass ends.
        layers = [_one_more_run(windows, reached, reached, below)] * len(sizes)
    else:
        layers = _best_layers(windows, reached, below, count, bound.max_padding)
    position, found = len(sizes), set()
    for cuts in reversed(layers):
        if position:
            position, bucket = cuts[position]
            found.add(bucket)
    return tuple(sorted(found))


def _check_alignment(bound: Bound, multiple_of: int, top: int) -> None:
    """Raise unless the alignment alone keeps to the bound."""
    seen = bound.observed.sizes
    aligned = _aligned(seen, multiple_of, top)
    above = np.flatnonzero(aligned > bound.limits(seen))
    if above.size:
        size, bucket = int(seen[above[0]]), int(aligned[above[0]])
        raise ValueError(
            f"Buckets.fit: max_padding is {bound.max_padding}, but multiple_of={multiple_of} makes "
            f"{bucket} of {size}, which is {100 * (bucket / size - 1):.0f} % more: pass a smaller "
            "multiple_of or a larger max_padding"
        )


def _one_more_run(
    windows: list[_Window], reached: _Floats, further: _Floats, below: _Floats
) -> _Cuts:
    """Lower ``further``, the least cost of all sizes up to each position, by a run behind each."""
    cuts: _Cuts = {}
    for bucket, begin, end, cost, penalty in windows:
        if begin >= end:
            continue
        totals = reached[begin:end] + cost * (below[end] - below[begin:end])
        first = int(totals.argmin())
        total = float(totals[first]) + penalty
        if total < further[end]:
            further[end] = total
            cuts[end] = (begin + first, bucket)
    return cuts


def _best_layers(
    windows: list[_Window], reached: _Floats, below: _Floats, count: int, max_padding: float
) -> list[_Cuts]:
    """Return the cuts of the cheapest ladder of at most ``count`` buckets, one layer for each."""
    least, best = math.inf, list[_Cuts]()
    layers: list[_Cuts] = []
    while len(layers) < len(windows):
        further = np.full(len(below), math.inf)
        layers.append(_one_more_run(windows, reached, further, below))
        reached = further
        # Beyond count only so that the error can name how many it takes.
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
    return best
