"""Buckets: a ladder of static sizes, explicit, by rule, or optimal for the sizes observed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import Self

from torchguard._public import html_table, public
from torchguard.bucketing.fit import Cost, best_ladders, costs_of
from torchguard.bucketing.histogram import (
    Observed,
    Sizes,
    batch_maxima,
    largest_bucket,
    observe,
    positive_integer,
)


def as_buckets(given: Any, what: str, otherwise: str = "") -> Buckets:
    """Return a ladder as it is, and a list of sizes as a ladder."""
    if isinstance(given, Buckets):
        return given
    if isinstance(given, (list, tuple, range)):
        return Buckets(given)
    raise TypeError(f"{what} is {given!r}, expected Buckets, a list of sizes{otherwise}")


@public
@dataclass(frozen=True, init=False)
class Buckets:
    """A ladder of sizes to pad to. Immutable, hashable, equal to another with the same sizes.

    Args:
        sizes: the buckets, in any order; one named twice counts once.

    Raises:
        TypeError: no sequence of integers.
        ValueError: no size at all, or one that is not positive.

    Cost:
        A search in a short list for each call.

    Example:
        >>> from torchguard import Buckets
        >>> buckets = Buckets([64, 128, 512])
        >>> buckets.bucket_for(65)
        128
        >>> Buckets.fit([10, 10, 11, 90, 100], count=2)
        Buckets([11, 100])
    """

    sizes: tuple[int, ...]
    """Ascending."""

    def __init__(self, sizes: Iterable[int]) -> None:
        observed = observe(sizes, "Buckets")
        object.__setattr__(self, "sizes", tuple(observed.sizes.tolist()))

    @classmethod
    def powers_of_two(cls, minimum: int, maximum: int) -> Self:
        """Return the powers of two from ``minimum`` on, and ``maximum``.

        ``maximum`` is the largest bucket, a power of two or not, and at least ``minimum``.
        """
        operation = "Buckets.powers_of_two"
        minimum = positive_integer(minimum, "minimum", operation)
        maximum = positive_integer(maximum, "maximum", operation, least=minimum)
        powers = range((minimum - 1).bit_length(), (maximum - 1).bit_length())
        return cls([*(1 << power for power in powers), maximum])

    @classmethod
    def fit(
        cls,
        sizes: Sizes,
        count: int = 8,
        *,
        cost: Cost = "linear",
        multiple_of: int = 1,
        maximum: int | None = None,
        batch_size: int = 1,
    ) -> Self:
        """Return the ladder that wastes least on the sizes observed: the optimum, not a search.

        Args:
            sizes: one integer per observation (a list, an integer array or tensor, any
                iterable), or a histogram ``{size: how often}``.
            count: at most so many buckets, fewer if more would save nothing.
            cost: what a call costs at a size: ``"linear"``, ``"quadratic"``, or a function
                of one size, which never falls.
            multiple_of: align buckets to this (8, 16 or 64 for tensor cores).
            maximum: the longest there can ever be. It is the largest bucket exactly,
                aligned or not; without it that is the longest observed, rounded up.
            batch_size: with more than 1, ``sizes`` are those of sequences that are padded to the
                longest of a batch of so many, and the longest are fitted.

        Raises:
            TypeError: something is not an integer.
            ValueError: no sizes, a size that is not positive, ``maximum`` below the data,
                or a bad cost.

        Example:
            >>> from torchguard import Buckets
            >>> Buckets.fit([3, 5, 9, 10], count=2)
            Buckets([5, 10])
        """
        if batch_size != 1:
            sizes = batch_maxima(sizes, batch_size, "Buckets.fit")
        observed = observe(sizes, "Buckets.fit")
        multiple_of = positive_integer(multiple_of, "multiple_of", "Buckets.fit")
        top = largest_bucket(int(observed.sizes[-1]), multiple_of, maximum, "Buckets.fit")
        count = positive_integer(count, "count", "Buckets.fit")
        ladders = best_ladders(observed, count, cost=cost, multiple_of=multiple_of, top=top)
        return cls(ladders[-1].sizes)

    def bucket_for(self, size: int) -> int:
        """Return the smallest bucket that holds ``size``.

        Raises:
            TypeError: ``size`` is not an integer.
            ValueError: it is negative, or no bucket holds it.
        """
        if type(size) is not int:
            size = positive_integer(size, "size", "Buckets.bucket_for", least=0)
        sizes = self.sizes
        if 0 <= size <= sizes[-1]:
            return sizes[bisect_left(sizes, size)]
        if size < 0:
            raise ValueError(f"Buckets.bucket_for: size is {size}, expected 0 or more")
        raise ValueError(
            f"Buckets.bucket_for: size is {size}, but the largest bucket is {sizes[-1]}"
        )

    def waste(self, sizes: Sizes, cost: Cost = "linear", batch_size: int = 1) -> float:
        """Return what padding adds to the cost, as a share of the cost without: 0.08 is 8 %.

        Args:
            sizes: as for :meth:`fit`; none may be above the largest bucket.
            cost: as for :meth:`fit`.
            batch_size: as for :meth:`fit`.

        Raises:
            TypeError, ValueError: as :meth:`fit`; a size that no bucket holds.
        """
        if batch_size != 1:
            sizes = batch_maxima(sizes, batch_size, "Buckets.waste")
        observed = observe(sizes, "Buckets.waste")
        if observed.sizes[-1] > self.sizes[-1]:
            raise ValueError(
                f"Buckets.waste: a size is {observed.sizes[-1]}, but the largest bucket is "
                f"{self.sizes[-1]}"
            )
        costs = costs_of(self.sizes, cost, "Buckets.waste")
        padded = float(costs[np.searchsorted(self.sizes, observed.sizes)] @ observed.weights)
        return padded / total_cost(observed, cost, "Buckets.waste") - 1

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __contains__(self, size: object) -> bool:
        return size in self.sizes  # not by __iter__, which Dynamo of 2.6 can't follow

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.sizes)})"

    def _repr_html_(self) -> str:
        numbers = map(str, range(1, len(self) + 1))
        return html_table([["bucket", *numbers], ["size", *map(str, self)]])


def total_cost(observed: Observed, cost: Cost, operation: str) -> float:
    """Return what the observations cost at their own sizes, without padding."""
    return float(costs_of(observed.sizes, cost, operation) @ observed.weights)


# ---- which buckets each axis has ----


def buckets_by_axis(axes: Sequence[str], given: Any, operation: str) -> dict[str, Buckets]:
    """Read ``buckets=``: a ladder or a list of sizes for every axis, or ``{axis: buckets}``."""
    if not isinstance(given, Mapping):
        ladder = as_buckets(given, f"{operation}: buckets", " or {axis: Buckets}")
        return dict.fromkeys(axes, ladder)
    for name in given:
        if name not in axes:
            raise ValueError(f"{operation}: buckets names {name!r}, but dims has {', '.join(axes)}")
    missing = [axis for axis in axes if axis not in given]
    if missing:
        raise ValueError(f"{operation}: no buckets for {', '.join(map(repr, missing))}")
    return {axis: as_buckets(given[axis], f"{operation}: buckets of {axis!r}") for axis in axes}
