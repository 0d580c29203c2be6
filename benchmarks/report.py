"""Writes ``docs/project/benchmarks.md`` and figures of other pages from the committed records.

``python -m benchmarks report`` writes; ``--check`` says what is out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import costs, gpu
from benchmarks.catalog import BENCHMARKS
from benchmarks.machine import ROOT
from benchmarks.program import MOST_LOAD, Benchmark, write_record
from benchmarks.stream import records_of
from benchmarks.tables import Table, described, markdown, of_device

RECORDS = ROOT / "benchmarks" / "records"
PAGE = Path("docs", "project", "benchmarks.md")
MISSING = {"cpu": "no record yet", "cuda": "not measured on a GPU yet"}

_HEAD = """\
<!-- written by python -m benchmarks report; change the records, or `tables` of a benchmark -->

# Benchmarks

Each figure is from a committed record, a file with its date, machine, versions and command. Yours
will differ. The ratios differ less. To measure on your machine:

```bash
python -m benchmarks list
python -m benchmarks run resize --json my-record.json
```

`python -m benchmarks gpu --minutes 9 --out DIR` (or `make gpu`) makes every record that needs a
GPU, and `python -m benchmarks report DIR` turns its results into records and pages.

[Costs](costs.md) has the figures that most readers look for.
"""

Record = dict[str, Any]


def read_record(path: Path) -> Record:
    """Read a record, and add the name of its file."""
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    if record.get("quick", False):
        raise ValueError(f"{path} was made with --quick, which shows only that the benchmark runs")
    return {**record, "file": path.name}


def committed(folder: Path = RECORDS) -> list[Record]:
    """Read every record, oldest first: their names begin with the date."""
    return [read_record(path) for path in sorted(folder.glob("*.json"))]


def newest(records: list[Record], benchmark: str, device: str) -> Record | None:
    """Return the newest record of a benchmark that has results of this device."""
    of_it = (record for record in records if record["benchmark"] == f"bench_{benchmark}")
    found = (record for record in of_it if of_device(record, "rows", device))
    return max(found, key=lambda record: str(record["date"]), default=None)


def page(records: list[Record]) -> str:
    """Return the page."""
    sections = [_HEAD.rstrip(), _overview(records)]
    sections += ["\n\n".join(_section(each, records)) for each in BENCHMARKS.values()]
    return "\n\n".join(sections) + "\n"


def _overview(records: list[Record]) -> str:
    def cell(benchmark: Benchmark, device: str) -> str:
        record = newest(records, benchmark.name, device)
        if device not in benchmark.devices:
            return "the same" if device == "cuda" else "not asked"
        if record is None:
            return MISSING[device]
        return str(record["date"][:10])

    rows = []
    for name, benchmark in BENCHMARKS.items():
        title = _title(name)
        link = f"[{title}](#{title.lower().replace(' ', '-')})"
        rows.append((link, cell(benchmark, "cpu"), cell(benchmark, "cuda")))
    return markdown(("", "CPU", "GPU"), rows)


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _section(benchmark: Benchmark, records: list[Record]) -> Iterator[str]:
    yield f"## {_title(benchmark.name)}"
    yield benchmark.question
    for device in benchmark.devices:
        record = newest(records, benchmark.name, device)
        if record is None:
            command = f"`python -m benchmarks run {benchmark.name} --device {device}`"
            yield f"{MISSING[device][0].upper()}{MISSING[device][1:]}: {command} makes the record."
            continue
        if len(benchmark.devices) > 1:
            yield f"### {_title(benchmark.name)} on a {'GPU' if device == 'cuda' else 'CPU'}"
        yield _source(record)
        if record.get("ended", "finished") != "finished":
            yield "Time was up before all of it was measured; what is here was."
        yield _tables(benchmark.tables, record, device)


def _source(record: Record) -> str:
    address = f"{_address()}/blob/main/benchmarks/records/{record['file']}"
    load = record["load_average_at_start"]
    busy = "" if load is None or load < MOST_LOAD else " The machine was not quiet."
    return f"{described(record)} [Record]({address}).{busy}"


def _address() -> str:
    """Return the repository's address: on a package index, relative links lead nowhere."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [found] = re.findall(r'^Repository = "(.*)"$', project, re.MULTILINE)
    return str(found)


def _tables(tables: tuple[Table, ...], record: Record, device: str) -> str:
    shown = tables or [Table(rows=name) for name in record if isinstance(record[name], list)]
    return "\n\n".join(filter(None, (table.of(record, device) for table in shown)))


# --- figures of other pages: what stands between two marks


def _whole(benchmark: str, newest_one: costs.Newest) -> str:
    """Show the tables of a benchmark's newest record of a CPU, with their source."""
    record = newest_one(benchmark, "cpu")
    if record is None:
        return f"Not measured yet: `python -m benchmarks run {benchmark}` makes the record."
    return f"{_source(record)}\n\n{_tables(BENCHMARKS[benchmark].tables, record, 'cpu')}"


FIGURES: tuple[tuple[str, str, Callable[[costs.Newest], str]], ...] = (
    ("README.md", "costs", partial(costs.table, costs.README)),
    ("docs/project/costs.md", "costs", partial(costs.table, costs.COSTS)),
    ("docs/project/costs.md", "whole steps", partial(_whole, "end_to_end")),
    ("docs/process/resize.md", "costs", partial(costs.table, costs.RESIZE)),
    ("docs/compile/verified.md", "costs", partial(costs.table, costs.VERIFIED)),
    ("docs/training/transaction.md", "costs", partial(costs.table, costs.TRANSACTION)),
    ("docs/training/checkpoints.md", "costs", partial(costs.table, costs.CHECKPOINT)),
    ("docs/training/recompute.md", "costs", partial(costs.table, costs.RECOMPUTE)),
    ("docs/compile/batches.md", "waste", partial(_whole, "sampler")),
    ("docs/compile/batches.md", "pairs", partial(_whole, "pairs")),
)
"""A page, the mark in it, and what makes the text there of the newest records."""


def rewritten(page: str, mark: str, text: str) -> str:
    """Return the page with what is between the mark's two lines replaced; no mark, no change."""
    begin = rf"<!-- begin: {mark}\b[^>]*-->"
    new = f"<!-- begin: {mark}, written by python -m benchmarks report -->\n\n{text}\n\n"
    return re.sub(rf"{begin}.*?(?=<!-- end: {mark} -->)", lambda _: new, page, flags=re.DOTALL)


def _figures(records: list[Record], to: Path) -> dict[Path, str]:
    """Return each page whose figures are not those of the records, as it should be."""
    pages: dict[Path, str] = {}
    for name, mark, text in FIGURES:
        if (to / name).exists():
            old = pages.get(Path(name)) or (to / name).read_text(encoding="utf-8")
            pages[Path(name)] = rewritten(old, mark, text(partial(newest, records)))
    return {name: text for name, text in pages.items() if text != (to / name).read_text("utf-8")}


def take_in(results: Path, folder: Path) -> list[Path]:
    """Write a record for each benchmark that ``python -m benchmarks gpu`` has results of.

    Raises:
        FileNotFoundError: the folder has no results.
        ValueError: they are those of a rehearsal.
    """
    path = results / gpu.RESULTS
    if not path.exists():
        raise FileNotFoundError(f"{results}: expected {gpu.RESULTS} of python -m benchmarks gpu")
    written = []
    for record in records_of(path):
        name, device = record["benchmark"].removeprefix("bench_"), record.pop("device")
        if record.get("quick"):
            raise ValueError(f"{path} is of a rehearsal, which shows only that the command runs")
        if not record.get("rows"):
            continue
        to = folder / f"{record['date'][:10]}-{name}-{device}.json"
        write_record(to, record)
        written.append(to)
    return written


def main(folder: Path, to: Path = ROOT, *, check: bool = False) -> int:
    """Write the page and other pages' figures; or 1 if one of them is out of date."""
    records = committed(folder)
    texts = {PAGE: page(records), **_figures(records, to)}
    if check:
        written = {path: (to / path).read_text("utf-8") for path in texts if (to / path).exists()}
        stale = [path for path, text in texts.items() if written.get(path) != text]
        for path in stale:
            print(f"{path} does not say what the records say: run python -m benchmarks report")
        return int(bool(stale))
    for path, text in texts.items():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        (to / path).write_text(text, encoding="utf-8")
    print(f"{', '.join(map(str, texts))}: from {len(records)} records")
    return 0
