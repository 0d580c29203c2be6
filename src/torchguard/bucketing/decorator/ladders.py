"""The buckets of an axis, or of two that share them: given, grown, fitted, saved."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchguard._files import write_text
from torchguard.bucketing.buckets import Buckets, buckets_by_axes
from torchguard.bucketing.pairs import PairBuckets, fit_pairs, holding, in_order

_OBSERVED_CALLS = 32
_MOST_PAIRS = 8
_COARSE_FROM = 16
# A further bucket has to save this share of what all calls together cost: the number of calls
# still to come, which would give the exact price, is unknown.
_WORTH_COMPILING = 0.02


class Ladder:
    """The buckets of one axis, or of two that share them, which may change."""

    def __init__(self, axes: tuple[str, ...], given: Any, *, growing: bool) -> None:
        self.axes = axes
        self.fitting = given == "auto"
        self.shapes: list[tuple[int, ...]] = []
        """Each bucket as a size per axis, cheapest first; none yet where they are automatic."""
        if not self.fitting:
            self.shapes = [each if isinstance(each, tuple) else (each,) for each in given]
        self._growing = growing or self.fitting
        self._lock = threading.Lock()

    def bucket_for(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """Return the cheapest bucket for the sizes of its axes, None if none may be added."""
        own = tuple(sizes[axis] for axis in self.axes)
        with self._lock:
            fits = (s for s in self.shapes if all(n <= b for n, b in zip(own, s, strict=True)))
            found = next(fits, None)
            if (found is None and self._growing) or self.fitting:
                found = self._grown(own)
        return None if found is None else dict(zip(self.axes, found, strict=True))

    def least(self, axis: str, sizes: Mapping[str, int]) -> int:
        """Return the smallest size of an axis that gets the same bucket as ``sizes``."""
        index = self.axes.index(axis)
        own = tuple(sizes[each] for each in self.axes)
        found = 0
        for shape in self.shapes:
            too_small = [place for place, size in enumerate(own) if size > shape[place]]
            if not too_small:
                break
            # A cheaper bucket that would hold the sizes but for this one.
            if too_small == [index]:
                found = max(found, shape[index])
        return found + 1

    def too_large(self, sizes: Mapping[str, int], label: str) -> str:
        """Return why sizes have no bucket, and what to do."""
        if len(self.axes) == 1:
            (axis,), largest = self.axes, max(self.shapes)[0]
            return (
                f"axis {axis!r} is {sizes[axis]} in {label}, but the largest bucket is {largest}: "
                "add a larger one"
            )
        first, second = self.axes
        return (
            f"axes {first!r} and {second!r} are {sizes[first]} and {sizes[second]} (in {label}), "
            f"but none of the buckets {self.shapes} holds both: add a larger one, as "
            "Buckets.fit_pairs(..., maximum=...) does"
        )

    def observe(self, arrived: Mapping[tuple[int, ...], int]) -> bool:
        """Fit automatic buckets once enough calls were seen; return whether they have changed."""
        seen: dict[Any, int] = {sizes: n for sizes, n in arrived.items() if min(sizes) > 0}
        if not self.fitting or sum(seen.values()) < _OBSERVED_CALLS:
            return False
        with self._lock:
            self.fitting = False
            if len(self.axes) == 1:
                counts = {size: count for (size,), count in seen.items()}
                fitted = _fitted(counts, [size for (size,) in self.shapes])
                self.shapes = [(size,) for size in fitted]
            else:
                self.shapes = [*_fitted_pairs(seen, self.shapes)]
        return True

    def _grown(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Add a bucket that holds these sizes, if there is none.

        Its sizes are those of buckets there are, else the larger of twice the largest and the next
        power of two; only powers of two while sizes are observed.
        """
        before = self.shapes
        grown = []
        for index, size in enumerate(sizes):
            there = [] if self.fitting else sorted({each[index] for each in before})
            enough = [each for each in there if each >= size]
            power = 1 << max(size - 1, 0).bit_length()
            least = _COARSE_FROM if len(sizes) == 1 else power
            doubled = 2 * there[-1] if there else 0
            grown.append(enough[0] if enough else max(least, doubled, power))
        found = tuple(grown)
        if found not in before:
            # Cheapest first by their area; the cost that pairs were fitted with is not kept.
            area = math.prod(found)
            cheaper = [each for each in before if math.prod(each) <= area]
            self.shapes = [*cheaper, found, *(each for each in before if each not in cheaper)]
        return found


def _fitted(seen: Mapping[int, int], compiled: Sequence[int]) -> Buckets:
    """Return the best buckets for the sizes seen, and those for any that are longer."""
    largest = max(seen)
    fitted = Buckets.fit(
        seen,
        None,
        compile_cost=_WORTH_COMPILING * sum(size * count for size, count in seen.items()),
        already_compiled=[size for size in compiled if size <= largest],
        # 8 for tensor cores, unless all that was seen is shorter than that.
        # https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html
        multiple_of=min(8, largest),
    )
    # Longer sizes than any so far still find the coarse bucket that is compiled.
    return Buckets([*fitted, *(size for size in compiled if size > fitted.sizes[-1])])


def _fitted_pairs(seen: Mapping[tuple[int, int], int], before: Iterable[Any]) -> PairBuckets:
    fitted = fit_pairs(seen, 1)
    # One by one: for pairs there is no planner that weighs what a bucket costs.
    for count in range(2, _MOST_PAIRS + 1):
        better = fit_pairs(seen, count)
        if fitted.waste(seen) - better.waste(seen) < _WORTH_COMPILING:
            break
        fitted = better
    # What no fitted bucket holds still finds the coarse one that has run.
    return in_order([*fitted, *(each for each in before if holding(fitted, *each) is None)])


def ladders_of(axes: Sequence[str], given: Any, saved: Any, *, growing: bool) -> dict[str, Ladder]:
    """Give each axis its ladder; two axes that have their buckets together share one."""
    if not axes:
        raise ValueError("bucketed: dims names no axis to pad")
    if saved is not None:
        if given is not None:
            raise ValueError("bucketed: buckets and plan are both given: leave one out")
        given = saved
    if given is None:
        raise ValueError('bucketed: no buckets: pass buckets={...}, buckets="auto" or plan=')
    found: dict[str, Ladder] = {}
    for names, buckets in buckets_by_axes(axes, given, "bucketed", auto=True).items():
        found |= dict.fromkeys(names, Ladder(names, buckets, growing=growing))
    return {axis: found[axis] for axis in axes}


# ---- a buckets file ----

_FORMAT = "torchguard plan"
_VERSION = 1


def write_buckets(
    path: str | os.PathLike[str], ladders: Iterable[Ladder], seen: Mapping[Any, int]
) -> None:
    """Write the sizes of buckets to a file, all of it or nothing: no reader sees half of it."""
    known = [each for each in ladders if each.shapes]
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "buckets": {e.axes[0]: [s for (s,) in e.shapes] for e in known if len(e.axes) == 1},
        "pairs": [{"axes": e.axes, "shapes": e.shapes} for e in known if len(e.axes) > 1],
        "seen": sorted(seen.items()),
    }
    write_text(path, json.dumps(document, indent=1) + "\n")


def read_buckets(
    path: str | os.PathLike[str],
) -> dict[Any, Buckets | PairBuckets] | Buckets:
    """Read what :func:`write_buckets` wrote, or ``python -m torchguard plan --json``."""
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
