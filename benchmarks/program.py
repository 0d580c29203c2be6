"""What every benchmark's program does: arguments in, results found and shown, a record out.

A file ``bench_*.py`` holds cases and says, as a :class:`Benchmark`, how they become results.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import context, gpu_facts
from benchmarks.stream import NO_GPU, NO_TRITON, Stream, text
from benchmarks.tables import Table

MOST_LOAD = 0.5
"""The load average up to which a machine counts as quiet."""

Results = Mapping[str, Any]
"""The parts of a record, by name: lists of results, or facts."""

Case = tuple[Mapping[str, Any], Callable[[], Mapping[str, Any]]]
"""What names a result, and what finds out the rest of it."""


@dataclass(frozen=True)
class Setting:
    """How a benchmark is to be run."""

    device: str
    quick: bool
    rounds: int
    options: argparse.Namespace
    """Every argument."""

    stream: Stream = field(default_factory=Stream)
    """Takes each result as soon as it is there, and says when time is up."""

    def kept(self, rows: Iterable[dict[str, Any]], part: str = "rows") -> list[dict[str, Any]]:
        """Return the results, each written to the stream and shown as soon as it is there."""
        found = []
        for row in rows:
            self.stream.keep(part, row)
            found.append(row)
            medians = {name: getattr(value, "median", value) for name, value in row.items()}
            print(", ".join(f"{name} {value}" for name, value in medians.items()))
        return found

    def collect(self, cases: Iterable[Case], part: str = "rows") -> list[dict[str, Any]]:
        """Return a result for each case.

        What an earlier run has found is left out, and the rest where time is up.
        """
        known = self.stream.known(part)
        new = (case for case in cases if not any(case[0].items() <= row.items() for row in known))
        timely = itertools.takewhile(lambda _: not self.stream.time_is_up(), new)
        rows = ({**names, "device": self.device, **find()} for names, find in timely)
        return self.kept(rows, part)


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
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Where the answer may differ; a benchmark of plain Python names the CPU alone."""

    needs_triton: bool = False
    """Whether inductor writes code for a GPU, where it is not quick."""

    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What it alone takes: arguments of ``add_argument`` by the option's name."""

    tables: tuple[Table, ...] = ()
    """How the page shows its records; empty: each list in a record as it is."""

    def devices_here(self) -> list[str]:
        """Return the devices of this machine that it can run on."""
        cuda = torch.cuda.is_available()
        return [device for device in self.devices if device != "cuda" or cuda]

    def parser(self) -> argparse.ArgumentParser:
        """Return what reads its arguments."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks run {self.name}", description=self.question
        )
        parser.add_argument("--device", choices=("cpu", "cuda"), help="this one only")
        parser.add_argument("--rounds", type=int, default=self.rounds, help="default: %(default)s")
        parser.add_argument("--quick", action="store_true", help="a moment: does it run at all?")
        to = "write the record there, or to a folder"
        parser.add_argument("--json", type=Path, metavar="PATH", help=to)
        to = "append each result there once it is found, and skip those that are there"
        parser.add_argument("--lines", type=Path, metavar="PATH", help=to)
        parser.add_argument("--seconds", type=float, help="stop then, with what there is")
        for name, arguments in self.options.items():
            parser.add_argument(name, **arguments)
        return parser

    def main(self, arguments: Sequence[str]) -> int:
        """Run on the devices there are, show the results, and write a record for each device."""
        parser = self.parser()
        options = parser.parse_args(arguments)
        devices = [options.device] if options.device else self.devices_here()
        if "cuda" in devices and not torch.cuda.is_available():
            parser.exit(NO_GPU, "--device cuda: torch.cuda.is_available() is False here\n")
        if "cuda" in devices and self.needs_triton and not options.quick and not _has_triton():
            parser.exit(NO_TRITON, f"{self.name} needs Triton: `import triton` fails here\n")
        # A rehearsal of what needs a GPU takes the same path on a CPU.
        if not devices or not {*devices} <= {"cpu", *self.devices}:
            parser.error(f"needs one of {', '.join(self.devices)}")
        if options.rounds < 1:
            parser.error(f"--rounds {options.rounds}: expected 1 or more")
        if options.json is not None and options.json.suffix == ".json" and len(devices) > 1:
            parser.error(f"--json {options.json}: {' and '.join(devices)} need a folder")
        torch.set_num_threads(1)  # the work is small, and threads would only add noise
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        for device in devices:
            self._run(device, options, list(arguments), parser)
        return 0

    def _run(
        self,
        device: str,
        options: argparse.Namespace,
        given: list[str],
        parser: argparse.ArgumentParser,
    ) -> None:
        for option in {"--lines", "--json"}.intersection(given):  # paths of this machine
            place = given.index(option)
            given = given[:place] + given[place + 2 :]
        head = {**context(self.name, given), "quick": options.quick}
        if options.json is not None and not options.quick:
            if str(head["revision"] or "-dirty").endswith("-dirty"):
                parser.error("--json: a record is of a commit; commit the changed files first")
            if (load := head["load_average_at_start"]) >= MOST_LOAD:
                print(f"load average {load}: not a quiet machine, do not commit the record")
        rounds = min(options.rounds, self.quick_rounds) if options.quick else options.rounds
        stream = Stream(options.lines, {**head, "device": device}, options.seconds)
        results = self.run(Setting(device, options.quick, rounds, options, stream))
        if device == "cuda":  # what it ran at, while it is still warm
            results = {**results, "gpu_at_end": gpu_facts()}
        stream.end(results)
        path = options.json
        if path is not None and path.suffix != ".json":
            path /= f"{head['date'][:10]}-{self.name}-{device}.json"
        if path is not None:
            write_record(path, {**head, **results})


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(record, indent=1) + "\n", encoding="utf-8")


def in_a_process(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """Call a function of a module in a fresh Python, whose compiler has an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": folder, **(environment or {})}
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, initializer=_set, initargs=(own,)) as process:
            return process.submit(function, *arguments).result()


def _set(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
