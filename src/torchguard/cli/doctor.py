"""``python -m torchguard doctor``: options in, table or JSON out, exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TextIO, TypeAlias

from torchguard.cli import interrupted, positive_float, positive_int, write
from torchguard.defects.catalog import CALLED_GUARDS, FAMILIES, all_defects, built_in_ids
from torchguard.defects.doctor import DoctorProgress, DoctorReport, Environment, Row, doctor, select

if TYPE_CHECKING:
    from rich.table import Table


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="show which defects this torch has and whether the guards close them",
        description="Run the probe of every known defect in a process of its own, on bare torch\n"
        "and with the guards, and show a table. It takes minutes; one id takes seconds.",
        epilog="examples:\n  python -m torchguard doctor --only resize-locked\n"
        "  python -m torchguard doctor --family memory --json > report.json\n\n"
        "Exit status: 0 when every live defect that has a guard is closed, 1 when one of\n"
        "those is open, 2 on bad usage.\n\n"
        + textwrap.fill(f"ids: {', '.join(built_in_ids())}", 80, break_on_hyphens=False),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument(
        "--only", metavar="ID", action="append", help="probe this defect only; may be repeated"
    )
    parser.add_argument("--family", choices=FAMILIES, help="probe this family only")
    parser.add_argument("--no-color", action="store_true", help="no colours, as with NO_COLOR set")
    parser.add_argument(
        "--jobs", metavar="N", type=positive_int, help="processes side by side (default: cores)"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive_float,
        default=120.0,
        help="kill a probe after this time (default: 120)",
    )
    parser.set_defaults(command=_main, parser=parser)


def _main(options: argparse.Namespace) -> int:
    # Standard output is the report's alone, whatever a plug-in prints when it is imported.
    silence = contextlib.redirect_stdout(sys.stderr)
    # doctor() selects too: here a wrong name is bad usage, with the options that there are.
    try:
        with silence:
            select(all_defects(), options.only, options.family)
    except ValueError as error:
        options.parser.error(str(error))  # exits with 2
    try:
        with silence, _progress(options) as progress:
            limits = {"jobs": options.jobs, "timeout": options.timeout}
            report = doctor(options.only, options.family, progress=progress, **limits)
    except KeyboardInterrupt:
        return interrupted("doctor")
    width = shutil.get_terminal_size((100, 24)).columns
    if options.json:
        write(report.to_json() + "\n")
    elif _draws(sys.stdout):
        write(table(report, width=width, color=_colors(options)))
    elif sys.stdout.isatty():
        write(wrapped(lines(report), width) + "\nfor a table: pip install rich\n")
    else:
        write(lines(report))
    return report.exit_status


def _draws(stream: TextIO) -> bool:
    """Whether a table or a bar can be drawn there: rich is the extra ``cli``."""
    # In a log, one plain line for each defect is what grep and diff can be used on.
    return stream.isatty() and importlib.util.find_spec("rich") is not None


def _colors(options: argparse.Namespace) -> bool:
    # https://no-color.org: any value but the empty one.
    unwanted = options.no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not unwanted


_Show: TypeAlias = Callable[[DoctorProgress], None]


def _progress(options: argparse.Namespace) -> contextlib.AbstractContextManager[_Show | None]:
    if options.json and not sys.stderr.isatty():
        return contextlib.nullcontext()  # a program is reading: it wants the document only
    return shown_on(sys.stderr, color=_colors(options))


@contextlib.contextmanager
def shown_on(stream: TextIO, *, color: bool) -> Iterator[_Show]:
    """Give a function for ``doctor(progress=...)``: it draws a live bar, or prints lines."""
    if not _draws(stream):
        yield _printed_on(stream)
        return
    from rich import progress  # noqa: PLC0415 - optional
    from rich.console import Console  # noqa: PLC0415 - optional

    console = Console(file=stream, no_color=not color, highlight=False)
    columns = (
        progress.BarColumn(bar_width=20),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}", markup=False),
    )
    with progress.Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("starting", total=None)
        yield lambda step: bars.update(
            bar, completed=step.done, total=step.total, description=_described(step)
        )


def _printed_on(stream: TextIO) -> _Show:
    """Print a line per finished row, so a log shows what the doctor was doing when it stopped."""
    announced = False

    def show(step: DoctorProgress) -> None:
        nonlocal announced
        if step.remaining is not None and not announced:
            announced = True
            stream.write(f"{step.total} defects to probe, {_duration(step.remaining)}\n")
        if step.row is not None:
            width = len(str(step.total))
            stream.write(f"[{step.done:>{width}}/{step.total}] {one_line(step.row)}\n")
        stream.flush()

    return show


def _described(step: DoctorProgress) -> str:
    running = ", ".join(step.running) or ("starting" if step.done < step.total else "finishing")
    return running if step.remaining is None else f"{_duration(step.remaining)} left: {running}"


def _duration(seconds: float) -> str:
    if seconds < 90:  # noqa: PLR2004 - from here on people count in minutes
        return f"about {max(5, 5 * round(seconds / 5))} seconds"
    return f"about {round(seconds / 60)} minutes"


# ---- the report as text ----


_NARROWEST, _WIDEST = 80, 140
_STYLES = {
    **dict.fromkeys(("open", "corrupt", "wrong result", "crash"), "red"),
    **dict.fromkeys(("detected", "timeout", "broken"), "yellow"),
    **dict.fromkeys(("not run", "absent"), "dim"),
    "closed": "green",
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


def wrapped(text: str, width: int) -> str:
    """Fit lines to a terminal; what is left of a line is indented."""
    return "".join(
        f"{textwrap.fill(line, width - 1, subsequent_indent='    ', break_on_hyphens=False)}\n"
        for line in text.splitlines()
    )


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
    if row.bare.status == "crash":
        # The process left no sentence, so say what the defect is.
        return f"crash ({row.bare.detail}): {row.summary}"
    return ": ".join(filter(None, (row.bare.status, row.bare.detail)))


def _guarded(row: Row) -> str:
    return "open, no guard yet" if row.live and not row.guards else row.guarded.status


def _guard(row: Row) -> str:
    return guards_as_code(row.guards) if row.live else ""


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
    foreign = "the foreign distribution named torchguard is not installed"
    if environment.foreign is not None:
        foreign = (
            f"WARNING: the distribution torchguard {environment.foreign} is installed. It is "
            "another project's package and owns the same folder as torchguard-runtime: uninstall "
            "both, then install torchguard-runtime again."
        )
    return [*(f"{name:<11} {value}" for name, value in facts.items()), foreign]
