"""Writes ``docs/benchmarks.md``, its plots and figures of other pages from the committed records.

``python -m benchmarks report`` writes; ``--check`` says what is out of date. A plot carries the
digest of the record that it shows, so that an old one is found without drawing it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import gpu
from benchmarks.catalog import BENCHMARKS
from benchmarks.machine import ROOT
from benchmarks.plots import PLOTS, draw, shows
from benchmarks.program import Benchmark, write_record
from benchmarks.records import Record, committed, newest, of_device
from benchmarks.stream import records_of
from benchmarks.tables import Table, described, filled, markdown

PAGE = Path("docs", "benchmarks.md")
IMAGES = Path("docs", "img")
MISSING = {"cpu": "no record yet", "cuda": "not measured on a GPU yet"}

_HEAD = """\
<!-- written by python -m benchmarks report; change the records, or `tables` of a benchmark -->

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
The command beside a record is that of its revision.
"""


def page(records: list[Record]) -> str:
    """Return the page."""
    sections = [_HEAD.rstrip(), _overview(records)]
    sections += ["\n\n".join(_section(each, records)) for each in BENCHMARKS.values()]
    return "\n\n".join(sections) + "\n"


def image(name: str, device: str) -> str:
    """Return a plot's file name."""
    return f"bench_{name}.png" if device == "cpu" else f"bench_{name}_{device}.png"


def verdicts(record: Record, device: str) -> Iterator[tuple[str, str]]:
    """Yield what was aimed at, with what became of it, for every result that has a target."""
    for line in record.get("targets", []):
        target, _, verdict = line.rpartition(": ")
        yield target, verdict
    for part in _parts(record):
        for row in of_device(record, part, device):
            if row.get("target") is not None and row.get("verdict") is not None:
                names = ("what", "way", "id", "operator", "test")
                named = next(str(row[name]) for name in names if row.get(name)).partition(":")[0]
                rest = [row[name] for name in ("phase", "mode", "scope") if name in row]
                yield f"{', '.join([named, *rest])}: {row['target']}", row["verdict"]


def _parts(record: Record) -> list[str]:
    return [name for name, part in record.items() if isinstance(part, list) and name != "targets"]


def _is_reached(verdict: str) -> bool:
    return verdict.startswith(("reached", "holds", "nothing lost"))


def _count(record: Record, device: str) -> str:
    found = [_is_reached(verdict) for _, verdict in verdicts(record, device)]
    return f"{sum(found)} of {len(found)} targets reached" if found else ""


def _overview(records: list[Record]) -> str:
    def cell(benchmark: Benchmark, device: str) -> str:
        record = newest(records, benchmark.name, device)
        if device not in benchmark.devices:
            return "the same" if device == "cuda" else "not asked"
        if record is None:
            return MISSING[device]
        return ", ".join(filter(None, (record["date"][:10], _count(record, device))))

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
        found = verdicts(record, device)
        missed = [f"- {what}: {verdict}" for what, verdict in found if not _is_reached(verdict)]
        if count := _count(record, device):
            yield f"{count}. Missed:" if missed else f"{count}."
        if missed:
            yield "\n".join(missed)
        if benchmark.name in PLOTS:
            yield f"![{benchmark.question}](img/{image(benchmark.name, device)})"
        yield _tables(benchmark.tables, record, device)


def _source(record: Record) -> str:
    return f"{described(record)} [Record](../benchmarks/records/{record['file']})."


def _tables(tables: tuple[Table, ...], record: Record, device: str) -> str:
    shown = tables or [Table(rows=part) for part in _parts(record)]
    return "\n\n".join(filter(None, (table.of(record, device) for table in shown)))


# --- figures of other pages: what stands between two marks


def _both(name: str) -> str:
    return (
        f"{{{name}.baseline_ns.median:time}} → {{{name}.guarded_ns.median:time}} "
        f"({{{name}.ratio.median:times}})"
    )


_COSTS = f"""\
| guard | what it stops | what it costs when nothing fails |
| --- | --- | --- |
| `safe_resize_()`, `safe_set_()`,<br>`install()` | a failed `resize_`, `resize_as_` or `set_` \
leaves a shape without memory; growing a tensor in shared memory kills the process | `resize_` to \
the same size {_both("same-size-install")}, growing by 64 MB and filling it \
{_both("grow-64mb-fill")}; `set_` {_both("set-install")} |
| `install("out")` | a failed `out=` call leaves its output with a shape that is not its own | \
`torch.add` of 10 elements {_both("add-without-out")} without `out=`, {_both("add-with-out")} with |
| `guarded()` | both, for every operation in a scope; and a half-written tensor that a later \
backward would use | `a * b` {_both("guarded-plain")}, `a.copy_(b)` {_both("guarded-in-place")}; \
entering the scope {{guarded-enter.added_ns.median:time}} |
| `guarded(data=True)` | the same, and the old data comes back | what is about to be written is \
copied first: `a.copy_(b)` of 1 MB {_both("guarded-data-1mb")} |
| `rollback_on_error()` | a block of your own code that fails halfway | \
{{rollback-small.added_ns.median:time}} per block and tensor; with `data=True` and 1 MB \
{{rollback-data-1mb.added_ns.median:time}} |
| `check_consistent()`, `repair_()` | a tensor that is spoiled already | nothing until you call it |
| what no guard patches |  | nothing: with both installed, {{untouched.the_same_object:,}} of \
{{untouched.attributes:,}} attributes of torch are the objects they were |
"""


def _costs(record: Record) -> str:
    rows = {row["id"]: row for row in record["rows"] if row.get("device", "cpu") == "cpu"}
    table = "\n".join(filled(line, {**record, **rows}) for line in _COSTS.splitlines())
    return f"{table}\n\n{_source(record)}"


def _step_calls(record: Record) -> str:
    """Return the most that a step calls of a guard, and what that is of the host's time."""
    worst = {}
    for scope in ("install()", "install(), every guard"):
        rows = [row for row in record["rows"] if row["scope"] == scope]
        worst[scope] = max(row["count"] for row in rows), max(row["percent"] for row in rows)
    (calls, percent), (all_calls, all_percent) = worst.values()
    called = f"is called at most {calls} times, {percent:.2g} % of the host's time"
    return (
        "In steps of three models (training and inference, eager and compiled) what `install()` "
        f"patches {called if calls else 'is never called'}; what all guards together patch is "
        f"called at most {all_calls} times, which takes at most {all_percent:.2g} % of the host's "
        f"time ([counted]({_address()}/blob/main/docs/benchmarks.md#host))."
    )


def _address() -> str:
    """Return the repository's address: on a package index, relative links lead nowhere."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [found] = re.findall(r'^Repository = "(.*)"$', project, re.MULTILINE)
    return str(found)


def _as_a_section(record: Record) -> str:
    tables = BENCHMARKS[record["benchmark"].removeprefix("bench_")].tables
    return f"{_source(record)}\n\n{_tables(tables, record, 'cpu')}"


FIGURES: tuple[tuple[str, str, str, Callable[[Record], str]], ...] = (
    ("README.md", "whole steps", "host", _step_calls),
    ("docs/guards.md", "costs", "resize", _costs),
    ("docs/verified.md", "costs", "verified", _as_a_section),
    ("docs/bucketed.md", "stream", "buckets", _as_a_section),
)
"""A page, the mark in it, the benchmark whose newest record of a CPU is told of, and how."""


def rewritten(page: str, mark: str, text: str) -> str:
    """Return the page with what is between the mark's two lines replaced; no mark, no change."""
    begin = rf"<!-- begin: {mark}\b[^>]*-->"
    new = f"<!-- begin: {mark}, written by python -m benchmarks report -->\n\n{text}\n\n"
    return re.sub(rf"{begin}.*?(?=<!-- end: {mark} -->)", lambda _: new, page, flags=re.DOTALL)


def _figures(records: list[Record], to: Path) -> dict[Path, str]:
    """Return each page whose figures are not those of the records, as it should be."""
    pages: dict[Path, str] = {}
    for name, mark, benchmark, write in FIGURES:
        record = newest(records, benchmark, "cpu")
        if record is not None and (to / name).exists():
            old = pages.get(Path(name)) or (to / name).read_text(encoding="utf-8")
            pages[Path(name)] = rewritten(old, mark, write(record))
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
        done = {row.get("operator") for row in record["rows"]}
        begun = [row for row in record.pop("begun", []) if row["operator"] not in done]
        if begun:
            record["unfinished"] = begun
        BENCHMARKS[name].afterwards(record)
        to = folder / f"{record['date'][:10]}-{name}-{device}.json"
        write_record(to, record)
        written.append(to)
    return written


def _plots(records: list[Record]) -> Iterator[tuple[Path, str, Record, str]]:
    """Yield every plot of the page: its file, of which benchmark and record, for which device."""
    for name in PLOTS:
        for device in BENCHMARKS[name].devices:
            record = newest(records, name, device)
            if record is not None:
                yield IMAGES / image(name, device), name, record, device


def main(folder: Path, to: Path = ROOT, *, check: bool = False) -> int:
    """Write the page, its plots and other pages' figures; or 1 if one of them is out of date."""
    records = committed(folder)
    texts, plots = {PAGE: page(records), **_figures(records, to)}, list(_plots(records))
    if check:
        written = {path: (to / path).read_text("utf-8") for path in texts if (to / path).exists()}
        stale = [path for path, text in texts.items() if written.get(path) != text]
        stale += [path for path, _, record, _ in plots if not shows(to / path, record)]
        for path in stale:
            print(f"{path} does not say what the records say: run python -m benchmarks report")
        return int(bool(stale))
    for path, text in texts.items():
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        (to / path).write_text(text, encoding="utf-8")
    for path, name, record, device in plots:
        draw(name, record, device, to / path)
    print(f"{', '.join(map(str, texts))} and {len(plots)} plots: from {len(records)} records")
    return 0
