"""Writes what the newest record of bench_buckets says into docs/bucketed.md.

    python -m benchmarks.publish_buckets            the newest record in benchmarks/records
    python -m benchmarks.publish_buckets --check    change nothing; exit status 1 if out of date

Which row wins, and from how many batches on, is worked out from the record, never typed by hand.
``report.py`` draws the picture that the page shows.
"""

from __future__ import annotations

import argparse
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.publish import rewritten
from benchmarks.records import RECORDS, measured_on, read_record

__all__ = ["laid_out", "newest"]

PAGE = ROOT / "docs" / "bucketed.md"
MARK = "stream"
BY = "benchmarks.publish_buckets"
OURS = "bucketed fit 8"
DYNAMIC = "compile dynamic=True"
NO_RECORD = "No record of `benchmarks/bench_buckets.py` has been made yet."


def newest(folder: Path = RECORDS) -> Path | None:
    """Return the newest record that was made on a CPU, None without one; names begin with a date.

    A GPU's is for ``docs/benchmarks.md``, which has both.
    """
    found = (path for path in folder.glob("*-buckets-*.json") if measured_on(path, "cpu"))
    return max(found, default=None)


def laid_out(record: dict[str, Any]) -> str:
    """Lay out a record: a table for each phase, and what it says about dynamic shapes."""
    versions, hardware = record["versions"], record["hardware"]
    torch, cpu = versions["torch"].partition("+")[0], hardware["cpu"].partition(",")[0]
    busy = record["load_average_at_start"]
    lines = [
        (
            f"Measured on {record['date'][:10]} with torch {torch} on {hardware['cores']} cores of "
            f"an {cpu}, one thread, load average {busy} at the start, command "
            f"`{record['command']}`. Total seconds include compiling from a cold start and the "
            "checks of `bucketed`."
        ),
        "",
        "![Total seconds against batches](img/bench_buckets.png)",
    ]
    panels = dict.fromkeys((row["phase"], row["device"]) for row in record["rows"])
    for phase, device in panels:
        rows = {
            row["row"]: row
            for row in record["rows"]
            if (row["phase"], row["device"]) == (phase, device)
        }
        batches = len(next(iter(rows.values()))["seconds"])
        lines += [
            "",
            (
                f"| {phase} on {device}, {batches} batches | total | a step | graphs | recompiles "
                "| waste |"
            ),
            "| --- | --: | --: | --: | --: | --: |",
            *(
                f"| {name} | {row['total_s']:.1f} s | {row['steady_ms']:.1f} ms | {row['graphs']} "
                f"| {row['recompiles']} | {100 * row['waste']:.0f} % |"
                for name, row in rows.items()
            ),
        ]
        if OURS in rows and DYNAMIC in rows:
            lines += ["", f"{phase.capitalize()}: {_against_dynamic(rows[OURS], rows[DYNAMIC])}"]
    worst = max(each["added_padded_us"] for each in record["overhead"])
    counts = [each["buckets"] for each in record["overhead"]]
    lines += [
        "",
        (
            f"A padded call costs {worst:.1f} µs more than the compiled function on inputs padded "
            f"before, at most, with {counts[0]} to {counts[-1]} buckets; the kernels that pad are "
            "not counted."
        ),
        "",
        *(f"- {target}" for target in record["targets"]),
    ]
    if "note" in record:
        lines.append(f"- {record['note']}")
    return "\n".join(lines)


def _against_dynamic(ours: dict[str, Any], dynamic: dict[str, Any]) -> str:
    """Say from how many batches on 8 buckets are faster than symbolic sizes, if ever."""
    compared = f"{ours['steady_ms']:.1f} ms a step with 8 buckets, {dynamic['steady_ms']:.1f} ms"
    saved = (dynamic["steady_total_s"] - ours["steady_total_s"]) / len(ours["seconds"])
    behind = ours["total_s"] - dynamic["total_s"]
    pairs = zip(accumulate(ours["seconds"]), accumulate(dynamic["seconds"]), strict=True)
    slower = [index for index, (a, b) in enumerate(pairs, start=1) if a > b]
    text = f"{compared} with symbolic sizes. "
    if behind > 0 and saved <= 0:
        return f"{text}Buckets never earn back what compiling them costs: use dynamic=True."
    if behind > 0:
        batches = len(ours["seconds"]) + round(behind / saved)
        return (
            f"{text}Compiling 8 sizes is earned back after about {batches:,} batches; for fewer, "
            "dynamic=True is faster."
        )
    first = slower[-1] + 1 if slower else 1
    return f"{text}From batch {first} on, all that went before included, buckets are ahead."


def main(arguments: list[str] | None = None) -> int:
    """Rewrite the page, or say that the page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", nargs="?", type=Path, help="default: the newest one")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    path = options.record or newest()
    record = None if path is None else read_record(path)
    page = PAGE.read_text(encoding="utf-8")
    new = rewritten(page, MARK, NO_RECORD if record is None else laid_out(record), by=BY)
    if options.check:
        if new != page:
            print("docs/bucketed.md is out of date: run python -m benchmarks.publish_buckets")
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
