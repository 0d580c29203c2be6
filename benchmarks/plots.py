"""Draws records: a picture for each benchmark that has one. Needs the extra ``plot``.

The PNG carries which record it shows, and ``shows`` reads that back without matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.records import Record, of_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Paul Tol's "bright": told apart by colour-blind eyes.
BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb",
)  # fmt: skip
PLAIN, GUARDED = BLUE, RED
COLOURS = (BLUE, RED, GREEN, PURPLE, YELLOW, CYAN, "#222222", GREY)
_DOTS = 130  # per inch


def _source(record: Record) -> str:
    return f"{record.get('file', 'a record')} {record.get('digest', '')}"


def shows(path: Path, record: Record) -> bool:
    """Whether this PNG was drawn from this very record, as a chunk of plain text says."""
    return path.exists() and f"tEXtSource\0{_source(record)}".encode() in path.read_bytes()


def _machine(record: Record, device: str) -> str:
    hardware = record["hardware"]
    named = hardware["gpu"] if device == "cuda" else hardware["cpu"].partition(",")[0]
    return f"torch {record['versions']['torch'].partition('+')[0]}, {named}, {record['date'][:10]}"


def _bare(axes: Any, *keep: str) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
    axes.set_axisbelow(True)


def _per_call(record: Record, device: str) -> Figure:
    """Draw a line per comparison, from plain torch (open) to the guard (full), and the ratio."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    rows = of_device(record, "rows", device)
    figure = Figure(figsize=(11, 0.36 * len(rows) + 1.8), layout="constrained")
    axes = figure.subplots()
    heights = range(len(rows), 0, -1)
    for height, row in zip(heights, rows, strict=True):
        before, after = row["baseline_ns"], row["guarded_ns"]
        axes.plot((before["median"], after["median"]), (height, height), color="0.8", zorder=1)
        for spread, color, face in ((before, PLAIN, "white"), (after, GUARDED, GUARDED)):
            axes.plot((spread["q1"], spread["q3"]), (height, height), color=color, lw=3, alpha=0.4)
            axes.plot(spread["median"], height, "o", color=color, mfc=face, ms=6, zorder=3)
        missed = row["verdict"] is not None and not row["verdict"].startswith("reached")
        ratio = f"{row['ratio']['median']:.2f} times" + (" (over its target)" if missed else "")
        axes.annotate(
            ratio, (max(before["q3"], after["q3"]), height), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=8.5,
        )  # fmt: skip
    axes.set_yticks(heights, [row["what"] for row in rows], fontsize=8.5)
    axes.set_ylim(0.3, len(rows) + 0.8)
    axes.set_xscale("log")
    left, right = axes.get_xlim()
    times = ["100 ns", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms"]
    axes.set_xticks([1e2, 1e3, 1e4, 1e5, 1e6, 1e7], times)
    axes.set_xlim(left, right * 6)  # room for the ratios
    axes.grid(axis="x", color="0.92")
    _bare(axes, "bottom")
    axes.tick_params(axis="y", length=0)
    axes.plot([], [], "o", color=PLAIN, mfc="white", label="plain torch")
    axes.plot([], [], "o", color=GUARDED, label="with torchguard")
    figure.legend(loc="outside upper right", ncols=2, fontsize=8.5, frameon=False)
    title = f"Time per call when nothing fails: {_machine(record, device)}"
    axes.set_title(title, fontsize=10, loc="left")
    return figure


def _buckets(record: Record, device: str) -> Figure:
    """Draw total seconds against batches, a panel per phase."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    rows = of_device(record, "rows", device)
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    figure = Figure(figsize=(6.2 * len(phases), 5), layout="constrained")
    panels = figure.subplots(1, len(phases), squeeze=False)
    names = list(dict.fromkeys(row["row"] for row in rows))
    for phase, axes in zip(phases, panels[0], strict=True):
        for row in (row for row in rows if row["phase"] == phase):
            total = list(accumulate(row["seconds"]))
            ours = row["row"].startswith("bucketed")
            axes.plot(
                range(1, len(total) + 1), total, label=row["row"], lw=2.2 if ours else 1.1,
                ls="-" if ours else "--", color=COLOURS[names.index(row["row"]) % len(COLOURS)],
            )  # fmt: skip
        axes.set(title=phase, xlabel="batches", ylabel="seconds since the start", ylim=0)
        axes.grid(color="0.94")
        _bare(axes, "bottom", "left")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    title = f"A stream of batches of many lengths: {_machine(record, device)}"
    figure.suptitle(title, fontsize=10.5)
    return figure


PLOTS: dict[str, Callable[[Record, str], Figure]] = {"resize": _per_call, "buckets": _buckets}
"""By the benchmark's name."""


def draw(name: str, record: Record, device: str, to: Path) -> None:
    """Draw a benchmark's record to a PNG that says which record it shows."""
    to.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Software": None, "Source": _source(record)}
    PLOTS[name](record, device).savefig(to, dpi=_DOTS, metadata=metadata)
