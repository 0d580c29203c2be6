"""``pad_to_bucket`` against ``F.pad``, and with a buffer against a copy into that buffer.

Targets: within 3 us of ``F.pad`` for small tensors, no slower from 1 MB on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

if __package__ in {None, ""}:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Comparison, Row, Side, Target, context, measure, report, write_record
from torchguard.buckets import Buckets
from torchguard.padding import pad_to_bucket

# B batch, L length, S bucket
SHAPES = ((4, 50, 64), (16, 1000, 1024), (64, 4000, 4096), (128, 10_000, 10_240))
MEGABYTE = 1 << 20
ALLOWED_NS = 3000
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
        target = Target(1.0) if out.nbytes >= MEGABYTE else None
        yield Comparison(
            id=f"pad-{batch}x{length}",
            what=f"({batch}, {length}) to ({batch}, {size}), {out.nbytes:,} bytes",
            baseline=Side("F.pad(x, (0, missing))", names),
            guarded=Side("pad_to_bucket(x, 1, buckets)", names),
            target=target,
        )
        yield Comparison(
            id=f"out-{batch}x{length}",
            what="into a ready buffer, against a copy that leaves its tail stale",
            baseline=Side("out[:, :length].copy_(x)", names),
            guarded=Side("pad_to_bucket(x, 1, buckets, out=out)", names),
        )
        yield Comparison(
            id=f"out-filled-{batch}x{length}",
            what="into a ready buffer, against a copy and a fill of its tail",
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


def main() -> None:
    """Measure on every device there is and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="one of them only")
    parser.add_argument("--rounds", type=int, default=51, help="rounds per row (default: 51)")
    parser.add_argument("--quick", action="store_true", help="3 short rounds: does it run at all?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the record there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = context("bench_padding")
    present = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = [options.device] if options.device else present
    rows: list[Row] = []
    for device in devices:
        rows += measure(
            comparisons(device),
            device=device,
            rounds=3 if options.quick else options.rounds,
            block_seconds=0.002 if options.quick else 0.02,
            progress=lambda row: print(report(row), flush=True),
        )
    for row in rows:
        if row.id.startswith("pad-") and row.target is None:
            verdict = "reached" if row.added_ns.median <= ALLOWED_NS else "missed"
            added = f"{row.added_ns.median:+.0f} ns of {ALLOWED_NS} allowed"
            print(f"{row.id} {row.device}: {added}: {verdict}")
    if not torch.cuda.is_available():
        record["note"] = "not measured on a GPU yet"
        print(record["note"])
    if options.json is not None:
        write_record(options.json, record, rows)


if __name__ == "__main__":
    main()
