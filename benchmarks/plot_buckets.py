"""Draws a record of bench_buckets: total seconds against batches, per phase and device.

python benchmarks/plot_buckets.py RECORD [--to docs/img/bench_buckets.png]
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(record: dict[str, Any], to: Path) -> None:
    """Draw one panel per phase and device."""
    import matplotlib.pyplot as plt  # noqa: PLC0415 - the extra `plot`

    panels = sorted({(row["device"], row["phase"]) for row in record["rows"]})
    figure, axes = plt.subplots(1, len(panels), figsize=(7 * len(panels), 5.5), squeeze=False)
    for (device, phase), panel in zip(panels, axes[0], strict=True):
        for row in record["rows"]:
            if (row["device"], row["phase"]) != (device, phase):
                continue
            total = list(accumulate(row["seconds"]))
            ours = row["row"].startswith("bucketed")
            panel.plot(
                range(1, len(total) + 1),
                total,
                label=row["row"],
                linewidth=2 if ours else 1,
                linestyle="-" if ours else "--",
            )
        panel.set(title=f"{phase}, {device}", xlabel="batches", ylabel="total seconds", ylim=0)
        panel.legend(fontsize=7)
    versions = record["versions"]
    figure.suptitle(f"torch {versions['torch']}, {record['hardware']['cpu']}, {record['date']}")
    figure.tight_layout()
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Draw the record that is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--to", type=Path, default=Path("docs/img/bench_buckets.png"))
    options = parser.parse_args(arguments)
    draw(json.loads(options.record.read_text(encoding="utf-8")), options.to)
    return 0


if __name__ == "__main__":
    sys.exit(main())
