"""The buckets that two axes share: given, read from a plan, grown, or fitted to what arrives."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from torchguard.bucketing.pairs import PairBuckets, fit_pairs, holding, in_order

__all__ = ["PairLadder"]

_OBSERVED_CALLS = 32
_MOST_BUCKETS = 8
# As for one axis: a further bucket has to save this share of what all calls together cost.
_WORTH_COMPILING = 0.02


class PairLadder:
    """The buckets of two axes, which may change; the interface of :class:`auto.Ladder`.

    Args:
        axes: the two axes.
        given: the buckets; ``"auto"`` begins with powers of two in either size, as they are
            needed, and fits them once to the first calls.
        growing: whether sizes that no bucket holds add one.
    """

    def __init__(self, axes: tuple[str, ...], given: Any, *, growing: bool) -> None:
        self.axes = axes
        self.automatic = given == "auto"
        self.buckets: PairBuckets | None = None if isinstance(given, str) else given
        self.fitting = self.automatic
        self._growing = growing or self.automatic
        self._lock = threading.Lock()

    def shapes(self) -> list[dict[str, int]]:
        """Return each bucket, by axis."""
        return [dict(zip(self.axes, each, strict=True)) for each in self.buckets or ()]

    def largest(self, axis: str) -> int | None:
        """Return the largest size that it will ever have a bucket for; None if it may grow."""
        index = self.axes.index(axis)
        sizes = [each[index] for each in self.buckets or ()]
        return None if self._growing else max(sizes, default=None)

    def bucket_for(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """Return the cheapest bucket for both sizes, None if none holds them or may be added."""
        a, b = (sizes[axis] for axis in self.axes)
        with self._lock:
            shape = holding(self.buckets or (), a, b)
            if (shape is None and self._growing) or self.fitting:
                shape = self._grown(a, b)
        return None if shape is None else dict(zip(self.axes, shape, strict=True))

    def _grown(self, a: int, b: int) -> tuple[int, int]:
        """Add a bucket that holds both sizes.

        Its sizes are such as buckets have already, else twice the largest; powers of two while
        sizes are only being observed.
        """
        before = () if self.buckets is None else self.buckets.shapes
        shape = []
        for index, size in enumerate((a, b)):
            there = sorted({each[index] for each in before})
            power = 1 << max(size - 1, 0).bit_length()
            enough = [] if self.fitting else [each for each in there if each >= size]
            doubled = 0 if self.fitting or not there else 2 * there[-1]
            shape.append(enough[0] if enough else max(doubled, power))
        found = (shape[0], shape[1])
        if found not in before:
            self.buckets = in_order(
                # Cheapest first by their area; the cost they were fitted with is not kept.
                [*(s for s in before if s[0] * s[1] <= found[0] * found[1]), found]
                + [s for s in before if s[0] * s[1] > found[0] * found[1]]
            )
        return found

    def least(self, axis: str, sizes: Mapping[str, int]) -> int:
        """Return the smallest size of an axis that gets the same bucket as ``sizes``."""
        shapes = () if self.buckets is None else self.buckets.shapes
        index = self.axes.index(axis)
        other = sizes[self.axes[1 - index]]
        a, b = (sizes[each] for each in self.axes)
        cheaper = shapes[: next((i for i, s in enumerate(shapes) if a <= s[0] and b <= s[1]), 0)]
        # Of those that hold the other size, each is too small for this one.
        return max((s[index] for s in cheaper if other <= s[1 - index]), default=0) + 1

    def too_large(self, sizes: Mapping[str, int], label: str) -> str:
        """Return why two sizes have no bucket, and what to do."""
        first, second = self.axes
        return (
            f"axes {first!r} and {second!r} are {sizes[first]} and {sizes[second]} (in {label}), "
            f"but none of the buckets {list(self.buckets or ())} holds both: add a larger one, as "
            "Buckets.fit_pairs(..., maximum=...) does"
        )

    def observe(
        self, seen: Mapping[tuple[int, ...], int], _compiled: Iterable[tuple[int, ...]]
    ) -> bool:
        """Fit automatic buckets once enough calls were seen; tell whether they have changed."""
        pairs = {(a, b): count for (a, b), count in seen.items() if a > 0 and b > 0}
        if not self.fitting or sum(pairs.values()) < _OBSERVED_CALLS:
            return False
        self.fitting = False
        fitted = fit_pairs(pairs, 1)
        for count in range(2, _MOST_BUCKETS + 1):
            better = fit_pairs(pairs, count)
            if fitted.waste(pairs) - better.waste(pairs) < _WORTH_COMPILING:
                break
            fitted = better
        # What no fitted bucket holds still finds the coarse one that has run.
        self.buckets = in_order(
            [*fitted, *(each for each in self.buckets or () if holding(fitted, *each) is None)]
        )
        return True
