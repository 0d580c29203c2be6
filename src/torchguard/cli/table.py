"""The report as text: a table that fits 100 columns, and the summary below it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchguard.defects.child import CALLED_GUARDS
from torchguard.defects.registry import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchguard.defects.report import Environment, Report, Row

__all__ = ["guards_as_code", "one_line", "text"]

Painter = Callable[[str, str], str]
"""Gives a text the look of a style; the plain one returns it as it is."""

_GAP = "  "
_NARROWEST, _WIDEST = 80, 140
_STYLES = {  # SGR parameters, https://man7.org/linux/man-pages/man4/console_codes.4.html
    "closed": "32",
    "detected": "33",
    "open": "31",
    "corrupt": "31",
    "wrong result": "31",
    "crash": "31",
    "timeout": "33",
    "broken": "33",
    "not run": "2",
    "absent": "2",
    "title": "1",
}
_ISSUE = re.compile(r"https://github\.com/([^/]+/[^/]+)/(issues|pull)/(\d+)")


def _painted(shown: str, style: str) -> str:
    code = _STYLES.get(style)
    return f"\x1b[{code}m{shown}\x1b[0m" if code and shown else shown


def _plain(shown: str, _style: str) -> str:
    return shown


def text(report: Report, *, width: int = 100, color: bool = False) -> str:
    """Lay the report out in at most ``width`` columns (never under 80 or over 140)."""
    width = max(_NARROWEST, min(width, _WIDEST))
    paint = _painted if color else _plain
    lines: list[str] = []
    widths = _column_widths(width, report.rows)
    for family in (*FAMILIES, None):
        rows = [row for row in report.rows if row.family == family]
        if not rows:
            continue
        title = "plug-ins that can't be used" if family is None else f"{family} family"
        lines += [paint(title, "title"), ""]
        lines += _cells(("defect, issue", "bare torch", "guarded", "guard to use"), widths)
        lines.append("-" * width)
        for row in rows:
            lines += _lines(row, widths, paint)
        lines.append("")
    lines += _summary(report, width, paint)
    return "\n".join(lines) + "\n"


def one_line(row: Row) -> str:
    """Say what was found about one defect in one line, as the progress does."""
    crashed = row.bare.status == "crash"
    bare = f"crash ({row.bare.detail})" if crashed else row.bare.status
    guarded = "" if row.guarded.status == "-" else f", {row.guarded.status}"
    if row.live and not row.guards:
        guarded = ", open, no guard yet"
    return f"{row.id}: {bare}{guarded}"


def guards_as_code(guards: Iterable[str]) -> str:
    """Write guards the way they are typed: ``install("resize", "out")``, ``guarded(data=True)``."""
    guards = tuple(guards)
    installed = ", ".join(f'"{name}"' for name in guards if name not in CALLED_GUARDS)
    parts = [f"install({installed})"] if installed else []
    parts += [CALLED_GUARDS[name] for name in guards if name in CALLED_GUARDS]
    return " and ".join(parts)


def _lines(row: Row, widths: tuple[int, int, int, int], paint: Painter) -> list[str]:
    """Lay out one row: its cells, and below them what no narrow cell could hold."""
    name = "\n".join((row.id, *map(_issue, row.upstream)))
    styles = ("", row.bare.status, row.guarded.status, "")
    lines = _cells((name, _bare(row), _guarded(row), _guard(row)), widths, styles, paint)
    note = _note(row)
    if note:
        # Under the second column, beside the issues where the first cell is the longest.
        indent = " " * (widths[0] + len(_GAP))
        wrapped = textwrap.wrap(note, sum(widths[1:]) + 2 * len(_GAP), break_on_hyphens=False)
        short = len([line for line in lines if line[len(indent) :].strip()])
        beside = [line.ljust(len(indent)) for line in lines[short:]]
        beside += [indent] * (len(wrapped) - len(beside))
        below = wrapped + [""] * (len(beside) - len(wrapped))
        lines[short:] = [(left + right).rstrip() for left, right in zip(beside, below, strict=True)]
    return lines


def _column_widths(width: int, rows: Iterable[Row]) -> tuple[int, int, int, int]:
    first = max(14, min(28, max((len(row.id) for row in rows), default=0)))
    guarded = 9  # "open, no" over "guard yet"
    guard = 24  # install("resize", "out")
    return first, width - first - guarded - guard - 3 * len(_GAP), guarded, guard


def _cells(
    cells: tuple[str, ...],
    widths: tuple[int, ...],
    styles: tuple[str, ...] = ("", "", "", ""),
    paint: Painter = _plain,
) -> list[str]:
    """Wrap each cell to its column and put them side by side."""
    columns = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for position in range(max(map(len, columns))):
        parts = []
        for column, width, style in zip(columns, widths, styles, strict=True):
            part = column[position] if position < len(column) else ""
            # Paint after padding: escape sequences have no width.
            parts.append(paint(part, style) + " " * (width - len(part)))
        lines.append(_GAP.join(parts).rstrip())
    return lines


def _wrapped(cell: str, width: int) -> list[str]:
    lines: list[str] = []
    for paragraph in cell.split("\n"):
        indent = "  " if paragraph.startswith("  ") else ""
        lines += textwrap.wrap(
            paragraph.strip(), width, initial_indent=indent, subsequent_indent=indent
        ) or [""]
    return lines


def _bare(row: Row) -> str:
    bare = row.bare
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


def _issue(url: str) -> str:
    """Shorten an issue's URL; PyTorch's own need no name."""
    match = _ISSUE.fullmatch(url)
    if match is None:
        return f"  {url}"
    repository, kind, number = match.groups()
    name = "" if repository == "pytorch/pytorch" else repository.rpartition("/")[2]
    return f"  {'pull ' if kind == 'pull' else ''}{name}#{number}"


def _summary(report: Report, width: int, paint: Painter) -> list[str]:
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
    lines = textwrap.wrap("; ".join(counts) + ".", width)
    if report.failed:
        names = ", ".join(row.id for row in report.failed)
        lines += [paint(line, "open") for line in textwrap.wrap(f"NOT CLOSED: {names}", width)]
    return [*lines, "", *_environment(report.environment, width, paint)]


def _environment(environment: Environment, width: int, paint: Painter) -> list[str]:
    facts = {
        "torch": environment.torch,
        "Python": environment.python,
        "platform": environment.platform,
        "GPU": environment.gpu,
        "torchguard": environment.torchguard,
    }
    lines = [f"{name:<11} {value}" for name, value in facts.items()]
    if environment.foreign is None:
        lines.append("the foreign distribution named torchguard is not installed")
    else:
        warning = (
            f"WARNING: the distribution torchguard {environment.foreign} is installed. It is "
            "somebody else's package and owns the same folder as torchguard-runtime: uninstall "
            "both, then install torchguard-runtime again."
        )
        lines += [paint(line, "open") for line in textwrap.wrap(warning, width)]
    lines.append("#N in the table is https://github.com/pytorch/pytorch/issues/N")
    return lines
