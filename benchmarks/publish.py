"""Writes what committed records say into README.md, docs/guards.md and docs/verified.md.

    python -m benchmarks.publish            the newest records of resize, end_to_end and verified
    python -m benchmarks.publish --check    change nothing; exit status 1 if a page is out of date

A number in what it writes is never typed by hand. ``benchmarks/plots.py`` draws the same records.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import NOT_ON_A_GPU, ROOT
from benchmarks.records import (
    RECORDS,
    Record,
    committed,
    measured_on,
    newest,
    of_device,
    read_record,
)
from benchmarks.wording import from_to, made, table, time, times

BEGIN = "<!-- begin: {name}, written by python -m {by} -->"
END = "<!-- end: {name} -->"


def newest_record(folder: Path = RECORDS) -> Path:
    """Return the newest record of ``bench_resize`` that was made on a CPU."""
    found = [path for path in sorted(folder.glob("*-resize-*.json")) if measured_on(path, "cpu")]
    if not found:
        raise FileNotFoundError(f"{folder} has no record: run benchmarks/bench_resize.py --json")
    return found[-1]


def costs(record: Record) -> str:
    """Lay out a table: each guard, what it stops and what it costs."""

    def both(name: str) -> str:
        row = _row(record, name)
        return f"{from_to(row)} ({times(row['ratio']['median'])})"

    def adds(name: str) -> str:
        return time(_row(record, name)["added_ns"]["median"])

    same = record["untouched"]
    rows = (
        (
            "`safe_resize_()`, `safe_set_()`,<br>`install()`",
            (
                "a failed `resize_`, `resize_as_` or `set_` leaves a shape without memory; "
                "growing a tensor in shared memory kills the process"
            ),
            (
                f"`resize_` to the same size {both('same-size-install')}, "
                f"growing by 64 MB and filling it {both('grow-64mb-fill')}; "
                f"`set_` {both('set-install')}"
            ),
        ),
        (
            '`install("out")`',
            "a failed `out=` call leaves its output with a shape that is not its own",
            (
                f"`torch.add` of 10 elements {both('add-without-out')} without `out=`, "
                f"{both('add-with-out')} with"
            ),
        ),
        (
            "`guarded()`",
            (
                "both, for every operation in a scope; and a half-written tensor that a later "
                "backward would use"
            ),
            (
                f"`a * b` {both('guarded-plain')}, `a.copy_(b)` {both('guarded-in-place')}; "
                f"entering the scope {adds('guarded-enter')}"
            ),
        ),
        (
            "`guarded(data=True)`",
            "the same, and the old data comes back",
            (
                "what is about to be written is copied first: "
                f"`a.copy_(b)` of 1 MB {both('guarded-data-1mb')}"
            ),
        ),
        (
            "`rollback_on_error()`",
            "a block of your own code that fails halfway",
            (
                f"{adds('rollback-small')} per block and tensor; "
                f"with `data=True` and 1 MB {adds('rollback-data-1mb')}"
            ),
        ),
        (
            "`check_consistent()`, `repair_()`",
            "a tensor that is spoiled already",
            "nothing until you call it",
        ),
        (
            "what no guard patches",
            "",
            (
                f"nothing: with both installed, {same['the_same_object']:,} of "
                f"{same['attributes']:,} attributes of torch are the objects they were"
            ),
        ),
    )
    return table(("guard", "what it stops", "what it costs when nothing fails"), rows)


def every_row(record: Record) -> str:
    """Lay out the whole record, one row per comparison."""
    rows = []
    for row in record["rows"]:
        ratio = row["ratio"]
        spread = f"{times(ratio['median'])} [{ratio['q1']:.3g}, {ratio['q3']:.3g}]"
        target = "" if row["target"] is None else f"{row['target']}: {row['verdict']}"
        taken = (time(row["baseline_ns"]["median"]), time(row["guarded_ns"]["median"]))
        rows.append((row["what"], row["device"], *taken, spread, target))
    missed = dict.fromkeys(row["why"] for row in record["rows"] if row["why"])
    same = record["untouched"]
    notes = [
        (
            "Operations that are not patched: with both guards installed, "
            f"{same['the_same_object']:,} of {same['attributes']:,} attributes of torch are the "
            f"same objects. Target {same['verdict']}."
        ),
        *(f"Why targets are missed: {why}." for why in missed),
    ]
    if newest(committed(), "resize", "cuda") is None:
        notes.append(f"This record was {NOT_ON_A_GPU}.")
    header = ("per call", "device", "torch", "guarded", "ratio [quartiles]", "target")
    listed = "\n".join(f"- {note}" for note in notes)
    return f"{made(record)}\n\n{table(header, tuple(rows))}\n\n{listed}"


def summary(record: Record) -> str:
    """Lay out the table of costs and say where its figures come from."""
    on_gpu = newest(committed(), "resize", "cuda")
    gpu = f" {NOT_ON_A_GPU[0].upper()}{NOT_ON_A_GPU[1:]}."
    if on_gpu is not None:
        gpu = f" On an {on_gpu['hardware']['gpu']}: [benchmarks](benchmarks.md#resize-on-a-gpu)."
    source = f"../benchmarks/records/{record['file']}"
    versions, hardware = record["versions"], record["hardware"]
    return (
        f"{costs(record)}\n\nMedians on CPU, torch {versions['torch'].partition('+')[0]}, "
        f"{hardware['cpu'].partition(',')[0]}, {record['date'][:10]} ([record]({source})).{gpu}"
    )


def overhead(_: Record) -> str:
    """Lay out what stands in the README: what the guards add to a whole step."""
    links = f"]({address()}/blob/main/docs/"
    return f"{host_bound()}{whole_steps()}".strip().replace("](docs/", links)


def host_bound() -> str:
    """Say in one sentence what a step costs at most, from the newest record of ``bench_host``."""
    record = newest(committed(), "host", "cpu")
    if record is None:
        return ""

    def worst(scope: str) -> tuple[int, float]:
        rows = [row for row in record["rows"] if row["scope"] == scope]
        return max(row["count"] for row in rows), max(row["percent"] for row in rows)

    (calls, percent), (all_calls, all_percent) = worst("install()"), worst("install(), every guard")
    default = (
        f"is called at most {calls} times, which takes {percent:.2g} % of the host's time"
        if calls
        else "is never called"
    )
    return (
        "In steps of three models (training and inference, eager and compiled) what `install()` "
        f"patches {default}; what all guards together patch is called at most "
        f"{all_calls} times, which takes at most {all_percent:.2g} % of the host's time "
        "([counted](docs/benchmarks.md#host))."
    )


def whole_steps() -> str:
    """Say how much longer a whole step takes, from the newest record of ``bench_end_to_end``."""
    found = []
    for device, place in (("cpu", " By the clock, a step"), ("cuda", " On an {gpu} it")):
        record = newest(committed(), "end_to_end", device)
        if record is not None:
            where = place.format(gpu=record["hardware"]["gpu"])
            found.append(f"{where} differs by {_differences(record, device)}")
    return "".join(found)


def _differences(record: Record, device: str) -> str:
    def between(scope: str) -> str:
        rows = of_device(record, "rows", device)
        found = [row["ratio"]["median"] - 1 for row in rows if row["scope"] == scope]
        digits = 1 if device == "cpu" else 2  # a GPU's target is 0.1 %
        return f"{min(found):+.{digits}%} to {max(found):+.{digits}%}".replace("%", " %")

    return (
        f"{between('install()')} with `install()`, by {between('install(), every guard')} with "
        f"every guard, and by {between('nothing, once more')} with nothing, measured once more "
        "([end to end](docs/benchmarks.md#end-to-end))."
    )


_FIRST_CALLS = {
    "first-transformer": "first call of a transformer, forward and backward",
    "first-tiny": "first calls of many tiny graphs",
    "first-lengths": "a stream of 120 lengths through one graph, its compilation included",
}


def verified_costs(_: Record) -> str:
    """Lay out what ``verified`` costs, from the newest record of ``bench_verified``."""
    record = newest(committed(), "verified", "cpu")
    if record is None:
        return "Not measured yet."
    rows = []
    for row in record["first_calls"]:
        plain, checked = (row[side]["median"] for side in ("plain_seconds", "checked_seconds"))
        count = row.get("checks")
        checks = f", {count} check{'s' * (count > 1)}" if count else ""
        rows.append(
            (
                f"{_FIRST_CALLS[row['id']]}{checks}",
                f"{plain:.1f} → {checked:.1f} s",
                times(row["ratio"]["median"]),
                times(row["memory_ratio"]["median"]),
            )
        )
    for row in record["rows"]:
        workload = row["id"].partition("-")[2]
        rows.append((f"{row['what']}: {workload}", from_to(row), times(row["ratio"]["median"]), ""))
    header = ("", "`torch.compile` → `verified`", "time", "most memory")
    return f"{made(record)}\n\n{table(header, rows)}"


def address() -> str:
    """Return the repository's address, which pyproject.toml alone says.

    README's links start with it: on a package index, relative ones lead nowhere.
    """
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^Repository = "(.*)"$', project, re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml says no Repository in [project.urls]")
    return found[1]


PAGES: tuple[tuple[str, str, Callable[[Record], str]], ...] = (
    ("README.md", "whole steps", overhead),
    ("docs/guards.md", "costs", summary),
    ("docs/guards.md", "every row", every_row),
    ("docs/verified.md", "costs", verified_costs),
)


def rewritten(page: str, name: str, table: str, *, by: str = "benchmarks.publish") -> str:
    """Return the page with what is between its two marks replaced."""
    begin, end = BEGIN.format(name=name, by=by), END.format(name=name)
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page has lost the lines {begin} and {end}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Rewrite the pages, or say which of them are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", nargs="?", type=Path, help="default: the newest one")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    path = options.record or newest_record()
    record = {**read_record(path), "file": path.name}
    status = 0
    for name, mark, lay_out in PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        new = rewritten(page, mark, lay_out(record))
        if new == page:
            continue
        if options.check:
            print(f"{name} does not say what the records say: run python -m benchmarks.publish")
            status = 1
        else:
            (ROOT / name).write_text(new, encoding="utf-8")
            print(f"{name}: written, its {mark}")
    return status


def _row(record: Record, name: str) -> dict[str, Any]:
    found: dict[str, Any]
    for found in record["rows"]:
        if found["id"] == name and found["device"] == "cpu":
            return found
    raise KeyError(f"the record has no row {name!r} measured on the CPU")


if __name__ == "__main__":
    sys.exit(main())
