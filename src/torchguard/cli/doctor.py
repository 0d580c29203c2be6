"""``python -m torchguard doctor``: options in, lines or JSON out, exit status."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from torchguard.cli import DOCUMENTATION, interrupted, write
from torchguard.cli.terminal import BOLD, DIM, GREEN, RED, Bar, Paint, shortened, width
from torchguard.defects.catalog import CALLED_GUARDS, FAMILIES, all_ids
from torchguard.defects.diagnosis import DefectRow, DoctorReport, Environment, doctor, select


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="show which defects this torch has and whether the guards close them",
        description="Run the probe of every known defect in a process of its own, in PyTorch\n"
        "and with the guards. It takes minutes, a single defect seconds. With names, print\n"
        "everything that is known about these defects.",
        epilog="examples:\n  python -m torchguard doctor resize-locked\n"
        "  python -m torchguard doctor --family memory --json > report.json\n\n"
        "Exit status: 0 when every live defect that has a guard is closed, 1 when one of\n"
        "those is open, 2 on bad usage.\n\n"
        + textwrap.fill(f"names: {', '.join(all_ids())}", 80, break_on_hyphens=False),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="probe only these defects")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--family", choices=FAMILIES, help="probe this family only")
    parser.add_argument(
        "--jobs", metavar="N", type=int, help="processes side by side (default: cores, at most 8)"
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
    bar: Bar | None = None
    try:
        only = options.names or None
        total = len(select(only, options.family))  # doctor() selects too: here it is counted
        # A program that reads the document wants nothing else.
        if not options.json or sys.stderr.isatty():
            bar = Bar(sys.stderr, total, "defects to probe")
        report = doctor(
            only,
            options.family,
            progress=None if bar is None else _shown_by(bar),
            jobs=options.jobs,
            timeout=options.timeout,
        )
    except ValueError as error:
        options.parser.error(str(error))  # exits with 2
    except KeyboardInterrupt:
        if bar is not None:
            bar.clear()
        return interrupted("doctor")
    if options.json:
        write(report.to_json() + "\n")
    elif options.names:
        write(stories(report, Paint(sys.stdout), width()))
    elif sys.stdout.isatty():
        write(overview(report, Paint(sys.stdout), width()))
    else:
        write(lines(report))
    return report.exit_status


def _shown_by(bar: Bar) -> Callable[[DefectRow], None]:
    def show(row: DefectRow) -> None:
        bar.step(row.id, one_line(row))

    return show


# ---- the report at a terminal ----


_LONGEST = 23  # name of a defect; with a title of 50 and the mark it fits 80 columns


def overview(report: DoctorReport, paint: Paint, columns: int) -> str:
    """Write a line for each defect, in groups by what there is to do; the summary first."""
    failed = [row for row in report.rows if row.live and (row.failed or not row.guards)]
    helped = [row for row in report.rows if row.live and row.guards and not row.failed]
    absent = [row.id for row in report.rows if row.bare.status == "absent"]
    unknown = [row for row in report.rows if not row.live and row.bare.status != "absent"]
    torch = report.environment.torch
    counts = {
        "open": len(failed),
        "closed or detected by guards": len(helped),
        "absent": len(absent),
        "not tried": len(unknown),
    }
    parts = [f"{count} {what}" for what, count in counts.items() if count]
    summary = _wrapped(f"{len(report.rows)} defects on PyTorch {torch}: ", parts, columns)
    shown = [paint(line, BOLD) for line in summary]
    if failed:
        shown += ["", "Open, nothing closes them:"]
        shown += _table(failed, "\N{BALLOT X}", paint, RED, columns)
    groups: dict[tuple[str, ...], list[DefectRow]] = {}
    for row in helped:
        groups.setdefault(row.guards, []).append(row)
    # What install() takes first, then what is called.
    for guards in sorted(groups, key=lambda each: (each[0] in CALLED_GUARDS, each)):
        does = "Detected" if groups[guards][0].guarded.status == "detected" else "Closed"
        shown += ["", f"{does} by {guards_as_code(guards)}:"]
        shown += _table(groups[guards], "\N{CHECK MARK}", paint, GREEN, columns)
    if unknown:
        shown += ["", "Not tried:"]
        shown += _table(unknown, "?", paint, DIM, columns)
    if absent:
        shown += ["", *(paint(line, DIM) for line in _wrapped("Absent: ", absent, columns))]
    installed = sorted({name for row in helped for name in row.guards} - CALLED_GUARDS.keys())
    if installed:
        names = [f'"{name}"' for name in installed]
        shown += ["", *_wrapped("Close them: torchguard.install(", names, columns, ")")]
    shown += ["", "Read more: python -m torchguard doctor NAME"]
    if report.environment.foreign is not None:
        shown += ["", *textwrap.wrap(_environment(report.environment)[-1], columns)]
    return "\n".join((*shown, ""))


def _table(
    rows: Sequence[DefectRow], mark: str, paint: Paint, style: str, columns: int
) -> Iterator[str]:
    """Yield a line for each row: a mark, the name, and what you would see, or why not."""
    for row in rows:
        known = row.live or not row.bare.detail
        about = shortened(
            (row.title or row.summary) if known else row.bare.detail, columns - _LONGEST - 6
        )
        yield f"  {paint(mark, style)} {row.id:<{_LONGEST}}  {about}"


def _wrapped(begin: str, words: Sequence[str], columns: int, end: str = "") -> list[str]:
    """Return a list of words in lines that fit, indented below its beginning."""
    return textwrap.wrap(
        begin + ", ".join(words) + end,
        columns,
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def stories(report: DoctorReport, paint: Paint, columns: int) -> str:
    """Write everything that is known about each defect."""
    return "\n".join(line for row in report.rows for line in (*_story(row, paint, columns), ""))


def _story(row: DefectRow, paint: Paint, columns: int) -> Iterator[str]:
    yield f"{paint(row.id, BOLD)}: {row.title or row.summary}"
    facts = {
        "what": row.summary,
        "here": f"{row.bare.status}: {row.bare.detail}" if row.bare.detail else row.bare.status,
        "guard": f"{guards_as_code(row.guards)}: {row.guarded.status}" if row.guards else "none",
        "failed": row.guarded.detail if row.failed else "",
        "limits": row.limits if row.guards else "",
        "PyTorch": row.advice,
    }
    for name, text in facts.items():
        indent = f"  {name:<8} "
        yield from textwrap.wrap(
            text,
            columns,
            initial_indent=indent,
            subsequent_indent=" " * len(indent),
            break_on_hyphens=False,
            break_long_words=False,
        )
    for number, url in enumerate(row.upstream):
        yield f"  {'upstream' if number == 0 else '':<8} {url}"
    yield f"  {'page':<8} {DOCUMENTATION}reference/defects.html#{row.id}"


# ---- the report in a pipe or a file ----


def lines(report: DoctorReport) -> str:
    """Write one line for each defect, with everything there is to say about it."""
    shown = []
    for row in report.rows:
        guard = f"guard: {guards_as_code(row.guards)}" if row.live and row.guards else ""
        detail = row.summary if row.bare.status == "crash" else row.bare.detail
        parts = (one_line(row), detail, guard, _note(row), *row.upstream)
        shown.append("; ".join(filter(None, parts)))
    return "\n".join((*shown, "", *_summary(report), "", *_environment(report.environment), ""))


def one_line(row: DefectRow) -> str:
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


def _note(row: DefectRow) -> str:
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
