"""``pad_to_bucket`` against ``F.pad``, and with a buffer against a copy into that buffer.

Targets: within 3 us of ``F.pad`` for small tensors, no slower from 1 MB on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from benchmarks.harness import AddedTarget, Comparison, Side, Target, measure
from benchmarks.program import Benchmark, Results, Setting
from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.padding import pad_to_bucket

# B batch, L length, S bucket
SHAPES = ((4, 50, 64), (16, 1000, 1024), (64, 4000, 4096), (128, 10_000, 10_240))
MEGABYTE = 1 << 20
NOT_SLOWER, SMALL = Target(1.0), AddedTarget(3)
BUCKETS = Buckets([64, 1024, 4096, 10_240])


def comparisons(device: str) -> Iterator[Comparison]:
    """Return what is measured, smallest first."""
    for batch, length, size in SHAPES:
        x = torch.randn(batch, length, device=device)
        out = torch.empty(batch, size, device=device)
        names = {
            "F": F, "pad_to_bucket": pad_to_bucket, "buckets": BUCKETS, "x": x, "out": out,
            "missing": size - length, "length": length,
        }  # fmt: skip
        shapes = f"({batch}, {length}) to ({batch}, {size})"
        target = NOT_SLOWER if out.nbytes >= MEGABYTE else SMALL
        yield Comparison(
            id=f"pad-{batch}x{length}",
            what=f"{shapes}, {out.nbytes:,} bytes",
            baseline=Side("F.pad(x, (0, missing))", names),
            guarded=Side("pad_to_bucket(x, 1, buckets)", names),
            target=target,
        )
        yield Comparison(
            id=f"out-{batch}x{length}",
            what=f"{shapes}, into a buffer, against a copy that leaves its tail stale",
            baseline=Side("out[:, :length].copy_(x)", names),
            guarded=Side("pad_to_bucket(x, 1, buckets, out=out)", names),
        )
        yield Comparison(
            id=f"out-filled-{batch}x{length}",
            what=f"{shapes}, into a buffer, against a copy and a fill of its tail",
            baseline=Side("out[:, :length].copy_(x); out[:, length:].fill_(0)", names),
            guarded=Side("pad_to_bucket(x, 1, buckets, out=out)", names),
        )
    x = torch.randn(4, 64, device=device)
    names = {"F": F, "pad_to_bucket": pad_to_bucket, "buckets": BUCKETS, "x": x}
    yield Comparison(
        id="exact-fit",
        what="nothing to pad; F.pad copies",
        baseline=Side("F.pad(x, (0, 0))", names),
        guarded=Side("pad_to_bucket(x, 1, buckets)", names),
    )


def run(setting: Setting) -> Results:
    """Measure every row."""
    return {"rows": measure(comparisons(setting.device), setting, block_seconds=0.02)}


BENCHMARK = Benchmark(
    "padding", "What does `pad_to_bucket` cost over `F.pad`, and into a buffer?", run
)
