"""The buckets of an axis, or of two that share them: given, grown, fitted, saved."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchguard._files import write_text
from torchguard.bucketing.buckets import Buckets, buckets_by_axes, total_cost
from torchguard.bucketing.histogram import observe
from torchguard.bucketing.pairs import PairBuckets, fit_pairs, holding, in_order

_OBSERVED_CALLS = 32
_MOST_PAIRS = 8
_COARSE_FROM = 16
# A further bucket has to save this share of what all calls together cost: the number of calls
# still to come, which would give the exact price, is unknown.
_WORTH_COMPILING = 0.02


_Kind = TypeVar("_Kind", Buckets, PairBuckets)


class _Ladder(Generic[_Kind]):
    """The buckets of one axis, or of two that share them, which may change.

    Args:
        axes: the axis, or the two.
        given: the buckets; ``"auto"`` begins with powers of two, as they are needed, and
            fits them once to the first calls.
        growing: whether a size that no bucket holds adds one.
    """

    def __init__(self, axes: tuple[str, ...], given: Any, *, growing: bool) -> None:
        self.axes = axes
        self.automatic = given == "auto"
        self.buckets: _Kind | None = None if isinstance(given, str) else given
        self.fitting = self.automatic
        self._growing = growing or self.automatic
        self._lock = threading.Lock()

    def shapes(self) -> list[tuple[int, ...]]:
        """Return each bucket as a size per axis, cheapest first."""
        return [each if isinstance(each, tuple) else (each,) for each in self.buckets or ()]

    def bucket_for(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """Return the cheapest bucket for the sizes of its axes, None if none may be added."""
        with self._lock:
            found = self._find(tuple(sizes[axis] for axis in self.axes))
        return None if found is None else dict(zip(self.axes, found, strict=True))

    def least(self, axis: str, sizes: Mapping[str, int]) -> int:
        """Return the smallest size of an axis that gets the same bucket as ``sizes``."""
        index = self.axes.index(axis)
        own = tuple(sizes[each] for each in self.axes)
        found = 0
        for shape in self.shapes():
            too_small = [place for place, size in enumerate(own) if size > shape[place]]
            if not too_small:
                break
            # A cheaper bucket that would hold the sizes but for this one.
            if too_small == [index]:
                found = max(found, shape[index])
        return found + 1

    def observe(
        self, arrived: Mapping[tuple[int, ...], int], compiled: Iterable[tuple[int, ...]]
    ) -> bool:
        """Fit automatic buckets once enough calls were seen; return whether they have changed.

        Args:
            arrived: how often each size did, by axis.
            compiled: the buckets that have run: they cost nothing more.
        """
        seen = {sizes: count for sizes, count in arrived.items() if min(sizes) > 0}
        if not self.fitting or sum(seen.values()) < _OBSERVED_CALLS:
            return False
        self.fitting = False
        self.buckets = self._fitted(seen, compiled)
        return True

    def _find(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the cheapest bucket that holds these sizes, which may be a new one."""
        raise NotImplementedError

    def _fitted(self, seen: dict[Any, int], compiled: Iterable[tuple[int, ...]]) -> _Kind:
        """Return the best buckets for the sizes seen, and those for any that are longer."""
        raise NotImplementedError


class Ladder(_Ladder[Buckets]):
    """The buckets of one axis."""

    def too_large(self, sizes: Mapping[str, int], label: str) -> str:
        """Return why a size of an argument has no bucket, and what to do."""
        (axis,) = self.axes
        largest = None if self.buckets is None else self.buckets.sizes[-1]
        return (
            f"axis {axis!r} is {sizes[axis]} in {label}, but the largest bucket is {largest}: add "
            "a larger one"
        )

    def _find(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        (size,) = sizes
        before = () if self.buckets is None else self.buckets.sizes
        if before and size <= before[-1] and not self.fitting:
            return (before[bisect_left(before, size)],)
        if not self._growing:
            return None
        # Powers of two as they are needed; once they are fitted, twice the largest at least.
        doubled = 2 * before[-1] if before and not self.fitting else 0
        bucket = max(_COARSE_FROM, doubled, 1 << (size - 1).bit_length())
        if bucket not in before:
            self.buckets = Buckets([*before, bucket])
        return (bucket,)

    def _fitted(self, seen: dict[Any, int], compiled: Iterable[tuple[int, ...]]) -> Buckets:
        sizes = {size: count for (size,), count in seen.items()}
        observed = observe(sizes, "bucketed")
        price = _WORTH_COMPILING * total_cost(observed, "linear", "bucketed")
        largest = int(observed.sizes[-1])
        there = sorted({size for (size,) in compiled})
        fitted = Buckets.fit(
            sizes,
            None,
            compile_cost=price,
            already_compiled=[size for size in there if size <= largest],
            # 8 for tensor cores, unless all that was seen is shorter than that.
            # https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html
            multiple_of=min(8, largest),
        )
        # Longer sizes than any so far still find the coarse bucket that is compiled.
        return Buckets([*fitted.sizes, *(size for size in there if size > fitted.sizes[-1])])


class PairLadder(_Ladder[PairBuckets]):
    """The buckets of two axes."""

    def _find(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        a, b = sizes
        shape = holding(self.buckets or (), a, b)
        if (shape is None and self._growing) or self.fitting:
            return self._grown(a, b)
        return shape

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

    def too_large(self, sizes: Mapping[str, int], label: str) -> str:
        """Return why two sizes have no bucket, and what to do."""
        first, second = self.axes
        return (
            f"axes {first!r} and {second!r} are {sizes[first]} and {sizes[second]} (in {label}), "
            f"but none of the buckets {list(self.buckets or ())} holds both: add a larger one, as "
            "Buckets.fit_pairs(..., maximum=...) does"
        )

    def _fitted(self, seen: dict[Any, int], _compiled: Iterable[tuple[int, ...]]) -> PairBuckets:
        fitted = fit_pairs(seen, 1)
        # One by one: for pairs there is no planner that weighs what a bucket costs.
        for count in range(2, _MOST_PAIRS + 1):
            better = fit_pairs(seen, count)
            if fitted.waste(seen) - better.waste(seen) < _WORTH_COMPILING:
                break
            fitted = better
        # What no fitted bucket holds still finds the coarse one that has run.
        return in_order(
            [*fitted, *(each for each in self.buckets or () if holding(fitted, *each) is None)]
        )


def ladders_of(
    axes: Iterable[str], given: Any, saved: Any, *, growing: bool
) -> dict[str, Ladder | PairLadder]:
    """Give each axis its ladder; two axes that have their buckets together share one.

    Raises:
        TypeError: neither buckets nor ``"auto"``.
        ValueError: an axis without a ladder, or a ladder without an axis.
    """
    axes = tuple(dict.fromkeys(axes))
    if not axes:
        raise ValueError("bucketed: dims names no axis to pad")
    if saved is not None:
        if given is not None:
            raise ValueError("bucketed: buckets and plan are both given: leave one out")
        given = saved
    if given is None:
        raise ValueError('bucketed: no buckets: pass buckets={...}, buckets="auto" or plan=')
    found: dict[str, Ladder | PairLadder] = {}
    for names, buckets in buckets_by_axes(axes, given, "bucketed", auto=True).items():
        kind = Ladder if len(names) == 1 else PairLadder
        found |= dict.fromkeys(names, kind(names, buckets, growing=growing))
    return {axis: found[axis] for axis in axes}


# ---- a buckets file ----

_FORMAT = "torchguard plan"
_VERSION = 1


def write_buckets(
    path: str | os.PathLike[str], ladders: Iterable[Ladder | PairLadder], seen: Mapping[Any, int]
) -> None:
    """Write the sizes of buckets to a file, all of it or nothing: no reader sees half of it.

    Args:
        path: where; a file that is there is replaced. Of several processes that write at the
            same time one wins.
        ladders: those that have buckets are written.
        seen: how often each size was called.
    """
    known = [each for each in ladders if each.buckets is not None]
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "buckets": {
            each.axes[0]: each.buckets.sizes for each in known if isinstance(each.buckets, Buckets)
        },
        "pairs": [
            {"axes": each.axes, "shapes": each.buckets.shapes}
            for each in known
            if isinstance(each.buckets, PairBuckets)
        ],
        "seen": sorted(seen.items()),
    }
    # Before the file is opened: what JSON can't hold leaves the old file as it is.
    text = json.dumps(document, indent=1) + "\n"
    write_text(path, text)


def read_buckets(
    path: str | os.PathLike[str],
) -> dict[Any, Buckets | PairBuckets] | Buckets:
    """Read what :func:`write_buckets` wrote, or ``python -m torchguard plan --json``.

    Returns:
        The buckets by axis, or by two axes that share them; the command's, for every axis.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no buckets file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = json.loads(text)
        if "sizes" in document:
            return Buckets.from_json(text)
        if document["format"] != _FORMAT or document["version"] != _VERSION:
            raise ValueError("another format or version")  # noqa: TRY301
        buckets: dict[Any, Buckets | PairBuckets] = {
            axis: Buckets(sizes) for axis, sizes in document["buckets"].items()
        }
        for each in document["pairs"]:
            buckets[tuple(each["axes"])] = in_order(each["shapes"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"bucketed: {os.fspath(path)!r} is not a buckets file: {error}") from None
    return buckets
