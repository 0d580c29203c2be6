"""Writes ``docs/benchmarks.md`` and its plots from the committed records.

``python -m benchmarks report`` writes; ``--check`` says what is out of date. The tables of
README.md and docs/guards.md, which ``publish.py`` writes, are part of both. A plot carries the
digest of the record that it shows, so that an old one is found without drawing it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import gpu, publish, publish_buckets
from benchmarks.catalog import BENCHMARKS
from benchmarks.layouts import LAYOUTS, verdicts
from benchmarks.machine import NOT_ON_A_GPU, ROOT
from benchmarks.plots import PLOTS, shows
from benchmarks.program import Benchmark, write_record
from benchmarks.records import Record, committed, newest
from benchmarks.stream import records_of
from benchmarks.wording import described, table

__all__ = ["main", "page", "take_in"]

PAGE = Path("docs", "benchmarks.md")
IMAGES = Path("docs", "img")

_HEAD = """\
<!-- written by python -m benchmarks report; change the records or benchmarks/layouts.py -->

# Benchmarks

What the guards cost, each figure from a committed record: a file that says when, with what, on
which machine and by which command it was made. Yours will differ; the ratios less so. To measure
on your own:

```bash
python -m benchmarks list
python -m benchmarks run resize --json my-record.json
```

On a machine with a GPU, `python -m benchmarks gpu --minutes 9 --out DIR` (or `make gpu`) makes
every record that needs one, in the order of worth, and `python -m benchmarks report DIR` turns
what it wrote into records and pages. It needs the checkout and torch's own packages, nothing
installed; `--continue DIR` goes on where a call stopped, and `--rehearse` runs the same list on a
CPU.

`--quick` shows that a benchmark runs and says nothing of how fast; no quick record is shown here.
"""


def page(records: list[Record]) -> str:
    """Return the page."""
    sections = [_HEAD.rstrip(), _overview(records)]
    sections += ["\n\n".join(_section(each, records)) for each in BENCHMARKS.values()]
    return "\n\n".join(sections) + "\n"


def image(name: str, device: str) -> str:
    """Return a plot's file name."""
    return f"bench_{name}.png" if device == "cpu" else f"bench_{name}_{device}.png"


def _overview(records: list[Record]) -> str:
    rows = []
    for name, benchmark in BENCHMARKS.items():
        cells = []
        for device in ("cpu", "cuda"):
            record = newest(records, name, device)
            if device not in benchmark.devices:
                cells.append("the same" if device == "cuda" else "not asked")
            elif record is None:
                cells.append(_missing(device))
            else:
                reached, of = _count(record, device)
                targets = f", {reached} of {of} targets reached" if of else ""
                cells.append(f"{record['date'][:10]}{targets}")
        rows.append((f"[{_title(name)}](#{_anchor(name)})", *cells))
    return table(("", "CPU", "GPU"), rows)


def _count(record: Record, device: str) -> tuple[int, int]:
    found = [_is_reached(verdict) for _, verdict in verdicts(record, device)]
    return sum(found), len(found)


def _is_reached(verdict: str) -> bool:
    return verdict.startswith(("reached", "holds", "nothing lost"))


def _missing(device: str) -> str:
    return NOT_ON_A_GPU if device == "cuda" else "no record yet"


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _anchor(name: str) -> str:
    return _title(name).lower().replace(" ", "-")


def _section(benchmark: Benchmark, records: list[Record]) -> Iterator[str]:
    yield f"## {_title(benchmark.name)}"
    yield benchmark.question
    for device in benchmark.devices:
        record = newest(records, benchmark.name, device)
        if record is None:
            command = f"`python -m benchmarks run {benchmark.name} --device {device}`"
            # On a CPU there is nothing to say that has been seen; the command makes it.
            missing = _missing(device)
            yield f"{missing[0].upper()}{missing[1:]}: {command} makes the record."
            continue
        if len(benchmark.devices) > 1:
            yield f"### {_title(benchmark.name)} on a {'GPU' if device == 'cuda' else 'CPU'}"
        source = f"[Record](../benchmarks/records/{record['file']})."
        yield f"{described(record)} {source}"
        if record.get("ended", "finished") != "finished":
            yield "Time was up before all of it was measured; what is here was."
        missed = [
            (what, verdict)
            for what, verdict in verdicts(record, device)
            if not _is_reached(verdict)
        ]
        reached, of = _count(record, device)
        if of:
            yield f"Targets: {reached} of {of} reached" + (". Missed:" if missed else ".")
        if missed:
            yield "\n".join(f"- {what}: {verdict}" for what, verdict in missed)
        if benchmark.name in PLOTS:
            yield f"![{benchmark.question}](img/{image(benchmark.name, device)})"
        yield LAYOUTS[benchmark.name](record, device)


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
        done = {row.get("operator") for row in record["rows"]}
        begun = [row["operator"] for row in record.pop("begun", []) if row["operator"] not in done]
        if begun:
            record["unfinished"] = begun
        list(BENCHMARKS[name].afterwards(record))
        to = folder / f"{record['date'][:10]}-{name}-{device}.json"
        write_record(to, record)
        written.append(to)
    return written


def _plots(records: list[Record]) -> Iterator[tuple[str, Record, str]]:
    """Yield every plot of the page: which benchmark, of which record, for which device."""
    for name in PLOTS:
        for device in BENCHMARKS[name].devices:
            record = newest(records, name, device)
            if record is not None:
                yield name, record, device


def main(folder: Path, to: Path = ROOT, *, check: bool = False) -> int:
    """Write the page, its plots and the other pages' tables; or 1 if one of them is out of date."""
    records = committed(folder)
    text = page(records)
    plots = [
        (to / IMAGES / image(name, device), name, record, device)
        for name, record, device in _plots(records)
    ]
    if check:
        old = (to / PAGE).read_text(encoding="utf-8") if (to / PAGE).exists() else ""
        stale = [] if old == text else [PAGE]
        stale += [path.relative_to(to) for path, _, record, _ in plots if not shows(path, record)]
        for path in stale:
            print(f"{path} does not say what the records say: run python -m benchmarks report")
        tables = _tables(["--check"]) if to == ROOT else 0
        return int(bool(stale or tables))
    (to / PAGE).parent.mkdir(parents=True, exist_ok=True)
    (to / PAGE).write_text(text, encoding="utf-8")
    for path, name, record, device in plots:
        PLOTS[name](record, device, path)
    print(f"{PAGE} and {len(plots)} plots: written from {len(records)} records")
    return _tables([]) if to == ROOT else 0


def _tables(arguments: list[str]) -> int:
    return publish.main(arguments) | publish_buckets.main(arguments)
