"""The ladders of the axes: given, grown, or fitted to what arrives."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

from torchguard.bucketing.axes import buckets_by_axes
from torchguard.bucketing.buckets import Buckets, total_cost
from torchguard.bucketing.decorator.pair_ladder import PairLadder
from torchguard.bucketing.histogram import observe

__all__ = ["Ladder", "ladders_of"]

_OBSERVED_CALLS = 32
_COARSE_FROM = 16
# A further bucket has to save this share of what all calls together cost: the number of calls
# still to come, which would give the exact price, is unknown.
_WORTH_COMPILING = 0.02


class Ladder:
    """The buckets of one axis, which may change.

    Args:
        axes: the axis.
        given: the buckets; ``"auto"`` begins with powers of two, as they are needed, and
            fits them once to the first calls.
        growing: whether a size above the largest adds a bucket.
    """

    def __init__(self, axes: tuple[str, ...], given: Any, *, growing: bool) -> None:
        self.axes = axes
        self.automatic = given == "auto"
        self.buckets: Buckets | None = None if isinstance(given, str) else given
        self._growing = growing or self.automatic
        self.fitting = self.automatic
        self._lock = threading.Lock()

    def shapes(self) -> list[dict[str, int]]:
        """Return each bucket, by axis."""
        return [{self.axes[0]: size} for size in self.buckets or ()]

    def largest(self, axis: str) -> int | None:  # noqa: ARG002 - there is one
        """Return the largest size that it will ever have a bucket for; None if it may grow."""
        return None if self._growing or self.buckets is None else self.buckets.sizes[-1]

    def bucket_for(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """Return the bucket for the size of its axis, None if none may be added."""
        with self._lock:
            bucket = self._bucket_for(sizes[self.axes[0]])
        return None if bucket is None else {self.axes[0]: bucket}

    def least(self, axis: str, sizes: Mapping[str, int]) -> int:
        """Return the smallest size of an axis that gets the same bucket as ``sizes``."""
        smaller = [each for each in self.buckets or () if each < sizes[axis]]
        return max(smaller, default=0) + 1

    def too_large(self, sizes: Mapping[str, int], label: str) -> str:
        """Return why a size of an argument has no bucket, and what to do."""
        (axis,) = self.axes
        largest = None if self.buckets is None else self.buckets.sizes[-1]
        return (
            f"axis {axis!r} is {sizes[axis]} in {label}, but the largest bucket is {largest}: add "
            "a larger one"
        )

    def _bucket_for(self, size: int) -> int | None:
        if self.fitting:  # powers of two, as they are needed
            bucket = max(_COARSE_FROM, 1 << (size - 1).bit_length())
            before = () if self.buckets is None else self.buckets.sizes
            if bucket not in before:
                self.buckets = Buckets([*before, bucket])
            return bucket
        if self.buckets is not None and size <= self.buckets.sizes[-1]:
            return self.buckets.sizes[bisect_left(self.buckets.sizes, size)]
        if not self._growing:
            return None
        sizes = () if self.buckets is None else self.buckets.sizes
        bucket = max(_COARSE_FROM, 2 * sizes[-1] if sizes else 0, 1 << (size - 1).bit_length())
        self.buckets = Buckets([*sizes, bucket])
        return bucket

    def observe(
        self, arrived: Mapping[tuple[int, ...], int], compiled: Iterable[tuple[int, ...]]
    ) -> bool:
        """Fit an automatic ladder once enough calls were seen; tell whether it has changed.

        Args:
            arrived: how often each size did, by ``(size,)``.
            compiled: the buckets that have run: they cost nothing more.
        """
        seen = {size: count for (size,), count in arrived.items() if size > 0}
        if not self.fitting or sum(seen.values()) < _OBSERVED_CALLS:
            return False
        self.fitting = False
        observed = observe(seen, "bucketed")
        price = _WORTH_COMPILING * total_cost(observed, "linear", "bucketed")
        largest = int(observed.sizes[-1])
        there = sorted({size for (size,) in compiled})
        fitted = Buckets.fit(
            seen,
            None,
            compile_cost=price,
            already_compiled=[size for size in there if size <= largest],
            multiple_of=min(8, largest),
        )
        # Longer sizes than any so far still find the coarse bucket that is compiled.
        self.buckets = Buckets(
            [*fitted.sizes, *(size for size in there if size > fitted.sizes[-1])]
        )
        return True


def ladders_of(
    axes: Iterable[str], given: Any, plan: Any, *, growing: bool
) -> dict[str, Ladder | PairLadder]:
    """Give each axis its ladder; two axes that have their buckets together share one.

    Raises:
        TypeError: neither buckets nor ``"auto"``.
        ValueError: an axis without a ladder, or a ladder without an axis.
    """
    axes = tuple(dict.fromkeys(axes))
    if not axes:
        raise ValueError("bucketed: dims names no axis to pad")
    if plan is not None:
        if given is not None:
            raise ValueError("bucketed: buckets and plan are both given: leave one out")
        given = plan
    if given is None:
        raise ValueError('bucketed: no buckets: pass buckets={...}, buckets="auto" or plan=')
    found: dict[str, Ladder | PairLadder] = {}
    for names, buckets in buckets_by_axes(axes, given, "bucketed", auto=True).items():
        kind = Ladder if len(names) == 1 else PairLadder
        found |= dict.fromkeys(names, kind(names, buckets, growing=growing))
    return {axis: found[axis] for axis in axes}
