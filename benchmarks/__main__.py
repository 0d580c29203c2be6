"""The benchmarks: ``python -m benchmarks list | run | gpu | report``."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import gpu
from benchmarks.gpu import ROOT

if TYPE_CHECKING:
    from benchmarks.program import Benchmark

BEGAN = time.monotonic()

EXAMPLES = """\
python -m benchmarks list
python -m benchmarks run --quick                       does every one of them run?
python -m benchmarks run resize end_to_end --json benchmarks/records
python -m benchmarks run transaction --help            what one of them takes
python -m benchmarks gpu --minutes 9 --out DIR         every record that needs a GPU
python -m benchmarks report DIR                        what gpu found -> records, then pages
python -m benchmarks report                            records -> docs/project/benchmarks.md
"""


def benchmarks() -> dict[str, Benchmark]:
    """Return them by name; torch is imported then, and not for ``gpu``, whose minutes count."""
    from benchmarks.catalog import BENCHMARKS  # noqa: PLC0415

    return BENCHMARKS


def listing() -> str:
    """Return each benchmark with what it answers."""
    widest = max(len(name) for name in benchmarks())
    return "\n".join(f"{name:{widest}}  {each.question}" for name, each in benchmarks().items())


def run(names: Sequence[str], options: Sequence[str]) -> int:
    """Run a benchmark here, or several in processes of their own; 1 if one of those failed."""
    if len(names) == 1:
        return benchmarks()[names[0]].main(options)
    failed = False
    for name in names or benchmarks():
        benchmark = benchmarks()[name]
        device = benchmark.parser().parse_args(options).device
        if not ({device} & {*benchmark.devices} if device else benchmark.devices_here()):
            continue
        print(f"== {name}: {benchmark.question}", flush=True)
        line = [sys.executable, "-m", "benchmarks", "run", name, *options]
        status = subprocess.run(line, check=False).returncode  # noqa: S603
        if status != 0:
            failed = True
            print(f"FAILED: {name} ended with {status}", file=sys.stderr)
    return failed


def report(options: argparse.Namespace) -> int:
    """Write the page and the tables, or say what is out of date."""
    from benchmarks.report import main, take_in  # noqa: PLC0415

    if options.results is not None:
        for path in take_in(options.results, options.records):
            print(f"{path.name}: from {options.results}")
    return main(options.records, check=options.check)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name each benchmark and what it answers")
    commands.add_parser("gpu", help="make every record that needs a GPU, in minutes")
    runs = commands.add_parser("run", help="run them, all or those that are named")
    runs.add_argument("names", nargs="*", metavar="NAME", help=", ".join(benchmarks()))
    runs.add_argument("options", nargs="*", metavar="--option", help="see run NAME --help")
    reports = commands.add_parser("report", help="turn the records into docs/project/benchmarks.md")
    reports.add_argument(
        "results", nargs="?", type=Path, metavar="DIR", help="what gpu wrote: into records first"
    )
    reports.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    reports.add_argument("--records", type=Path, default=ROOT / "benchmarks" / "records")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["gpu"]:
        return gpu.main(given[1:], began=BEGAN if arguments is None else None)
    if given[:1] == ["run"] and given[1:] not in (["-h"], ["--help"]):
        names = list(itertools.takewhile(lambda each: not each.startswith("-"), given[1:]))
        options = given[1 + len(names) :]
        if unknown := [name for name in names if name not in benchmarks()]:
            _parser().error(f"no benchmark {unknown[0]!r}: there are {', '.join(benchmarks())}")
        if len(names) != 1 and any(each.endswith(".json") for each in options):
            _parser().error(f"{' '.join(options)}: several benchmarks need a folder")
        return run(names, options)
    parsed = _parser().parse_args(given)
    if parsed.command == "list":
        print(listing())
        return 0
    return report(parsed)


if __name__ == "__main__":
    sys.exit(main())
