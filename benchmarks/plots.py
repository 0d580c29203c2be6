"""Draws records: a picture for each benchmark that has one. Needs the extra ``plot``.

A drawing gets a record, a device and where to write; ``PLOTS`` has them by the benchmark's name.
The PNG carries which record it shows, and ``shows`` reads that back without matplotlib.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.records import Record, of_device

__all__ = ["PLOTS", "shows"]

# Paul Tol's "bright": told apart by colour-blind eyes.
BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb",
)  # fmt: skip
PLAIN, GUARDED = BLUE, RED
COLOURS = (BLUE, RED, GREEN, PURPLE, YELLOW, CYAN, "#222222", GREY)
_DOTS = 130  # per inch
_SOURCE = b"Source"
_PNG = b"\x89PNG\r\n\x1a\n"


def _pyplot() -> Any:
    import matplotlib as mpl  # noqa: PLC0415  an extra

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    return plt


def _save(figure: Any, record: Record, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=_DOTS, metadata={"Software": None, "Source": _source(record)})
    _pyplot().close(figure)


def _source(record: Record) -> str:
    return f"{record.get('file', 'a record')} {record.get('digest', '')}"


def shows(path: Path, record: Record) -> bool:
    """Whether this PNG was drawn from this very record."""
    return path.exists() and _source(record) in _texts(path.read_bytes())


def _texts(png: bytes) -> Iterator[str]:
    """Yield what a PNG says of its source: each chunk is a length, a kind, content and a sum."""
    position = len(_PNG)
    while position < len(png):
        (length,) = struct.unpack_from(">I", png, position)
        kind = png[position + 4 : position + 8]
        content = png[position + 8 : position + 8 + length]
        if kind == b"tEXt" and content.startswith(_SOURCE + b"\0"):
            yield content.partition(b"\0")[2].decode("latin-1")
        position += 12 + length


def _machine(record: Record, device: str) -> str:
    hardware = record["hardware"]
    named = hardware["gpu"] if device == "cuda" else hardware["cpu"].partition(",")[0]
    return f"torch {record['versions']['torch'].partition('+')[0]}, {named}, {record['date'][:10]}"


def _bare(axes: Any, *, keep: tuple[str, ...] = ("bottom",)) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
    axes.set_axisbelow(True)


def _per_call(record: Record, device: str, to: Path) -> None:
    """Draw a line per comparison, from plain torch (open) to the guard (full), and the ratio."""
    plt = _pyplot()
    rows = of_device(record, "rows", device)
    figure, axes = plt.subplots(figsize=(11, 0.36 * len(rows) + 1.8), layout="constrained")
    for height, row in zip(range(len(rows), 0, -1), rows, strict=True):
        before, after = row["baseline_ns"], row["guarded_ns"]
        axes.plot((before["median"], after["median"]), (height, height), color="0.8", zorder=1)
        for spread, color, face in ((before, PLAIN, "white"), (after, GUARDED, GUARDED)):
            axes.plot((spread["q1"], spread["q3"]), (height, height), color=color, lw=3, alpha=0.4)
            axes.plot(spread["median"], height, "o", color=color, mfc=face, ms=6, zorder=3)
        missed = row["verdict"] is not None and not row["verdict"].startswith("reached")
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
    axes.set_xticks(
        [1e2, 1e3, 1e4, 1e5, 1e6, 1e7], ["100 ns", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms"]
    )
    axes.set_xlim(left, right * 6)  # room for the ratios
    axes.grid(axis="x", color="0.92")
    _bare(axes)
    axes.tick_params(axis="y", length=0)
    axes.plot([], [], "o", color=PLAIN, mfc="white", label="plain torch")
    axes.plot([], [], "o", color=GUARDED, label="with torchguard")
    figure.legend(loc="outside upper right", ncols=2, fontsize=8.5, frameon=False)
    axes.set_title(
        f"Time per call when nothing fails: {_machine(record, device)}", fontsize=10, loc="left"
    )
    _save(figure, record, to)


def _end_to_end(record: Record, device: str, to: Path) -> None:
    """Draw the interval of each ratio around the line of no difference, a panel per model."""
    plt = _pyplot()
    rows = of_device(record, "rows", device)
    models = list(dict.fromkeys(row["what"] for row in rows))
    steps = list(dict.fromkeys((row["what"], row["phase"], row["mode"]) for row in rows))
    scopes = list(dict.fromkeys(row["scope"] for row in rows))
    figure, panels = plt.subplots(
        len(models), 1, figsize=(10, 1.2 + 0.62 * len(steps)), squeeze=False, layout="constrained"
    )
    for model, axes in zip(models, panels[:, 0], strict=True):
        mine = [step for step in steps if step[0] == model]
        for row in (row for row in rows if row["what"] == model):
            place = mine.index((model, row["phase"], row["mode"]))
            scope = scopes.index(row["scope"])
            height = -place - (scope - (len(scopes) - 1) / 2) * 0.8 / len(scopes)
            low, middle, high = (
                100 * (row["ratio"][name] - 1) for name in ("low", "median", "high")
            )
            color = GREY if scope == 0 and "nothing" in row["scope"] else COLOURS[scope]
            axes.plot((low, high), (height, height), color=color, lw=2)
            axes.plot(middle, height, "o", color=color, ms=4.5)
        axes.axvline(0, color="0.3", lw=0.8)
        axes.set_yticks(
            range(0, -len(mine), -1), [f"{phase}, {mode}" for _, phase, mode in mine], fontsize=9
        )
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g} %" if value else "0")
        axes.grid(axis="x", color="0.92")
        axes.set_title(model, fontsize=9.5, loc="left")
        _bare(axes)
        axes.tick_params(axis="y", length=0)
    for number, scope in enumerate(scopes):
        color = GREY if number == 0 and "nothing" in scope else COLOURS[number]
        panels[0, 0].plot([], [], "o-", color=color, label=scope)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    figure.suptitle(
        f"How much longer a step takes, 95 % interval: {_machine(record, device)}", fontsize=10.5
    )
    _save(figure, record, to)


def _buckets(record: Record, device: str, to: Path) -> None:
    """Draw total seconds against batches, a panel per phase."""
    plt = _pyplot()
    rows = of_device(record, "rows", device)
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    figure, panels = plt.subplots(
        1, len(phases), figsize=(6.2 * len(phases), 5), squeeze=False, layout="constrained"
    )
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
        _bare(axes, keep=("bottom", "left"))
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(
        f"A stream of batches of many lengths: {_machine(record, device)}", fontsize=10.5
    )
    _save(figure, record, to)


Draw = Callable[[Record, str, Path], None]

PLOTS: dict[str, Draw] = {
    "end_to_end": _end_to_end,
    "resize": _per_call,
    "buckets": _buckets,
    "padding": _per_call,
}
"""By the benchmark's name."""
