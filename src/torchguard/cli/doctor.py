"""``python -m torchguard doctor``: options in, table or JSON out, exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from torchguard.cli.output import interrupted, positive_float, positive_int, write
from torchguard.cli.table import lines, one_line, table
from torchguard.defects.catalog import FAMILIES, all_defects
from torchguard.defects.doctor import DoctorProgress, doctor, select


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="show which defects this torch has and whether the guards close them",
        description="Run the probe of every known defect in a process of its own, on bare torch "
        "and with the guards, and show a table.",
        epilog="Exit status: 0 when every live defect that has a guard is closed, 1 when one of "
        "those is open, 2 on bad usage.",
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
    try:
        with silence:
            select(all_defects(), options.only, options.family)
    except ValueError as error:
        options.parser.error(str(error))  # exits with 2
    try:
        with silence, _progress(options) as progress:
            report = doctor(
                options.only,
                options.family,
                progress=progress,
                jobs=options.jobs,
                timeout=options.timeout,
            )
    except KeyboardInterrupt:
        return interrupted("doctor")
    if options.json:
        write(report.to_json() + "\n")
    elif _draws(sys.stdout):
        width = shutil.get_terminal_size((100, 24)).columns
        write(table(report, width=width, color=_colors(options)))
    else:
        write(lines(report))
    return report.exit_status


def _draws(stream: TextIO) -> bool:
    """Whether a table or a bar can be drawn there: rich is the extra ``cli``."""
    return stream.isatty() and importlib.util.find_spec("rich") is not None


def _colors(options: argparse.Namespace) -> bool:
    # https://no-color.org: any value but the empty one.
    unwanted = options.no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not unwanted


def _progress(
    options: argparse.Namespace,
) -> contextlib.AbstractContextManager[Callable[[DoctorProgress], None] | None]:
    if options.json and not sys.stderr.isatty():
        return contextlib.nullcontext()  # a program is reading: it wants the document only
    return shown_on(sys.stderr, color=_colors(options))


@contextlib.contextmanager
def shown_on(stream: TextIO, *, color: bool) -> Iterator[Callable[[DoctorProgress], None]]:
    """Give a function for ``doctor(progress=...)``: it draws a live bar, or prints lines."""
    if not _draws(stream):
        yield _printed_on(stream)
        return
    from rich.console import Console  # noqa: PLC0415 - optional
    from rich.progress import (  # noqa: PLC0415 - optional
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(file=stream, no_color=not color, highlight=False)
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=None)
        yield lambda step: progress.update(
            bar, completed=step.done, total=step.total, description=_described(step)
        )


def _printed_on(stream: TextIO) -> Callable[[DoctorProgress], None]:
    """Print a line per finished row, so a log shows what the doctor was doing when it stopped."""
    announced = False

    def show(step: DoctorProgress) -> None:
        nonlocal announced
        if step.remaining is not None and not announced:
            announced = True
            expected = f"{step.total} defects to probe, {_duration(step.remaining)}"
            print(expected, file=stream, flush=True)
        if step.row is not None:
            width = len(str(step.total))
            line = f"[{step.done:>{width}}/{step.total}] {one_line(step.row)}"
            print(line, file=stream, flush=True)

    return show


def _described(step: DoctorProgress) -> str:
    running = ", ".join(step.running) or ("starting" if step.done < step.total else "finishing")
    return running if step.remaining is None else f"{_duration(step.remaining)} left: {running}"


def _duration(seconds: float) -> str:
    if seconds < 90:  # noqa: PLR2004 - from here on people count in minutes
        return f"about {max(5, 5 * round(seconds / 5))} seconds"
    return f"about {round(seconds / 60)} minutes"
