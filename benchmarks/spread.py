"""What many rounds are summarised by: a median with its quartiles, and a confidence interval."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 4000
_INSIDE = (2.5, 97.5)  # percent


def _short(value: float) -> float:
    return float(f"{value:.5g}")


@dataclass(frozen=True)
class Spread:
    """The median of all rounds and the quartiles around it."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise one number per round."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(_short(median), _short(q1), _short(q3))


@dataclass(frozen=True)
class Interval:
    """The median of the rounds' ratios, and where it lies with 95 % confidence.

    A percentile bootstrap: the rounds are drawn again with replacement, 4,000 times, and the
    middle 95 % of the medians are the interval. Nothing is assumed of the distribution, and a
    round in which another program ran can't pull the median, as it would pull a mean.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Interval:
        """Summarise one ratio per round; the same ratios always give the same interval."""
        values = np.asarray(ratios, dtype=np.float64)
        drawn = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
        low, high = np.percentile(np.median(values[drawn], axis=1), _INSIDE)
        # Six digits: a thousandth of a percent is what a target of 0.1 % needs.
        return cls(*(float(f"{value:.6g}") for value in (np.median(values), low, high)))

    @property
    def holds_one(self) -> bool:
        """Whether no difference was found."""
        return self.low <= 1.0 <= self.high
