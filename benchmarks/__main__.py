"""The benchmarks: ``python -m benchmarks list | run | gpu | report``."""

from __future__ import annotations

import argparse
import datetime as dt
import os
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
python -m benchmarks gpu --minutes 9 --out DIR         every record that needs a GPU
python -m benchmarks report DIR                        what gpu found -> records, then pages
python -m benchmarks report                            records -> docs/benchmarks.md
python -m benchmarks report --check                    exit status 1 if the page is out of date
"""


def benchmarks() -> dict[str, Benchmark]:
    """Return them by name; torch is imported then, and not for ``gpu``, whose minutes count."""
    from benchmarks.catalog import BENCHMARKS  # noqa: PLC0415

    return BENCHMARKS


def listing() -> str:
    """Return each benchmark with what it answers."""
    widest = max(len(name) for name in benchmarks())
    return "\n".join(f"{name:{widest}}  {each.question}" for name, each in benchmarks().items())


def run(options: argparse.Namespace) -> int:
    """Run benchmarks, each on each device in a process of its own; 1 if one of them failed."""
    chosen = [benchmarks()[name] for name in options.names or benchmarks()]
    folder = options.json is not None and (len(chosen) > 1 or options.json.is_dir())
    failed = []
    for benchmark in chosen:
        devices = [options.device] if options.device else benchmark.devices_here()
        for device in devices:
            if device not in benchmark.devices:
                continue  # of the ones that were not asked for by name
            print(f"== {benchmark.name} on {device}: {benchmark.question}", flush=True)
            line = [f"benchmarks/{benchmark.file}.py", "--device", device]
            if options.quick:
                line.append("--quick")
            if options.json is not None:
                path = options.json / record_name(benchmark, device) if folder else options.json
                line += ["--json", os.path.relpath(path, ROOT)]  # where it runs
            begun = time.monotonic()
            done = subprocess.run([sys.executable, *line], cwd=ROOT, check=False)  # noqa: S603
            if done.returncode != 0:
                failed.append(f"{benchmark.name} on {device} ended with {done.returncode}")
            print(f"-- {time.monotonic() - begun:.0f} s", flush=True)
    for each in failed:
        print(f"FAILED: {each}", file=sys.stderr)
    return bool(failed)


def record_name(benchmark: Benchmark, device: str) -> str:
    """Return what a record of today is called: ``2026-11-21-resize-cpu.json``."""
    today = dt.datetime.now(dt.timezone.utc).date().isoformat()
    return f"{today}-{benchmark.name}-{device}.json"


def report(options: argparse.Namespace) -> int:
    """Write the page and the tables, or say what is out of date."""
    from benchmarks.report import main, take_in  # noqa: PLC0415  the plots need matplotlib

    if options.results is not None:
        for path in take_in(options.results, options.records):
            print(f"{path.name}: from {options.results}")
    return main(options.records, options.to, check=options.check)


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
    runs.add_argument("--device", choices=("cpu", "cuda"), help="one of them only")
    runs.add_argument("--quick", action="store_true", help="a moment each: do they run at all?")
    runs.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="the record's file; for several benchmarks a folder, where each gets its name",
    )

    reports = commands.add_parser("report", help="turn the records into docs/benchmarks.md")
    reports.add_argument(
        "results", nargs="?", type=Path, metavar="DIR", help="what gpu wrote: into records first"
    )
    reports.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    reports.add_argument("--records", type=Path, default=ROOT / "benchmarks" / "records")
    reports.add_argument("--to", type=Path, default=ROOT, help="the checkout whose pages to write")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["gpu"]:
        return gpu.main(given[1:], began=BEGAN if arguments is None else None)
    parser = _parser()
    options = parser.parse_args(given)
    if options.command == "list":
        print(listing())
        return 0
    if options.command == "report":
        return report(options)
    unknown = [name for name in options.names if name not in benchmarks()]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: there are {', '.join(benchmarks())}")
    several = len(options.names) != 1
    if options.json is not None and options.json.suffix == ".json" and several:
        parser.error(f"--json {options.json}: several benchmarks need a folder")
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
