"""Observed sizes as a histogram: what a ladder is fitted to and judged by.

Shapes: D distinct sizes.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Mapping, Sized
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Sizes: TypeAlias = Iterable[int] | Mapping[int, float] | NDArray[np.integer[Any]]
"""What a function that takes observed sizes accepts: one size per observation, or a
histogram that maps each size to how often it was seen."""

_LARGEST = 1 << 53  # beyond this a float, which is what costs are, does not hold every integer

_NEVER = 1e-12  # a batch as rare as this is left out: rounding weighs as much


class Observed(NamedTuple):
    """A histogram of sizes."""

    sizes: NDArray[np.int64]
    """(D,) distinct, ascending, positive."""

    weights: NDArray[np.float64]
    """(D,) how often each was seen; need not be whole numbers."""

    @property
    def total(self) -> float:
        """How many observations there are."""
        return float(self.weights.sum())


def observe(sizes: Sizes, operation: str) -> Observed:
    """Count sizes, or raise an error that says which of them is wrong."""
    if isinstance(sizes, Mapping):
        return _from_histogram(sizes, operation)
    array = integers(sizes, operation)
    if array.ndim != 1:
        raise ValueError(f"{operation}: sizes has shape {array.shape}, expected one dimension")
    if not array.size:
        raise ValueError(f"{operation}: sizes is empty, expected at least one size")
    smallest, largest = int(array.min()), int(array.max())
    if smallest < 1 or largest > _LARGEST:
        bad = smallest if smallest < 1 else largest
        where = int(np.flatnonzero(array == bad)[0])
        raise ValueError(f"{operation}: sizes[{where}] is {bad}, expected 1 to 2**53")
    distinct, counts = np.unique(array.astype(np.int64, copy=False), return_counts=True)
    return Observed(distinct, counts.astype(np.float64))


def integers(values: Any, operation: str, name: str = "sizes") -> NDArray[Any]:
    """Make an integer array of a list, an array, a tensor or an iterator, and of nothing else."""
    expected = "expected integers: a list, a numpy array, a tensor"
    if name == "sizes":
        expected += ", or {size: how often}"
    if isinstance(values, Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{operation}: {name} is of type {type(values).__name__}, {expected}")
    values = values if hasattr(values, "__array__") else list(values)
    first = next(iter(values), None) if isinstance(values, list) else None
    if isinstance(first, Sized) and not hasattr(first, "__index__"):
        raise TypeError(
            f"{operation}: {name}[0] is of type {type(first).__name__}, {expected}. Give the "
            "lengths of samples: [len(sample) for sample in samples]"
        )
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{operation}: {name} has dtype {array.dtype}, {expected}")
    return array


def _from_histogram(histogram: Mapping[Any, Any], operation: str) -> Observed:
    seen = integers(list(histogram), operation)
    weights = np.array([*histogram.values()], dtype=np.float64)
    wrong = np.flatnonzero(~((weights >= 0) & (weights < math.inf)))
    if wrong.size:
        raise ValueError(
            f"{operation}: size {seen[wrong[0]]} was seen {weights[wrong[0]]:g} times, expected a "
            "number from 0 on"
        )
    observe(seen[weights > 0], operation)  # says which size is wrong
    return grouped(seen[weights > 0], weights[weights > 0])


def grouped(sizes: NDArray[np.integer[Any]], weights: NDArray[np.float64]) -> Observed:
    """Add up the weights of equal sizes."""
    distinct, where = np.unique(sizes, return_inverse=True)
    return Observed(distinct, np.bincount(where, weights).astype(np.float64, copy=False))


def positive_integer(value: Any, name: str, operation: str, *, least: int = 1) -> int:
    """Return ``value`` as an ``int``, or raise with the call."""
    number = None
    if not isinstance(value, (bool, np.bool_)):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number is None:
        raise TypeError(
            f"{operation}: {name} is {value!r} ({type(value).__name__}), expected an integer"
        )
    if not least <= number <= _LARGEST:
        raise ValueError(f"{operation}: {name} is {value}, expected {least} to 2**53")
    return number


def largest_bucket(largest: int, multiple_of: int, maximum: int | None, operation: str) -> int:
    """Return ``maximum`` exactly, or without one the largest size observed, rounded up."""
    if maximum is None:
        return -(-largest // multiple_of) * multiple_of
    top = positive_integer(maximum, "maximum", operation)
    if top < largest:
        raise ValueError(f"{operation}: maximum is {top}, but a size of {largest} was observed")
    return top


def batch_maxima(sizes: Sizes, batch_size: int, operation: str) -> dict[int, float]:
    """Return how often each size is the largest of a batch, on average over all orders.

    Of the C(N, n) batches, C(W, n) hold only the W sequences up to some size, so the probability
    that the maximum is at most that size is their quotient.
    """
    observed = observe(sizes, operation)
    batch_size = positive_integer(batch_size, "batch_size", operation)
    if batch_size > observed.total:
        raise ValueError(
            f"{operation}: batch_size is {batch_size}, expected at most {observed.total:g}, the "
            "number of sizes"
        )
    up_to = np.cumsum(observed.weights)
    probability = np.ones_like(up_to)
    for taken in range(batch_size):
        probability *= np.maximum(up_to - taken, 0) / (observed.total - taken)
        if probability[-1] == 0 or not probability[:-1].any():
            break
    probability[-1] = 1
    share = np.diff(probability, prepend=0.0)
    likely = share > _NEVER
    weights = share[likely] * (observed.total / batch_size)
    return dict(zip(observed.sizes[likely].tolist(), weights.tolist(), strict=True))
