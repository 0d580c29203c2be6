"""Draws ``docs/img/buckets-*.png``: a ladder for a real text, and the rules against each other."""  # noqa: INP001

from __future__ import annotations

import ast
import json
import sysconfig
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.histogram import batch_maxima

DOCS = Path(__file__).parent
RECORD = DOCS.parent / "benchmarks" / "records" / "2026-11-21-fit-cpu.json"


def docstring_lengths() -> list[int]:
    """Count the words of every docstring in the standard library's top-level modules."""
    lengths = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lengths += [
            len((ast.get_docstring(node) or "").split())
            for node in ast.walk(ast.parse(path.read_bytes()))
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        ]
    return [length for length in lengths if length]


def rules(record: dict[str, Any], cost: str, path: Path) -> None:
    """One panel per kind of lengths: held-out waste of every rule at 8 buckets."""
    rows = [row for row in record["rows"] if row["count"] == 8 and row["cost"] == cost]  # noqa: PLR2004
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
    figure.suptitle(f"waste in % at 8 buckets, maxima of batches of 16, held-out half, {cost} cost")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Draw both."""
    (DOCS / "img").mkdir(exist_ok=True)
    seen = batch_maxima(docstring_lengths(), 16, "make_bucket_plots")
    Buckets.fit(seen, 8, multiple_of=8).plot(seen, DOCS / "img" / "buckets-docstrings.png")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rules(record, "linear", DOCS / "img" / "buckets-rules.png")


if __name__ == "__main__":
    main()
