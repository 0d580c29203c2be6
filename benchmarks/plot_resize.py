"""Draws a record of ``bench_resize``: ``python -m benchmarks.plot_resize [record] [--to PNG]``.

Needs the extra ``plot``. Each row is one comparison: an open circle where plain
torch is, a full one where the guard is, a bar for the quartiles, and the ratio.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if __package__ in {None, ""}:  # run as a file: the folder on the path is this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.publish import ROOT, newest_record, read_record

PLAIN, GUARDED = "#4477aa", "#cc6677"  # Paul Tol's "bright": told apart by colour-blind eyes


def draw(record: dict[str, Any], to: Path) -> None:
    """Draw every row of the record that was measured on the CPU."""
    import matplotlib as mpl  # noqa: PLC0415  an extra

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    rows = [row for row in record["rows"] if row["device"] == "cpu"]
    figure, axes = plt.subplots(figsize=(11, 0.36 * len(rows) + 1.6), layout="constrained")
    for height, row in zip(range(len(rows), 0, -1), rows, strict=True):
        before, after = row["baseline_ns"], row["guarded_ns"]
        axes.plot((before["median"], after["median"]), (height, height), color="0.8", zorder=1)
        for spread, color, face in ((before, PLAIN, "white"), (after, GUARDED, GUARDED)):
            axes.plot((spread["q1"], spread["q3"]), (height, height), color=color, lw=3, alpha=0.4)
            axes.plot(spread["median"], height, "o", color=color, mfc=face, ms=6, zorder=3)
        missed = row["verdict"] not in {None, "reached"}
        axes.annotate(
            f"{row['ratio']['median']:.2f} times" + (" (over its target)" if missed else ""),
            (max(before["q3"], after["q3"]), height),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(range(len(rows), 0, -1), [row["what"] for row in rows], fontsize=8.5)
    axes.set_ylim(0.3, len(rows) + 0.8)
    axes.set_xscale("log")
    left, right = axes.get_xlim()
    axes.set_xlim(left, right * 6)  # room for the ratios
    axes.set_xticks(
        [1e2, 1e3, 1e4, 1e5, 1e6, 1e7], ["100 ns", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms"]
    )
    axes.set_xlim(left, right * 6)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.plot([], [], "o", color=PLAIN, mfc="white", label="plain torch")
    axes.plot([], [], "o", color=GUARDED, label="with the guard")
    axes.legend(loc="upper right", fontsize=8.5, frameon=False)
    versions, hardware = record["versions"], record["hardware"]
    axes.set_title(
        f"Time per call when nothing fails: torch {versions['torch'].partition('+')[0]}, "
        f"{hardware['cpu'].partition(',')[0]}, {record['date'][:10]}",
        fontsize=10,
        loc="left",
    )
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=130, metadata={"Software": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Draw a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", nargs="?", type=Path, help="default: the newest one")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "img" / "bench_resize.png")
    options = parser.parse_args(arguments)
    draw(read_record(options.record or newest_record()), options.to)
    print(f"drawn: {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
