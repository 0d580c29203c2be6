"""Shapes (a, b) to pad to where two sizes vary: source and target, height and width.

Shapes: P distinct pairs, K buckets, A and B candidate sizes of either axis.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchguard._public import public
from torchguard.bucketing.fit import best_ladders
from torchguard.bucketing.histogram import (
    grouped,
    is_amount,
    largest_bucket,
    observe,
    positive_integer,
)

Pairs: TypeAlias = Iterable[tuple[int, int]] | Mapping[tuple[int, int], float]
"""One (a, b) per observation, or a histogram that maps each to how often it was seen."""

PairCost: TypeAlias = Callable[[int, int], float]

_Floats: TypeAlias = NDArray[np.float64]
_Integers: TypeAlias = NDArray[np.int64]

# Candidate sizes per axis. More are merged, by the planner for one axis, into this many.
_CANDIDATES = 96
# The search stops after comparing about this many (pair, candidate) combinations.
_WORK = 300_000_000


def _area(a: int, b: int) -> float:
    return float(a) * b


@public
@dataclass(frozen=True, init=False)
class PairBuckets:
    """A few shapes (a, b), cheapest first. Immutable, hashable, equal if shapes and order are.

    Args:
        shapes: the buckets, in any order.
        cost: what a call costs at a shape, a * b when left out.

    Raises:
        TypeError: no pairs of integers.
        ValueError: no shape at all, or a size that is not positive.
    """

    shapes: tuple[tuple[int, int], ...]

    def __init__(self, shapes: Iterable[tuple[int, int]], cost: PairCost = _area) -> None:
        pairs, _ = _observe(shapes, "PairBuckets")
        listed = sorted((_price(cost, a, b), a, b) for a, b in pairs.tolist())
        object.__setattr__(self, "shapes", tuple((a, b) for _, a, b in listed))

    def bucket_for(self, a: int, b: int) -> tuple[int, int]:
        """Return the cheapest shape that holds (a, b).

        Raises:
            ValueError: none does.
        """
        shape = holding(self.shapes, a, b)
        if shape is None:
            raise ValueError(
                f"PairBuckets.bucket_for: no bucket of {list(self.shapes)} holds {(a, b)}"
            )
        return shape

    def waste(self, pairs: Pairs, cost: PairCost = _area) -> float:
        """Return what padding adds to the cost, as a share of the cost without.

        Raises:
            TypeError, ValueError: as :func:`fit_pairs`; a pair that no bucket holds.
        """
        seen, weights = _observe(pairs, "PairBuckets.waste")
        padded = useful = 0.0
        for (a, b), weight in zip(seen.tolist(), weights.tolist(), strict=True):
            padded += weight * _price(cost, *self.bucket_for(a, b))
            useful += weight * _price(cost, a, b)
        return padded / useful - 1

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.shapes)})"


def holding(shapes: Iterable[tuple[int, int]], a: int, b: int) -> tuple[int, int] | None:
    """Return the first shape that holds (a, b), None if none does."""
    for shape in shapes:  # a loop: Dynamo follows it on every release
        if a <= shape[0] and b <= shape[1]:
            return shape
    return None


def in_order(shapes: Iterable[tuple[int, int]]) -> PairBuckets:
    """Return the buckets of shapes that come cheapest first already."""
    ranks = {(a, b): rank for rank, (a, b) in enumerate(shapes, start=1)}
    return PairBuckets(ranks, lambda a, b: ranks[a, b])


def fit_pairs(
    pairs: Pairs,
    count: int = 8,
    *,
    cost: PairCost = _area,
    multiple_of: int | tuple[int, int] = 1,
    maximum: tuple[int, int] | None = None,
) -> PairBuckets:
    """Return at most ``count`` shapes that waste little on the pairs observed.

    Every pair observed fits one of them; look-up takes the cheapest that fits. Unlike one
    axis, two have no order that makes the optimum cheap to find: this is a search (each
    bucket in turn is moved to its best place on either axis, from several starts). It finds
    the optimum where one axis does not vary.

    Args:
        pairs: (a, b) per observation, or a histogram ``{(a, b): how often, above 0}``.
        count: at most so many shapes, fewer where more would save nothing.
        cost: what a call costs at a shape; must not fall as either size grows.
        multiple_of: align sizes to this, one number or one per axis.
        maximum: the largest there can ever be. It becomes one of the shapes; without
            it, a pair of the largest a and the largest b may fit none.

    Raises:
        TypeError: something is no integer.
        ValueError: no pairs, a size that is not positive, ``maximum`` below the data.
    """
    seen, weights = _observe(pairs, "fit_pairs")
    count = positive_integer(count, "count", "fit_pairs")
    steps = multiple_of if isinstance(multiple_of, tuple) else (multiple_of, multiple_of)
    tops = (None, None) if maximum is None else maximum
    axes: list[_Integers] = []  # the sizes that each axis may have, the largest last
    for axis in (0, 1):
        step = positive_integer(steps[axis], "multiple_of", "fit_pairs")
        observed = grouped(seen[:, axis], weights)
        top = largest_bucket(int(observed.sizes[-1]), step, tops[axis], "fit_pairs")
        ladders = best_ladders(observed, _CANDIDATES, multiple_of=step, top=top)
        axes.append(np.array(ladders[-1].sizes))
    places = np.stack([np.searchsorted(axes[axis], seen[:, axis]) for axis in (0, 1)], axis=1)
    distinct, where = np.unique(places, axis=0, return_inverse=True)
    prices = np.array([[_price(cost, a, b) for b in axes[1].tolist()] for a in axes[0].tolist()])
    seen_weights = np.bincount(where.ravel(), weights).astype(np.float64, copy=False)
    search = _Search(distinct, seen_weights, prices, fixed=maximum is not None)
    found = search.best(min(count, len(distinct) + search.fixed))
    return PairBuckets([(int(axes[0][a]), int(axes[1][b])) for a, b in found.tolist()], cost)


def _observe(pairs: Any, operation: str) -> tuple[_Integers, _Floats]:
    """Count pairs: (P, 2) sizes and (P,) weights."""
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Iterable):
        raise TypeError(
            f"{operation}: pairs is of type {type(pairs).__name__}, expected (a, b) pairs"
        )
    if hasattr(pairs, "tolist"):  # an array or a tensor
        pairs = pairs.tolist()
    try:
        counts = dict(pairs if isinstance(pairs, Mapping) else Counter(map(tuple, pairs)))
        shapes = [(a, b) for a, b in counts]
    except (TypeError, ValueError):
        raise TypeError(f"{operation}: expected (a, b) pairs of integers") from None
    if not shapes:
        raise ValueError(f"{operation}: pairs is empty, expected at least one (a, b)")
    for pair, weight in counts.items():
        if not is_amount(weight) or not weight:
            raise ValueError(f"{operation}: {pair} was seen {weight!r} times, expected more than 0")
    for column in zip(*shapes, strict=True):
        observe(column, operation)  # says which size is wrong
    return np.array(shapes, np.int64), np.array([float(weight) for weight in counts.values()])


def _price(cost: PairCost, a: int, b: int) -> float:
    price = float(cost(a, b))
    if not 0 < price < math.inf:
        raise ValueError(
            f"fit_pairs: cost({a}, {b}) is {price}, expected a positive, finite number"
        )
    return price


@dataclass
class _Search:
    """Local search over sets of (place on axis a, place on axis b)."""

    pairs: _Integers  # (P, 2)
    weights: _Floats  # (P,)
    prices: _Floats  # (A, B)
    fixed: bool  # the corner is the last bucket, and stays

    @property
    def corner(self) -> _Integers:
        return np.array(self.prices.shape) - 1

    def best(self, count: int) -> _Integers:
        starts = [self._descend(start) for start in self._starts(count)]
        cost, shapes = min(starts, key=lambda found: found[0])
        # Kick one bucket somewhere else and descend again; always the same kicks.
        random = np.random.default_rng(0)
        effort = len(self.pairs) * sum(self.prices.shape) * count * 4
        movable = count - self.fixed
        for _ in range(min(200, _WORK // effort) if movable > 1 else 0):
            kicked = shapes.copy()
            kicked[random.integers(len(kicked) - self.fixed)] = random.choice(self.pairs)
            tried = self._descend(self._covering(kicked, count))
            if tried[0] < cost:
                cost, shapes = tried
        return self._shrunk(shapes)

    def _starts(self, count: int) -> Iterator[_Integers]:
        """Ladders along either axis, and grids of both: (K, 2) each."""
        for axis in (0, 1):
            order = np.lexsort((self.pairs[:, 1 - axis], self.pairs[:, axis]))
            runs = np.array_split(order, min(count, len(order)))
            yield self._covering(np.array([self.pairs[run].max(axis=0) for run in runs]), count)
            ladder = self._ladder(axis, count)
            shapes = np.full((len(ladder), 2), self.corner)
            shapes[:, axis] = ladder
            yield self._covering(shapes, count)
        for rows in range(2, count // 2 + 1):
            first, second = self._ladder(0, rows), self._ladder(1, count // rows)
            grid = np.array([(a, b) for a in first for b in second])
            yield self._covering(grid, count)

    def _ladder(self, axis: int, count: int) -> _Integers:
        """Return the best places on one axis while the other stays at its largest."""
        along = self.prices[:, -1] if axis == 0 else self.prices[-1]
        observed = grouped(self.pairs[:, axis] + 1, self.weights)
        best = best_ladders(observed, count, cost=lambda place: along[place - 1], top=len(along))
        return np.array(best[-1].sizes) - 1

    def _covering(self, shapes: _Integers, count: int) -> _Integers:
        """Make ``count`` buckets, the last large enough for every pair that fits no other."""
        shapes = shapes[np.minimum(np.arange(count), len(shapes) - 1)]
        if self.fixed:
            shapes[-1] = self.corner
            return shapes
        loose = np.isinf(self._each(shapes)).all(axis=0)
        if loose.any():
            shapes[-1] = np.maximum(shapes[-1], self.pairs[loose].max(axis=0))
        return shapes

    def _each(self, shapes: _Integers) -> _Floats:
        """Return what each pair would cost in each bucket, inf where it does not fit: (K, P)."""
        fits = (self.pairs[None] <= shapes[:, None]).all(axis=2)
        return np.where(fits, self.prices[shapes[:, 0], shapes[:, 1]][:, None], np.inf)

    def _descend(self, shapes: _Integers) -> tuple[float, _Integers]:
        """Move one bucket at a time along one axis, to the best place there, until none helps."""
        shapes = shapes.copy()
        each = self._each(shapes)
        cost = float(each.min(axis=0) @ self.weights)
        improved = True
        while improved:
            improved = False
            # From the last, which is the largest: the room it leaves is the most.
            for number in reversed(range(len(shapes) - self.fixed)):
                rest = np.delete(each, number, axis=0).min(axis=0, initial=np.inf)
                for axis in (0, 1):
                    place, total = self._best_place(shapes[number], axis, rest)
                    if total < cost * (1 - 1e-12):
                        shapes[number, axis], cost, improved = place, total, True
                        each[number] = self._each(shapes[number : number + 1])[0]
        return cost, shapes

    def _best_place(self, shape: _Integers, axis: int, rest: _Floats) -> tuple[int, float]:
        along = self.prices[:, shape[1]] if axis == 0 else self.prices[shape[0]]
        fits = self.pairs[:, 1 - axis] <= shape[1 - axis]  # on the axis that stays
        if not np.isfinite(rest[~fits]).all():
            return 0, math.inf
        reached = self.pairs[fits, axis][None] <= np.arange(len(along))[:, None]
        costs = np.where(reached, np.minimum(along[:, None], rest[fits]), rest[fits])
        totals = costs @ self.weights[fits] + rest[~fits] @ self.weights[~fits]
        place = int(np.argmin(totals))
        return place, float(totals[place])

    def _shrunk(self, shapes: _Integers) -> _Integers:
        """Leave out idle buckets, and make each no larger than what it holds."""
        chosen = self._each(shapes).argmin(axis=0)
        keep = [self.pairs[chosen == number].max(axis=0) for number in np.unique(chosen)]
        if self.fixed:
            keep.append(self.corner)
        distinct: _Integers = np.unique(np.array(keep), axis=0)
        return distinct
