"""Draws records: a picture for each benchmark that has one. Needs the extra ``plot``.

A drawing gets a record, a device and where to write; ``PLOTS`` has them by the benchmark's name.
The PNG carries which record it shows, and ``shows`` reads that back without matplotlib.
"""

from __future__ import annotations

import re
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
OTHERS = tuple(color for color in COLOURS if color != RED)
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


def _out_of_memory(record: Record, device: str, to: Path) -> None:
    """Draw what the tensor says it has beside what it has, after the allocation failed."""
    plt = _pyplot()
    rows = of_device(record, "rows", device)
    figure, axes = plt.subplots(figsize=(8.5, 0.75 * len(rows) + 1.4), layout="constrained")
    for height, row in zip(range(len(rows), 0, -1), rows, strict=True):
        says, holds = row["says_bytes"] / 2**20, row["holds_bytes"] / 2**20
        axes.barh(height + 0.19, says, 0.34, color=RED if says > holds else BLUE)
        axes.barh(height - 0.19, holds, 0.34, color=GREY)
        axes.annotate(
            row["verdict"], (max(says, holds), height), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    axes.set_yticks(range(len(rows), 0, -1), [row["way"] for row in rows])
    axes.set_xlim(0, 1.3 * max(row["says_bytes"] for row in rows) / 2**20)
    axes.set_xlabel("MiB")
    for color, name in (
        (BLUE, "the shape says, rightly"), (RED, "the shape says, wrongly"), (GREY, "there is"),
    ):  # fmt: skip
        axes.barh(0, 0, color=color, label=name)
    axes.set_ylim(0.4, len(rows) + 0.6)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    _bare(axes)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"A tensor after memory ran out while it grew: {_machine(record, device)}",
        fontsize=10,
        loc="left",
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


def _fit(record: Record, device: str, to: Path) -> None:
    """Draw the waste of every rule on every kind of lengths, at 8 buckets and linear cost."""
    plt = _pyplot()
    rows = [row for row in record["rows"] if (row["cost"], row["count"]) == ("linear", 8)]
    rules = list(record["summary"]["mean_waste_percent"])
    figure, axes = plt.subplots(figsize=(10, 0.5 * len(rows) + 1.7), layout="constrained")
    for number, rule in enumerate(rules):
        ours = rule == "optimal"
        axes.plot(
            [row["waste_percent"][rule] for row in rows], range(len(rows), 0, -1),
            "D" if ours else "o", color=RED if ours else OTHERS[number % len(OTHERS)],
            mfc=RED if ours else "none", ms=8 if ours else 6, label=rule, zorder=3 if ours else 2,
        )  # fmt: skip
    axes.set_yticks(range(len(rows), 0, -1), [row["kind"] for row in rows])
    axes.set_xscale("log")
    axes.set_xticks([1, 3, 10, 30, 100, 300], ["1 %", "3 %", "10 %", "30 %", "100 %", "300 %"])
    axes.grid(color="0.93")
    _bare(axes)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    axes.set_title(
        f"Held-out waste of 8 buckets, less is better: {_machine(record, device)}",
        fontsize=10,
        loc="left",
    )
    _save(figure, record, to)


def _sampler(record: Record, device: str, to: Path) -> None:
    """Draw the waste of every rule on every kind of lengths, with its number of shapes."""
    plt = _pyplot()
    kinds = list(dict.fromkeys(row["kind"] for row in record["rows"]))
    rules = [
        rule
        for rule in record["summary"]["mean_waste_percent"]
        if rule.endswith(("r, 8 sizes", "r, 16 sizes", "r, 32 sizes", "longest"))
    ]
    found = {(row["kind"], row["rule"]): row["waste_percent"] for row in record["rows"]}
    figure, axes = plt.subplots(figsize=(10, 0.5 * len(kinds) + 1.9), layout="constrained")
    marks = {"8 sizes": "D", "16 sizes": "s", "32 sizes": "^"}
    for number, rule in enumerate(rules):
        what = rule.partition(", ")[2]
        ours = what in marks
        shapes = record["summary"]["mean_shapes"][rule]
        axes.plot(
            [found[kind, rule] for kind in kinds], range(len(kinds), 0, -1), marks.get(what, "o"),
            color=RED if ours else OTHERS[number % len(OTHERS)], ls="",
            mfc=RED if ours else "none", ms=7 if ours else 6, zorder=3 if ours else 2,
            label=f"{rule}: {shapes} shapes",
        )  # fmt: skip
    axes.set_yticks(range(len(kinds), 0, -1), kinds)
    axes.set_xscale("log")
    axes.set_xticks([1, 3, 10, 30, 100, 300, 1000],
                    ["1 %", "3 %", "10 %", "30 %", "100 %", "300 %", "1000 %"])  # fmt: skip
    axes.minorticks_off()
    axes.grid(color="0.93")
    _bare(axes)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    axes.set_title(
        f"Padding that an epoch computes on, less is better: {_machine(record, device)}",
        fontsize=10,
        loc="left",
    )
    _save(figure, record, to)


_ASSIGN = re.compile(
    r"(?P<kind>\w+)-(?P<size>1e\d+)-(?P<compiled>compiled-)?(?P<direction>forward|backward)"
    r"-(?P<way>\w+)$"
)


def _assign(record: Record, device: str, to: Path) -> None:
    """Draw each way's ratio to the two statements against the size, a panel per kind of step."""
    plt = _pyplot()
    found = [(_ASSIGN.match(row["id"]), row) for row in of_device(record, "rows", device)]
    cells = [(match.groupdict(), row) for match, row in found if match]
    kinds = list(dict.fromkeys(cell["kind"] for cell, _ in cells))
    steps = list(dict.fromkeys((cell["compiled"], cell["direction"]) for cell, _ in cells))
    ways = list(dict.fromkeys(cell["way"] for cell, _ in cells))
    figure, panels = plt.subplots(
        len(kinds), len(steps), figsize=(3 * len(steps), 2.4 * len(kinds) + 0.8),
        squeeze=False, sharex=True, sharey=True, layout="constrained",
    )  # fmt: skip
    for kind, line in zip(kinds, panels, strict=True):
        for (compiled, direction), axes in zip(steps, line, strict=True):
            for way in ways:
                points = [
                    (float(cell["size"]), row["ratio"]["median"])
                    for cell, row in cells
                    if (cell["kind"], cell["compiled"], cell["direction"], cell["way"])
                    == (kind, compiled, direction, way)
                ]
                if points:
                    color = RED if way == "sliced_assign" else COLOURS[2 + ways.index(way)]
                    axes.plot(*zip(*points, strict=True), "o-", color=color, ms=4, label=way)
            axes.axhline(1, color="0.5", lw=0.8)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_yticks([0.3, 0.5, 1, 2, 5, 10], ["0.3", "0.5", "1", "2", "5", "10"])
            axes.minorticks_off()
            axes.grid(color="0.94")
            mode = "compiled" if compiled else "eager"
            axes.set_title(f"{kind}, {mode}, {direction}", fontsize=9)
            _bare(axes, keep=("bottom", "left"))
    labels: dict[str, Any] = {}
    for axes in panels.flat:
        labels.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    figure.legend(
        labels.values(), labels.keys(), loc="outside lower center", ncols=5, fontsize=8.5,
        frameon=False,
    )  # fmt: skip
    for axes in panels[-1]:
        axes.set_xlabel("elements", fontsize=9)
    figure.suptitle(
        "Time over that of `out = t.clone(); out[index] = value`, less is better: "
        + _machine(record, device),
        fontsize=10,
    )
    _save(figure, record, to)


Draw = Callable[[Record, str, Path], None]

PLOTS: dict[str, Draw] = {
    "end_to_end": _end_to_end,
    "resize": _per_call,
    "out_of_memory": _out_of_memory,
    "buckets": _buckets,
    "padding": _per_call,
    "fit": _fit,
    "sampler": _sampler,
    "assign": _assign,
}
"""By the benchmark's name."""
