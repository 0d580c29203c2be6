"""Buckets: a ladder of static sizes, explicit, by rule, or optimal for the sizes observed.

A model that sees a new length with every batch makes ``torch.compile`` go dynamic or
recompile until it gives up. Padded to the next size of a ladder, it sees only those.
Needs numpy only.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from typing_extensions import Self

from torchguard._public import public
from torchguard.bucketing.fit import Cost, best_ladders, costs_of, ladder_of_runs
from torchguard.bucketing.histogram import (
    Observed,
    Sizes,
    batch_maxima,
    is_amount,
    largest_bucket,
    observe,
    positive_integer,
    with_prior,
)
from torchguard.bucketing.pairs import PairBuckets, fit_pairs
from torchguard.bucketing.steps import epoch_of

_FORMAT = "torchguard.bucketing.buckets"
_VERSION = 1


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
        minimum, maximum = _range(minimum, maximum, "Buckets.powers_of_two")
        powers = range((minimum - 1).bit_length(), (maximum - 1).bit_length())
        return cls([*(1 << power for power in powers), maximum])

    @classmethod
    def multiples_of(cls, step: int, maximum: int) -> Self:
        """Return the multiples of ``step`` below ``maximum``, and ``maximum``."""
        step = positive_integer(step, "step", "Buckets.multiples_of")
        maximum = positive_integer(maximum, "maximum", "Buckets.multiples_of")
        return cls([*range(step, maximum, step), maximum])

    @classmethod
    def geometric(cls, minimum: int, maximum: int, count: int, multiple_of: int = 8) -> Self:
        """Return ``count`` sizes, each the same factor above the last, up to ``multiple_of``.

        Sizes that the rounding makes equal count once, so there may be fewer.
        ``maximum`` is always the largest.
        """
        minimum, maximum = _range(minimum, maximum, "Buckets.geometric")
        count = positive_integer(count, "count", "Buckets.geometric")
        step = positive_integer(multiple_of, "multiple_of", "Buckets.geometric")
        exact = np.geomspace(minimum, maximum, count)[:-1] if count > 1 else np.empty(0)
        # geomspace is off by some 1e-16 of each size, which must not cost a whole step.
        rounded = np.ceil(exact * (1 - 1e-12) / step).astype(np.int64) * step
        return cls([*np.minimum(rounded, maximum).tolist(), maximum])

    @classmethod
    def fit(
        cls,
        sizes: Sizes,
        count: int | None = 8,
        *,
        cost: Cost = "linear",
        multiple_of: int = 1,
        maximum: int | None = None,
        prior: float | None = None,
        compile_cost: float | None = None,
        step_cost: float = 1.0,
        already_compiled: Iterable[int] = (),
        batch_size: int = 1,
        max_padding: float | None = None,
        tokens: int | None = None,
    ) -> Self:
        """Return the ladder that wastes least on the sizes observed: the optimum, not a search.

        Fit what arrives at the model. Where that is a padded batch, it is the longest sequence
        of each batch, not single sequences: ``batch_size`` makes the one of the other.

        Args:
            sizes: one integer per observation (a list, an integer array or tensor, any
                iterable), or a histogram ``{size: how often}``.
            count: at most so many buckets, fewer where more would save nothing.
                None to choose the number too, from ``compile_cost``.
            cost: what a call costs at a size: ``"linear"``, ``"quadratic"``, or a function
                of one size. It may fall somewhere; a bucket may then be a size that was
                not observed. The function is asked for every aligned size in the range, or, where
                those are more than a million, for the aligned sizes observed.
            multiple_of: align buckets to this (8, 16 or 64 for tensor cores).
            maximum: the longest there can ever be. It is the largest bucket exactly,
                aligned or not; without it that is the longest observed, rounded up.
            prior: how many pseudo-observations to spread from the smallest size observed to
                ``maximum``, thinning out towards it. They guard a few observations of a heavy
                tail, and make no difference to many. None stands for 4 where ``maximum`` is
                given and for 0 elsewhere; with 0 the ladder is the optimum for the data itself.
            compile_cost: with ``count=None``, seconds to compile one bucket.
            step_cost: with ``count=None``, seconds per unit of cost. If the sizes are a sample
                of a run a hundred times as long, a hundred times that.
            already_compiled: with ``count=None``, sizes that cost nothing more.
            batch_size: with more than 1, ``sizes`` are those of sequences that are padded to the
                longest of a batch of so many. Fitted is the distribution of the longest, on
                average over all orders of the data; nothing is drawn at random.
            max_padding: no size observed is padded by more than this share of it: 0.25 for a
                quarter. A bucket is then the largest of its sizes, aligned, also where a cost
                falls.
            tokens: fit for :class:`torchguard.BucketBatchSampler` with this budget: of the best
                ladders of 1 to ``count`` sizes, the one with which an epoch costs least, the
                batches that are not full included. With few items, fewer buckets cost less.

        Raises:
            TypeError: something is no integer (bools and floats are not).
            ValueError: no sizes, a size that is not positive, ``maximum`` below the data,
                a bad cost, arguments that go with another ``count``, or a ``max_padding`` that
                takes more than ``count`` buckets; the message says how many.

        Example:
            >>> from torchguard import Buckets
            >>> Buckets.fit([3, 5, 9, 10], count=None, compile_cost=4, step_cost=1)
            Buckets([5, 10])
        """
        if tokens is not None and (batch_size != 1 or count is None or max_padding is not None):
            raise ValueError(
                "Buckets.fit: tokens is for the batches of BucketBatchSampler, and chooses how "
                "many sizes up to count: pass it without batch_size, count=None or max_padding"
            )
        if batch_size != 1:
            sizes = batch_maxima(sizes, batch_size, "Buckets.fit")
        observed = observe(sizes, "Buckets.fit")
        multiple_of = positive_integer(multiple_of, "multiple_of", "Buckets.fit")
        largest = int(observed.sizes[-1])
        top = largest_bucket(largest, multiple_of, maximum, "Buckets.fit")
        # The ladder is for what may come, the bound for what was seen.
        prior = (4.0 if maximum else 0.0) if prior is None else prior
        weighted = with_prior(observed, top, _number(prior, "prior", "a number from 0 on"))
        options: dict[str, Any] = {"cost": cost, "multiple_of": multiple_of, "top": top}
        if max_padding is not None:
            share = "a share from 0 on, such as 0.25"
            options["max_padding"] = _number(max_padding, "max_padding", share)
        if count is None:
            seconds = "seconds, from 0 on"
            compiled = {
                positive_integer(size, "a size in already_compiled", "Buckets.fit")
                for size in already_compiled
            }
            options |= {
                "compile_cost": _number(compile_cost, "with count=None, compile_cost", seconds),
                "step_cost": _number(step_cost, "with count=None, step_cost", seconds),
                "already_compiled": sorted(size for size in compiled if size <= (maximum or size)),
            }
        elif compile_cost is not None or step_cost != 1.0 or tuple(already_compiled):
            raise ValueError(
                "Buckets.fit: compile_cost, step_cost and already_compiled choose the count: "
                f"pass count=None with them, not {count!r}"
            )
        else:
            count = positive_integer(count, "count", "Buckets.fit")
        if count is None or max_padding is not None:
            reach = top if maximum else largest
            return cls(
                ladder_of_runs(weighted, bound=observed.sizes, count=count, reach=reach, **options)
            )
        ladders = best_ladders(weighted, count, **options)
        if tokens is None:
            return cls(ladders[-1].sizes)
        tokens = positive_integer(tokens, "tokens", "Buckets.fit")
        # With a maximum above the budget, what was seen may need more sizes to be within it.
        held = [min(size for size in each.sizes if size >= largest) for each in ladders]
        prices = costs_of(held, cost, "Buckets.fit")
        ladders = [ladders[n] for n in np.flatnonzero(prices <= tokens)] or ladders
        # More sizes leave more batches that are not full, so the most may not be the best.
        epochs = [epoch_of(each.sizes, observed, tokens, cost, "Buckets.fit") for each in ladders]
        cheapest = int(np.argmin([epoch.cost for epoch in epochs]))
        return cls(ladders[cheapest].sizes)

    fit_pairs = staticmethod(fit_pairs)

    def bucket_for(self, size: int) -> int:
        """Return the smallest bucket that holds ``size``.

        Raises:
            TypeError: ``size`` is no integer.
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
        return self._waste(observe(sizes, "Buckets.waste"), cost, "Buckets.waste")

    def _waste(self, observed: Observed, cost: Cost, operation: str) -> float:
        if observed.sizes[-1] > self.sizes[-1]:
            raise ValueError(
                f"{operation}: a size is {observed.sizes[-1]}, but the largest bucket is "
                f"{self.sizes[-1]}"
            )
        costs = costs_of(self.sizes, cost, operation)
        padded = float(costs[np.searchsorted(self.sizes, observed.sizes)] @ observed.weights)
        return padded / total_cost(observed, cost, operation) - 1

    def plot(self, sizes: Sizes, path: str | os.PathLike[str], *, cost: Cost = "linear") -> None:
        """Draw where the sizes fall, what each bucket wastes, and waste against count.

        Needs the extra ``plot``: ``pip install 'torchguard-runtime[plot]'``.

        Args:
            sizes: as for :meth:`fit`.
            path: a file; its ending names the format (``.png``, ``.svg``, ``.pdf``).
            cost: as for :meth:`fit`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from torchguard.bucketing.plot import draw  # noqa: PLC0415 - optional

        observed = observe(sizes, "Buckets.plot")
        draw(self.sizes, observed, path, cost, self._waste(observed, cost, "Buckets.plot"))

    def to_json(self) -> str:
        """Return the ladder as a JSON document that names its format and version."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, "sizes": list(self.sizes)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: not JSON, another format, or a version this torchguard does not know.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"Buckets.from_json: not JSON: {error}") from None
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise ValueError(f"Buckets.from_json: expected an object of format {_FORMAT!r}")
        if document.get("version") != _VERSION:
            raise ValueError(
                f"Buckets.from_json: version {document.get('version')!r}, but this torchguard "
                f"reads version {_VERSION}"
            )
        sizes = document.get("sizes")
        if not isinstance(sizes, list):  # the document is wrong, not an argument's type
            raise ValueError(f"Buckets.from_json: 'sizes' is {sizes!r}, expected a list")  # noqa: TRY004
        try:
            return cls(sizes)
        except TypeError as error:
            raise ValueError(f"Buckets.from_json: {error}") from None

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __contains__(self, size: object) -> bool:
        return size in self.sizes  # not by __iter__, which Dynamo of 2.6 can't follow

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.sizes)})"


def total_cost(observed: Observed, cost: Cost, operation: str) -> float:
    """Return what the observations cost at their own sizes, without padding."""
    return float(costs_of(observed.sizes, cost, operation) @ observed.weights)


def _range(minimum: Any, maximum: Any, operation: str) -> tuple[int, int]:
    minimum = positive_integer(minimum, "minimum", operation)
    maximum = positive_integer(maximum, "maximum", operation)
    if minimum > maximum:
        raise ValueError(f"{operation}: minimum is {minimum}, above maximum, which is {maximum}")
    return minimum, maximum


def _number(value: Any, name: str, expected: str) -> float:
    if not is_amount(value):
        raise ValueError(f"Buckets.fit: {name} is {value!r}, expected {expected}")
    return float(value)


# ---- which buckets each axis has ----

GivenBuckets: TypeAlias = Buckets | PairBuckets | Literal["auto"]


def buckets_by_axes(
    axes: Sequence[str], given: Any, operation: str, *, auto: bool = False
) -> dict[tuple[str, ...], GivenBuckets]:
    """Read ``buckets=``; return buckets by the axes that they are for, one or two.

    Given are buckets for every axis, pairs for the two that there are, or a dict
    ``{axis: buckets, (axis, axis): pairs}``; lists stand for them, with ``auto`` also "auto".
    """
    axes, listed = tuple(axes), ", ".join(axes)
    by_axes: dict[tuple[str, ...], GivenBuckets] = {}
    what = f"{operation}: buckets" + (f" of {axes[0]!r}" if auto and len(axes) == 1 else "")
    if not isinstance(given, Mapping):
        read = _read(given, what, " or 'auto'" if auto else " or {axis: Buckets}")
        if not isinstance(read, PairBuckets):
            return {(axis,): read for axis in axes}
        if len(axes) == 2:  # noqa: PLR2004
            return {axes: read}
        hint = (
            "pass Buckets, or name the other axis in dims as well"
            if len(axes) == 1
            else "say which two they are for, {(axis, axis): pairs, axis: buckets}"
        )
        named = ", ".join(map(repr, axes))
        raise ValueError(f"{operation}: buckets are pairs, but dims names {named}: {hint}")
    for key, value in given.items():
        names = key if isinstance(key, tuple) else (key,)
        what = ", ".join(map(repr, names))
        for name in names:
            if name not in axes:
                raise ValueError(f"{operation}: buckets names {name!r}, but dims has {listed}")
            if names.count(name) > 1 or any(name in earlier for earlier in by_axes):
                raise ValueError(f"{operation}: buckets has {name!r} twice")
        read = _read(value, f"{operation}: buckets of {what}", " or 'auto'" if auto else "")
        wanted = 2 if isinstance(read, PairBuckets) else 1
        if len(names) != wanted and not (read == "auto" and len(names) == 2):  # noqa: PLR2004
            hint = (
                f"pass {{({what}): Buckets.fit_pairs(...)}}, or one Buckets for each"
                if wanted == 1
                else f"name both, {{({names[0]!r}, other): pairs}}"
            )
            raise ValueError(f"{operation}: buckets of {what} are for {wanted} axes: {hint}")
        by_axes[names] = read
    missing = [axis for axis in axes if not any(axis in names for names in by_axes)]
    if missing:
        raise ValueError(f"{operation}: no buckets for {', '.join(map(repr, missing))}")
    return by_axes


def _read(given: Any, what: str, otherwise: str) -> GivenBuckets:
    """Return buckets, also from a list of sizes or of pairs."""
    if isinstance(given, PairBuckets):
        return given
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], (list, tuple)):
        return PairBuckets((a, b) for a, b in given)
    if isinstance(given, str) and given == "auto" and "auto" in otherwise:
        return "auto"
    return as_buckets(given, what, otherwise)


def all_sizes(buckets: Mapping[tuple[str, ...], Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the size of each axis' bucket."""
    found: dict[str, int] = {}
    for axes, each in buckets.items():
        if isinstance(each, PairBuckets):
            found |= zip(axes, each.bucket_for(*(sizes[axis] for axis in axes)), strict=True)
        else:
            found[axes[0]] = each.bucket_for(sizes[axes[0]])
    return found
