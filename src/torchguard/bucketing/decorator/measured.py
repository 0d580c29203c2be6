"""What warming up has measured: seconds of a call in each bucket, as a cost for fitting buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchguard._public import public

__all__ = ["WarmupReport"]


@public
@dataclass(frozen=True)
class WarmupReport:
    """What ``warmup`` returns: what a call in each bucket takes, and what did not fit.

    It is a function of a size (of two with :class:`PairBuckets`), and so goes where a cost does:
    ``Buckets.fit(lengths, cost=report)``, or with what compiling took as the price of a bucket
    ``Buckets.fit(lengths, None, cost=report, compile_cost=report.compile_seconds)``.
    """

    axes: tuple[str, ...]
    seconds: Mapping[Any, float]
    """Of one call, by bucket (a size per axis): the better of two, the backward included."""
    compile_seconds: float
    """Mean seconds that compiling one bucket took."""
    left_out: Mapping[Any, str]
    """The buckets that ran out of memory, and what the error said."""

    def __call__(self, *sizes: int) -> float:
        """Return the seconds of a call at a size, from those of the buckets around it.

        One size: on the line between two buckets. Two: what the buckets that are not smaller took,
        by the share of them that it is; it never falls.

        Raises:
            ValueError: no bucket was timed, or there are not as many sizes as axes.
        """
        if not self.seconds or len(sizes) != len(self.axes):
            raise ValueError(
                f"WarmupReport: a call by {', '.join(self.axes)} was timed in {len(self.seconds)} "
                f"buckets, which says nothing of {sizes}"
            )
        if len(sizes) == 1:
            return self._on_a_line(sizes[0])
        largest = [max(each) for each in zip(*self.seconds, strict=True)]
        above = math.prod(max(1.0, a / b) for a, b in zip(sizes, largest, strict=True))
        return above * max(
            seconds * math.prod(min(1.0, a / b) for a, b in zip(sizes, shape, strict=True))
            for shape, seconds in self.seconds.items()
        )

    def _on_a_line(self, size: int) -> float:
        known = sorted((bucket, seconds) for (bucket,), seconds in self.seconds.items())
        buckets, seconds = zip(*known, strict=True)
        if buckets[0] <= size <= buckets[-1]:
            return float(np.interp(size, buckets, seconds))
        # Outside on the last line, but no less than in proportion to the size.
        near, far = (0, 1) if size < buckets[0] else (-1, -2)
        proportional = seconds[near] * size / buckets[near]
        if len(known) == 1:
            return float(proportional)
        slope = (seconds[far] - seconds[near]) / (buckets[far] - buckets[near])
        return float(max(seconds[near] + slope * (size - buckets[near]), proportional))
