"""``pad_to_bucket`` against ``F.pad``, and with a buffer against a copy into that buffer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from benchmarks.harness import AddedTarget, Comparison, Target, measure
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
        to, large = f"({batch}, {length}) to ({batch}, {size})", out.nbytes >= MEGABYTE
        padded, into = "pad_to_bucket(x, 1, buckets)", "pad_to_bucket(x, 1, buckets, out=out)"
        copy = "out[:, :length].copy_(x)"
        filled = f"{copy}; out[:, length:].fill_(0)"
        for name, what, baseline, guarded in (
            ("pad", f"{out.nbytes:,} bytes", "F.pad(x, (0, missing))", padded),
            ("out", "into a buffer, against a copy that leaves its tail stale", copy, into),
            ("out-filled", "into a buffer, against a copy and a fill of its tail", filled, into),
        ):
            yield Comparison(
                f"{name}-{batch}x{length}",
                f"{to}, {what}",
                names,
                baseline,
                guarded,
                target=None if name != "pad" else NOT_SLOWER if large else SMALL,
            )
    names = {"F": F, "pad_to_bucket": pad_to_bucket, "buckets": BUCKETS}
    names["x"] = torch.randn(4, 64, device=device)
    pair = "F.pad(x, (0, 0))", "pad_to_bucket(x, 1, buckets)"
    yield Comparison("exact-fit", "nothing to pad; F.pad copies", names, *pair)


def run(setting: Setting) -> Results:
    """Measure every row."""
    return {"rows": measure(comparisons(setting.device), setting, block_seconds=0.02)}


BENCHMARK = Benchmark(
    "padding", "What does `pad_to_bucket` cost over `F.pad`, and into a buffer?", run
)
