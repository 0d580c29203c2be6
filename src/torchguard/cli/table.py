"""The doctor's report as text: a table by rich, or one plain line for each defect."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchguard.defects.catalog import CALLED_GUARDS, FAMILIES
from torchguard.defects.report import DoctorReport, Environment, Row, Verdict

if TYPE_CHECKING:
    from rich.table import Table

_NARROWEST, _WIDEST = 80, 140
_STYLES = {
    "closed": "green",
    "detected": "yellow",
    "open": "red",
    "corrupt": "red",
    "wrong result": "red",
    "crash": "red",
    "timeout": "yellow",
    "broken": "yellow",
    "not run": "dim",
    "absent": "dim",
}
_ISSUE = re.compile(r"https://github\.com/([^/]+/[^/]+)/(issues|pull)/(\d+)")


def lines(report: DoctorReport) -> str:
    """Write one line for each defect, with everything there is to say about it."""
    shown = []
    for row in report.rows:
        guard = _guard(row) and f"guard: {_guard(row)}"
        detail = row.summary if row.bare.status == "crash" else row.bare.detail
        parts = (one_line(row), detail, guard, _note(row), *row.upstream)
        shown.append("; ".join(filter(None, parts)))
    return "\n".join((*shown, "", *_summary(report), "", *_environment(report.environment), ""))


def one_line(row: Row) -> str:
    """Say what was found about one defect, as the progress does."""
    bare = f"crash ({row.bare.detail})" if row.bare.status == "crash" else row.bare.status
    guarded = _guarded(row)
    return f"{row.id}: {bare}" if guarded == "-" else f"{row.id}: {bare}, {guarded}"


def table(report: DoctorReport, *, width: int = 100, color: bool = False) -> str:
    """Lay the report out in at most ``width`` columns (never under 80 or over 140); needs rich."""
    from rich.console import Console  # noqa: PLC0415 - optional
    from rich.text import Text  # noqa: PLC0415 - optional

    console = Console(
        file=io.StringIO(),
        width=max(_NARROWEST, min(width, _WIDEST)),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        legacy_windows=False,
    )
    names = [len(line) for row in report.rows for line in _name(row).split("\n")]
    name_width = max(14, min(28, max(names, default=0)))
    for family in (*FAMILIES, None):
        rows = [row for row in report.rows if row.family == family]
        if rows:
            title = "plug-ins that can't be used" if family is None else f"{family} family"
            shown = _family(rows, name_width)
            console.print(Text.assemble((title, "bold")), "", shown, "", sep="\n")
    counts, *failed = _summary(report)
    console.print(counts, *(Text.assemble((line, "red")) for line in failed), "", sep="\n")
    console.print(*_environment(report.environment), sep="\n")
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def _family(rows: Iterable[Row], name_width: int) -> Table:
    """Make the table of one family: under its cells, a row has what no narrow cell could hold."""
    from rich import box  # noqa: PLC0415 - optional
    from rich.console import Group  # noqa: PLC0415 - optional
    from rich.table import Column, Table  # noqa: PLC0415 - optional
    from rich.text import Text  # noqa: PLC0415 - optional

    def cells(*texts: tuple[str, str]) -> Table:
        guarded = Column(overflow="fold", width=9)  # "open, no" over "guard yet"
        columns = Column(overflow="fold", ratio=1), guarded, Column(overflow="fold", width=24)
        grid = Table.grid(*columns, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
        # assemble() styles the words alone, not what a cell is padded with.
        grid.add_row(*(Text.assemble(text) for text in texts))
        return grid

    header = cells(("bare torch", ""), ("guarded", ""), ("guard to use", ""))
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="", expand=True)
    shown.padding, shown.pad_edge = (0, 1, 0, 0), False
    shown.add_column("defect, issue", width=name_width, overflow="fold")
    shown.add_column(header, ratio=1, overflow="fold")
    for row in rows:
        bare = (_bare(row), _STYLES.get(row.bare.status, ""))
        guarded = (_guarded(row), _STYLES.get(row.guarded.status, ""))
        note = [Text(_note(row))] if _note(row) else []
        shown.add_row(Text(_name(row)), Group(cells(bare, guarded, (_guard(row), "")), *note))
    return shown


def guards_as_code(guards: Iterable[str]) -> str:
    """Write guards the way they are typed: ``install("resize", "out")``, ``guarded(data=True)``."""
    guards = tuple(guards)
    installed = ", ".join(f'"{name}"' for name in guards if name not in CALLED_GUARDS)
    parts = [f"install({installed})"] if installed else []
    parts += [CALLED_GUARDS[name] for name in guards if name in CALLED_GUARDS]
    return " and ".join(parts)


def _name(row: Row) -> str:
    return "\n".join((row.id, *map(_issue, row.upstream)))


def _issue(url: str) -> str:
    """Shorten an issue's URL; PyTorch's own need no name."""
    match = _ISSUE.fullmatch(url)
    if match is None:
        return f"  {url}"
    repository, kind, number = match.groups()
    name = "" if repository == "pytorch/pytorch" else repository.rpartition("/")[2]
    return f"  {'pull ' if kind == 'pull' else ''}{name}#{number}"


def _bare(row: Row) -> str:
    bare: Verdict = row.bare
    if bare.status == "crash":
        # The process left no sentence, so say what the defect is.
        return f"crash ({bare.detail}): {row.summary}"
    return f"{bare.status}: {bare.detail}" if bare.detail else bare.status


def _guarded(row: Row) -> str:
    return "open, no guard yet" if row.live and not row.guards else row.guarded.status


def _guard(row: Row) -> str:
    if not row.live:
        return ""
    if row.guards:
        return guards_as_code(row.guards)
    return f"planned: {row.planned}" if row.planned else ""


def _note(row: Row) -> str:
    """Say what to do where no guard is, what happened in spite of it, or what it leaves open."""
    if row.failed:
        return f"with the guard on: {row.guarded.detail}"
    if row.live and not row.guards and row.advice:
        return f"until then: {row.advice}"
    return row.limits if row.live and row.guards else ""


def _summary(report: DoctorReport) -> list[str]:
    rows = report.rows
    live = [row for row in rows if row.live]
    guarded = [row for row in live if row.guards]
    closed = sum(row.guarded.status == "closed" for row in guarded)
    detected = sum(row.guarded.status == "detected" for row in guarded)
    counts = [
        f"{len(rows)} probed",
        f"{sum(row.bare.status == 'absent' for row in rows)} absent",
        f"{len(live)} live",
        f"{closed} of those closed by their guards",
        f"{detected} detected, not prevented",
        f"{len(guarded) - closed - detected} open in spite of their guards",
        f"{len(live) - len(guarded)} open, no guard yet",
        f"{sum(row.bare.status == 'not run' for row in rows)} not run here",
        f"{sum(row.bare.status in ('timeout', 'broken') for row in rows)} without an answer",
    ]
    failed = ", ".join(row.id for row in report.failed)
    return ["; ".join(counts) + ".", *([f"NOT CLOSED: {failed}"] if failed else [])]


def _environment(environment: Environment) -> list[str]:
    facts = {
        "torch": environment.torch,
        "Python": environment.python,
        "platform": environment.platform,
        "GPU": environment.gpu,
        "torchguard": environment.torchguard,
    }
    shown = [f"{name:<11} {value}" for name, value in facts.items()]
    if environment.foreign is None:
        shown.append("the foreign distribution named torchguard is not installed")
    else:
        shown.append(
            f"WARNING: the distribution torchguard {environment.foreign} is installed. It is "
            "somebody else's package and owns the same folder as torchguard-runtime: uninstall "
            "both, then install torchguard-runtime again."
        )
    return shown
