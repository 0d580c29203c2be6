"""Draws ``docs/img/buckets-rules.png``: the rules for buckets against each other."""  # noqa: INP001

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

DOCS = Path(__file__).parent
RECORD = DOCS.parent / "benchmarks" / "records" / "2026-11-27-fit-cpu.json"


def rules(record: dict[str, Any], path: Path) -> None:
    """One panel per kind of lengths: held-out waste of every rule at 8 buckets."""
    rows = [row for row in record["rows"] if row["count"] == 8]  # noqa: PLR2004
    figure = Figure(figsize=(9.0, 6.2), layout="constrained")
    grid = figure.subplots(2, 4, sharey=True)
    for axes, row in zip(grid.flat, rows, strict=True):
        waste = row["waste_percent"]
        colors = ["#2b6ca3" if rule == "optimal" else "#b9b9b9" for rule in waste]
        bars = axes.barh(list(waste), list(waste.values()), color=colors)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axes.set_title(row["kind"], fontsize=10)
        axes.margins(x=0.25)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    grid[0, 0].invert_yaxis()
    figure.suptitle("waste in % at 8 buckets, maxima of batches of 16, held-out half")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Draw it."""
    (DOCS / "img").mkdir(exist_ok=True)
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rules(record, DOCS / "img" / "buckets-rules.png")


if __name__ == "__main__":
    main()
