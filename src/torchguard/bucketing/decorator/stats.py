"""What a bucketed function has counted: calls, buckets, waste, the sizes it has seen."""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchguard._public import html_table, public


@public
@dataclass(frozen=True)
class BucketedStats:
    """What a bucketed function has counted so far.

    Example:
        >>> import torch
        >>> from torchguard import Buckets, bucketed
        >>> double = bucketed(lambda x: 2 * x, dims=({0: "t"},), buckets=Buckets([4, 8]))
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
        >>> stats = double.stats()
        >>> stats.calls, stats.hits
        (1, {(4,): 1})
    """

    name: str
    calls: int
    """Calls that returned; those of ``warmup`` and of checks don't count."""
    hits: dict[tuple[int, ...], int]
    """Calls by bucket; one size per axis."""
    waste: float
    """What is padding, as a share of what is real: 0.08 is 8 %. Real is what the caller's mask or
    lengths call real; without them, the sizes of the call."""
    compile_seconds: float
    """Seconds of each graph's first call, and of its first backward in ``warmup``."""
    graphs: int
    """Graphs compiled, recompilations included."""
    axes: tuple[str, ...]
    compiled: bool = True
    """Whether anything compiles: ``compile=`` was given, or what ``torch.compile`` made."""
    proven: tuple[tuple[int, ...], ...] = ()
    """The buckets whose padding is proven, by a call or by ``warmup``."""
    seen: dict[Any, int] = field(default_factory=dict)
    """How often each size was called, as ``Buckets.fit`` takes it; with several axes each tuple of
    sizes."""
    waste_by_axis: dict[str, float] = field(default_factory=dict)
    """What the waste would be if only this axis was padded to its buckets."""
    waste_given: float = 0.0
    """The waste of the calls as they arrived: shorter sequences and rows that fill a batch up."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return {
            **vars(self),
            "hits": {"x".join(map(str, sizes)): count for sizes, count in self.hits.items()},
            "axes": list(self.axes),
            "proven": [list(sizes) for sizes in self.proven],
            "seen": [[size, count] for size, count in sorted(self.seen.items())],
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
        if self.waste_given or sum(map(bool, self.waste_by_axis.values())) > 1:
            parts = [f"{axis} {100 * waste:.1f} %" for axis, waste in self.waste_by_axis.items()]
            if self.waste_given:
                parts.append(f"padded before the call {100 * self.waste_given:.1f} %")
            lines.append(f"waste by cause: {', '.join(parts)}")
        if self.proven:
            shown = ", ".join("x".join(map(str, sizes)) for sizes in self.proven)
            lines.append(f"padding is proven for {shown}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        first, _, *rest = str(self).splitlines()
        hits = sorted(self.hits.items())
        rows = [(" x ".join(map(str, sizes)), f"{count:,}") for sizes, count in hits]
        below = "; ".join([first, *rest[len(rows) :]])
        return html_table([(" x ".join(self.axes), "calls"), *rows], below)


@dataclass
class Tally:
    """What was counted of calls of the same sizes."""

    bucket: tuple[int, ...]
    calls: int = 0
    real: float = 0.0
    padded: int = 0
    on_device: torch.Tensor | None = None
    """What else is real by masks on an accelerator: read by ``stats()`` only, which waits."""


class Counts:
    """Counts calls, of several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[tuple[int, ...], Tally] = {}

    def add(self, sizes: tuple[int, ...], bucket: tuple[int, ...], real: Any, padded: int) -> None:
        """Count a call that has returned."""
        with self._lock:  # += reads and writes, and another thread may call in between
            tally = self._tallies.get(sizes)
            if tally is None:
                tally = self._tallies[sizes] = Tally(bucket)
            tally.calls += 1
            tally.padded += padded
            if isinstance(real, torch.Tensor):
                before = tally.on_device
                tally.on_device = real if before is None else before.to(real.device) + real
            else:
                tally.real += real

    def buckets(self) -> set[tuple[int, ...]]:
        """Return the buckets in which calls were."""
        with self._lock:
            return {each.bucket for each in self._tallies.values()}

    def stats(self, axes: tuple[str, ...], **known: Any) -> BucketedStats:
        """Return what was counted, with the other fields of a ``BucketedStats``."""
        with self._lock:
            tallies = {sizes: replace(each) for sizes, each in self._tallies.items()}
        hits: Counter[tuple[int, ...]] = Counter()
        for each in tallies.values():
            hits[each.bucket] += each.calls
        real = sum(
            each.real + (0.0 if each.on_device is None else float(each.on_device))
            for each in tallies.values()
        )
        padded = sum(each.padded for each in tallies.values())
        arrived, cells_by_axis = 0.0, dict.fromkeys(axes, 0.0)
        for sizes, tally in tallies.items():
            rows = tally.padded / math.prod(tally.bucket)
            arrived += rows * math.prod(sizes)
            for place, (axis, bucket) in enumerate(zip(axes, tally.bucket, strict=True)):
                padded_here = (*sizes[:place], bucket, *sizes[place + 1 :])
                cells_by_axis[axis] += rows * math.prod(padded_here)
        return BucketedStats(
            axes=axes,
            calls=sum(hits.values()),
            hits=dict(sorted(hits.items())),
            waste=padded / real - 1 if real else 0.0,
            waste_by_axis={
                axis: cells / arrived - 1 if arrived else 0.0
                for axis, cells in cells_by_axis.items()
            },
            waste_given=arrived / real - 1 if real else 0.0,
            seen={s[0] if len(s) == 1 else s: each.calls for s, each in tallies.items()},
            **known,
        )
