"""What every benchmark's program does: arguments in, results measured and shown, a record out.

A file ``bench_*.py`` holds cases and says, as a :class:`Benchmark`, how they become results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.clocks import gpu_facts
from benchmarks.machine import NOT_ON_A_GPU, context
from benchmarks.stream import NO_GPU, Stream, text
from benchmarks.tables import Table

__all__ = ["Benchmark", "Results", "Setting", "write_record"]

Results = Mapping[str, Any]
"""The parts of a record, by name: lists of results, which add up over the devices, or facts."""


@dataclass(frozen=True)
class Setting:
    """How a benchmark is to be run."""

    device: str
    quick: bool
    rounds: int
    options: argparse.Namespace
    """Every argument, those that this benchmark alone knows included."""

    stream: Stream = field(default_factory=Stream)
    """Takes each result as soon as it is there, and says when time is up."""

    def block_seconds(self, usual: float) -> float:
        """Return how long a block of calls shall take: as usual, or a moment."""
        return 2e-4 if self.quick else usual


def _no_options(_: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class Benchmark:
    """A question, and what answers it with numbers."""

    name: str
    """``resize`` is the benchmark in ``bench_resize.py``."""

    question: str
    run: Callable[[Setting], Results]
    """Measures on one device."""

    rounds: int = 51
    quick_rounds: int = 3
    rounds_of: str = "rounds per row"
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Where the answer may differ; a benchmark of plain Python names the CPU alone."""

    rehearsed_on: tuple[str, ...] = ()
    """Where it can be run, though no record is made: the path taken is what is looked at."""

    threads: int | None = 1
    """The work of most is small, and threads would only add noise; None: as many as there are."""

    add_options: Callable[[argparse.ArgumentParser], None] = _no_options
    check_options: Callable[[argparse.Namespace], str | None] = lambda _: None
    """Returns what is wrong with the arguments."""

    afterwards: Callable[[dict[str, Any]], Iterator[str]] = lambda _: iter(())
    """Says, line by line, what the whole record shows; it may add to the record."""

    tables: tuple[Table, ...] = ()
    """How the page shows its records; empty: each list in a record as it is."""

    @property
    def file(self) -> str:
        """The file's name without its ending."""
        return f"bench_{self.name}"

    def devices_here(self) -> list[str]:
        """Return the devices of this machine that it can run on."""
        cuda = torch.cuda.is_available()
        return [device for device in self.devices if device != "cuda" or cuda]

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run on the devices there are, show the results, and write the record."""
        parser = _parser(self)
        options = parser.parse_args(arguments)
        _check(self, parser, options)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        given = sys.argv[1:] if arguments is None else list(arguments)
        if options.lines is not None:  # a path of this machine, and no part of what was measured
            place = given.index("--lines")
            given = given[:place] + given[place + 2 :]
        head = {**context(self.file, given), "quick": options.quick}
        devices = [options.device] if options.device else self.devices_here()
        rounds = self.quick_rounds if options.quick else options.rounds
        parts: dict[str, Any] = {}
        for device in devices:
            stream = Stream(options.lines, {**head, "device": device}, options.seconds)
            results = self.run(Setting(device, options.quick, rounds, options, stream))
            if device == "cuda":  # what it ran at, while it is still warm
                results = {**results, "gpu_at_end": gpu_facts()}
            stream.end(results)
            for name, found in results.items():
                parts[name] = [*parts.get(name, []), *found] if isinstance(found, list) else found
        record = dict(head)
        if "cuda" in self.devices and "cuda" not in devices:
            record["note"] = NOT_ON_A_GPU
        record = json.loads(text({**record, **parts}))
        for line in self.afterwards(record):
            print(line)
        if "note" in record:
            print(record["note"])
        if options.json is not None:
            write_record(options.json, record)
        return 0


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(record, indent=1) + "\n", encoding="utf-8")


def _parser(benchmark: Benchmark) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/{benchmark.file}.py", description=benchmark.question
    )
    parser.add_argument(
        "--device", choices=(*benchmark.devices, *benchmark.rehearsed_on), help="one of them only"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=benchmark.rounds,
        help=f"{benchmark.rounds_of} (default: {benchmark.rounds})",
    )
    parser.add_argument("--quick", action="store_true", help="a moment: does it run at all?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the record there")
    parser.add_argument(
        "--lines",
        type=Path,
        metavar="PATH",
        help="append each result there as soon as it is found, and skip those that are there",
    )
    parser.add_argument("--seconds", type=float, help="stop then, with what there is")
    benchmark.add_options(parser)
    return parser


def _check(
    benchmark: Benchmark, parser: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.exit(NO_GPU, "--device cuda: torch.cuda.is_available() is False here\n")
    if not options.device and not benchmark.devices_here():
        parser.error(f"needs one of {', '.join(benchmark.devices)}, and there is none here")
    if options.seconds is not None and options.seconds <= 0:
        parser.error(f"--seconds {options.seconds:g}: expected more than 0")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    wrong = benchmark.check_options(options)
    if wrong is not None:
        parser.error(wrong)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
