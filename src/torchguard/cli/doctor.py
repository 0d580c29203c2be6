"""``python -m torchguard doctor``: options in, lines or JSON out, exit status."""

from __future__ import annotations

import argparse
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import TextIO

from torchguard.cli import interrupted, write
from torchguard.defects.catalog import CALLED_GUARDS, FAMILIES, all_ids
from torchguard.defects.diagnosis import DoctorReport, Environment, Row, doctor, select


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="show which defects this torch has and whether the guards close them",
        description="Run the probe of every known defect in a process of its own, in PyTorch\n"
        "and with the guards; print a line for each. It takes minutes; one id takes seconds.",
        epilog="examples:\n  python -m torchguard doctor --only resize-locked\n"
        "  python -m torchguard doctor --family memory --json > report.json\n\n"
        "Exit status: 0 when every live defect that has a guard is closed, 1 when one of\n"
        "those is open, 2 on bad usage.\n\n"
        + textwrap.fill(f"ids: {', '.join(all_ids())}", 80, break_on_hyphens=False),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument(
        "--only", metavar="ID", action="append", help="probe this defect only; may be repeated"
    )
    parser.add_argument("--family", choices=FAMILIES, help="probe this family only")
    parser.add_argument(
        "--jobs", metavar="N", type=int, help="processes side by side (default: cores)"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=120.0,
        help="kill a probe after this time (default: 120)",
    )
    parser.set_defaults(command=_main, parser=parser)


def _main(options: argparse.Namespace) -> int:
    try:
        # doctor() selects too: here it says how many lines of progress there will be.
        total = len(select(options.only, options.family))
        # A program that reads the document wants nothing else.
        silent = options.json and not sys.stderr.isatty()
        report = doctor(
            options.only,
            options.family,
            progress=None if silent else shown_on(sys.stderr, total),
            jobs=options.jobs,
            timeout=options.timeout,
        )
    except ValueError as error:
        options.parser.error(str(error))  # exits with 2
    except KeyboardInterrupt:
        return interrupted("doctor")
    write(report.to_json() + "\n" if options.json else lines(report))
    return report.exit_status


def shown_on(stream: TextIO, total: int) -> Callable[[Row], None]:
    """Give a function for ``doctor(progress=...)`` that prints a line for each finished row."""
    stream.write(f"{total} defects to probe\n")
    stream.flush()
    numbers = itertools.count(1)

    def show(row: Row) -> None:
        stream.write(f"[{next(numbers):>{len(str(total))}}/{total}] {one_line(row)}\n")
        stream.flush()

    return show


# ---- the report as text ----


def lines(report: DoctorReport) -> str:
    """Write one line for each defect, with everything there is to say about it."""
    shown = []
    for row in report.rows:
        guard = f"guard: {guards_as_code(row.guards)}" if row.live and row.guards else ""
        detail = row.summary if row.bare.status == "crash" else row.bare.detail
        parts = (one_line(row), detail, guard, _note(row), *row.upstream)
        shown.append("; ".join(filter(None, parts)))
    return "\n".join((*shown, "", *_summary(report), "", *_environment(report.environment), ""))


def one_line(row: Row) -> str:
    """Say what was found about one defect, as the progress does."""
    bare = f"crash ({row.bare.detail})" if row.bare.status == "crash" else row.bare.status
    guarded = "open, no guard yet" if row.live and not row.guards else row.guarded.status
    return f"{row.id}: {bare}" if guarded == "-" else f"{row.id}: {bare}, {guarded}"


def guards_as_code(guards: Iterable[str]) -> str:
    """Write guards the way they are typed: ``install("resize", "out")``, ``transaction()``."""
    guards = tuple(guards)
    installed = ", ".join(f'"{name}"' for name in guards if name not in CALLED_GUARDS)
    parts = [f"install({installed})"] if installed else []
    parts += [CALLED_GUARDS[name] for name in guards if name in CALLED_GUARDS]
    return " and ".join(parts)


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
