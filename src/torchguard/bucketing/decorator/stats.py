"""What ran through the buckets, and what other buckets would change."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchguard._public import public
from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.decorator.call import Caller
from torchguard.bucketing.pairs import PairBuckets, fit_pairs, holding
from torchguard.bucketing.plot import draw_pairs

__all__ = [
    "AxisReport",
    "BucketedReport",
    "BucketedStats",
    "observed_sizes",
    "report_of",
    "stats_of",
]

_STEP = 4
_LOSES_ABOVE = 0.5


@public
@dataclass(frozen=True)
class BucketedStats:
    """A picture of one moment."""

    name: str
    calls: int
    """That returned; those of ``warmup`` and of checks don't count."""
    hits: dict[tuple[int, ...], int]
    """Calls by bucket; one size per axis."""
    overflowed: int
    """Calls above the largest bucket, which ran without padding."""
    waste: float
    """What padding added, as a share of the real sizes: 0.08 is 8 %."""
    compile_seconds: float
    """Of the first call of each variant, and of ``warmup``."""
    graphs: int
    """Graphs compiled, recompilations included."""
    axes: tuple[str, ...]
    relies_on_fill_0: tuple[str, ...] = ()
    """Inputs whose padding is read, and 0 in it was shown to be neutral, though not declared."""
    compiled: bool = True
    """Whether anything compiles: ``compile=`` was given, or what ``torch.compile`` made."""
    engines: dict[tuple[int, ...], str] = field(default_factory=dict)
    """By bucket what runs it and why, with ``engine="ranges"`` or ``"auto"``."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return {
            **vars(self),
            "hits": {"x".join(map(str, sizes)): count for sizes, count in self.hits.items()},
            "axes": list(self.axes),
            "relies_on_fill_0": list(self.relies_on_fill_0),
            "engines": {"x".join(map(str, sizes)): text for sizes, text in self.engines.items()},
        }

    def __str__(self) -> str:
        title = " x ".join(self.axes)
        width = max(len(title), 8)
        compiling = f"{self.graphs} graphs, {self.compile_seconds:.1f} s compiling"
        if not self.compiled:
            compiling = "not compiled (compile=True compiles each bucket)"
        lines = [
            f"{self.name}: {self.calls:,} calls, waste {100 * self.waste:.1f} %, {compiling}",
            f"{title:>{width}} {'calls':>10}",
        ]
        for sizes, count in sorted(self.hits.items()):
            lines.append(f"{' x '.join(map(str, sizes)):>{width}} {count:>10,}")
        if self.overflowed:
            lines.append(f"{'above':>{width}} {self.overflowed:>10,}")
        lines += [
            f"{' x '.join(map(str, sizes)):>{width}} runs {text}"
            for sizes, text in self.engines.items()
        ]
        if self.relies_on_fill_0:
            lines.append(f"relies on fill 0 in the padding of {', '.join(self.relies_on_fill_0)}")
        return "\n".join(lines)


def stats_of(caller: Caller) -> BucketedStats:
    """Gather what a caller has counted."""
    with caller.lock:
        counts = {key: (c.calls, c.real, c.padded) for key, c in caller.counts.items()}
        # A copy: a call of another thread may add one while graphs are counted.
        variants = list(caller.cache.variants.values())
    # Under the empty key are the calls that no bucket held.
    inside = {key: numbers for key, numbers in counts.items() if key}
    real = sum(numbers[1] for numbers in inside.values())
    padded = sum(numbers[2] for numbers in inside.values())
    return BucketedStats(
        name=caller.name,
        calls=sum(numbers[0] for numbers in counts.values()),
        hits={key: numbers[0] for key, numbers in sorted(inside.items()) if numbers[0]},
        overflowed=counts.get((), (0, 0, 0))[0],
        waste=padded / real - 1 if real else 0.0,
        compile_seconds=sum(variant.seconds for variant in variants),
        graphs=sum(variant.graphs for variant in variants),
        axes=tuple(caller.spec.ladders),
        relies_on_fill_0=caller.kept.relies_on_zero,
        compiled=caller.cache.static is not None,
        engines=caller.engine.described(),
    )


@dataclass(frozen=True)
class AxisReport:
    """One axis: the buckets there are, and the best ones of other counts."""

    axis: str
    """Its name; ``"b x t"`` for two that share their buckets."""
    buckets: tuple[Any, ...]
    """Sizes, or pairs of them."""
    waste: float
    """Over the sizes seen that have a bucket."""
    best: dict[int, tuple[tuple[Any, ...], float]]
    """By count: the best buckets for what was seen, and their waste."""

    @property
    def padding_loses(self) -> bool:
        """Whether even 4 more buckets would waste more than half of what is computed.

        A rule of thumb: dynamic shapes then have to be a third slower to be worse.
        """
        return self.best[max(self.best)][1] > _LOSES_ABOVE


@public
@dataclass(frozen=True)
class BucketedReport:
    """What other buckets would change."""

    statistics: BucketedStats
    axes: tuple[AxisReport, ...]

    def __str__(self) -> str:
        lines = [str(self.statistics)]
        for each in self.axes:
            lines += [
                "",
                (
                    f"{each.axis}: {len(each.buckets)} buckets {_listed(each.buckets)}, "
                    f"waste {100 * each.waste:.1f} %"
                ),
            ]
            lines += [
                f"  the best {count}: {_listed(sizes)}, waste {100 * waste:.1f} %"
                for count, (sizes, waste) in each.best.items()
            ]
            lines.append(
                f"  padding costs {100 * each.waste:.1f} % here: it loses to dynamic shapes "
                "(compile with dynamic=True) where those are slower by less than that"
                + ("; even 4 more buckets would not help" if each.padding_loses else "")
            )
        return "\n".join(lines)


def observed_sizes(caller: Caller) -> dict[str, dict[int, int]]:
    """Return how often each size was called, by axis."""
    return {
        axis: {size: count for (size,), count in caller.seen([axis]).items()}
        for axis in caller.spec.ladders
    }


def report_of(caller: Caller, path: str | os.PathLike[str] | None) -> BucketedReport:
    """Compare the buckets of each axis with the best ones for what was seen.

    Raises:
        ValueError: nothing was called yet.
        ImportError: a path is given, but matplotlib is not installed.
    """
    ladders = list(dict.fromkeys(caller.spec.ladders.values()))
    axes = []
    for ladder in ladders:
        buckets = ladder.buckets
        # A size that no bucket holds has run without padding: none is wasted on it.
        seen = caller.seen(ladder.axes).items()
        held = {key: count for key, count in seen if buckets and _holds(buckets, key)}
        if buckets is None or not held:
            raise ValueError("bucketed: nothing to report yet: call the function first")
        target = None if path is None else Path(path)
        if target is not None and len(ladders) > 1:
            # A picture for each ladder: one file would show the last alone.
            target = target.with_name(f"{target.stem}-{'-'.join(ladder.axes)}{target.suffix}")
        axes.append(_report_of_axis(" x ".join(ladder.axes), buckets, held, target))
    return BucketedReport(stats_of(caller), tuple(axes))


def _report_of_axis(
    axis: str,
    buckets: Buckets | PairBuckets,
    held: dict[tuple[int, ...], int],
    path: Path | None,
) -> AxisReport:
    """Compare buckets with the best of 4 fewer, as many and 4 more."""
    # Fewer compile sooner, more waste less: what either would change.
    counts = sorted({max(len(buckets) - _STEP, 1), len(buckets), len(buckets) + _STEP})
    best: dict[int, tuple[tuple[Any, ...], float]] = {}
    if isinstance(buckets, PairBuckets):
        pairs = {(a, b): count for (a, b), count in held.items()}
        for count in counts:
            pairs_fitted = fit_pairs(pairs, count)
            best[count] = (pairs_fitted.shapes, pairs_fitted.waste(pairs))
        if path is not None:
            draw_pairs(buckets.shapes, pairs, path)
        return AxisReport(axis, buckets.shapes, buckets.waste(pairs), best)
    sizes = {size: count for (size,), count in held.items()}
    for count in counts:
        fitted = Buckets.fit(sizes, count)
        best[count] = (fitted.sizes, fitted.waste(sizes))
    if path is not None:
        buckets.plot(sizes, path)
    return AxisReport(axis, buckets.sizes, buckets.waste(sizes), best)


def _holds(buckets: Buckets | PairBuckets, sizes: tuple[int, ...]) -> bool:
    if min(sizes) <= 0:
        return False
    if isinstance(buckets, PairBuckets):
        return holding(buckets, *sizes) is not None
    return sizes[0] <= buckets.sizes[-1]


def _listed(buckets: Iterable[Any]) -> str:
    return " ".join(
        "x".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in buckets
    )
