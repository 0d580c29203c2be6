"""``python -m torchguard doctor``: options in, table or JSON out, exit status."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from typing import TYPE_CHECKING

from torchguard.cli.output import interrupted, positive_float, positive_int, write
from torchguard.cli.progress import shown_on
from torchguard.cli.table import text
from torchguard.defects.doctor import doctor
from torchguard.defects.examination import select
from torchguard.defects.registry import FAMILIES, catalog

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import TextIO

    from torchguard.defects.examination import Step

__all__ = ["add_parser"]


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
            select(catalog(), options.only, options.family)
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
        shown = report.to_json() + "\n"
    else:
        width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
        shown = text(report, width=width, color=_colors(sys.stdout, options))
    write(shown)
    return report.exit_status


def _progress(
    options: argparse.Namespace,
) -> contextlib.AbstractContextManager[Callable[[Step], None] | None]:
    if options.json and not sys.stderr.isatty():
        return contextlib.nullcontext()  # a program is reading: it wants the document only
    return shown_on(sys.stderr, color=_colors(sys.stderr, options))


def _colors(stream: TextIO, options: argparse.Namespace) -> bool:
    # https://no-color.org: any value but the empty one.
    unwanted = options.no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not unwanted and stream.isatty()
