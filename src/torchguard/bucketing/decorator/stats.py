"""What a bucketed function has counted: calls, buckets, waste, the sizes it has seen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torchguard._public import public
from torchguard.bucketing.decorator.compiled import graphs_of

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.call import Caller


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
        if self.proven:
            shown = ", ".join("x".join(map(str, sizes)) for sizes in self.proven)
            lines.append(f"padding is proven for {shown}")
        return "\n".join(lines)


def stats_of(caller: Caller) -> BucketedStats:
    """Gather what a caller has counted."""
    with caller.lock:
        # Copies: a call of another thread may add one while graphs are counted.
        buckets = {sizes: replace(each) for sizes, each in caller.buckets.items()}
        graphs = {id(each): each for b in buckets.values() for each in list(b.graphs.values())}
    real = sum(
        each.real + (0.0 if each.on_device is None else float(each.on_device))
        for each in buckets.values()
    )
    padded = sum(each.padded for each in buckets.values())
    seen: dict[Any, int] = dict(caller.seen())
    if len(caller.spec.ladders) == 1:
        seen = {size: count for (size,), count in seen.items()}
    return BucketedStats(
        name=caller.name,
        calls=sum(each.calls for each in buckets.values()),
        hits={sizes: each.calls for sizes, each in sorted(buckets.items()) if each.calls},
        waste=padded / real - 1 if real else 0.0,
        compile_seconds=sum(each.seconds for each in graphs.values()),
        graphs=sum(graphs_of(each) for each in graphs.values()),
        axes=tuple(caller.spec.ladders),
        compiled=caller.compiler is not None,
        proven=tuple(sorted(sizes for sizes, each in buckets.items() if each.proven)),
        seen=seen,
    )
