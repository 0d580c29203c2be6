"""Which files of torchguard a call enters: exact counts, no times.

    python benchmarks/bench_walk.py --json benchmarks/records/<date>-walk-cpu.json
    PYTHONPATH=OTHER/src python benchmarks/bench_walk.py --list

What a reader who follows the call would see: the files entered, the functions, and how often the
next function entered lies in another file than the one before. Functions of torch and of Python,
and comprehensions, are not counted; nor is a generator that goes on. What is counted is the first
call of a new function after one like it, so that no import is part of it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

if __package__ in {None, ""}:  # run as a file: the folder on the path is this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.program import Benchmark, Results, Setting

TARGETS = {
    "bucketed, first call": (12, 70),
    "bucketed, warm call": (4, None),
    "verified, first call": (9, 35),
}
"""The most files, and the most changes of file."""

_INNER = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>"}


class Walk(NamedTuple):
    """What one call entered."""

    entered: list[str]
    """``file.py:function`` of every call, in order; the file as seen from the package."""
    functions: int

    @property
    def files(self) -> list[str]:
        """Each file once, in the order in which they were entered."""
        return list(dict.fromkeys(each.partition(":")[0] for each in self.entered))

    @property
    def changes(self) -> int:
        """How often a function of another file than the last one was entered."""
        files = [each.partition(":")[0] for each in self.entered]
        return sum(one != other for one, other in itertools.pairwise(files))


def walked(call: Callable[[], object], package: Path) -> Walk:
    """Make a call and note the functions of a package that it enters."""
    entered: list[str] = []
    codes: set[CodeType] = set()
    generators: dict[int, FrameType] = {}  # held, so that no other frame gets the address
    prefix = f"{package}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(prefix) or code.co_name in _INNER:
            return
        if code.co_flags & inspect.CO_GENERATOR:
            if id(frame) in generators:
                return
            generators[id(frame)] = frame
        codes.add(code)
        entered.append(f"{code.co_filename.removeprefix(prefix)}:{code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(entered, len(codes))


def walks() -> dict[str, Walk]:
    """Walk the first and a warm call of bucketed(), and the first of verified()."""
    torchguard: Any = importlib.import_module("torchguard")
    package = Path(torchguard.__file__).parent
    x = torch.ones(3)

    def bucketed() -> Callable[[torch.Tensor], torch.Tensor]:
        made: Callable[[torch.Tensor], torch.Tensor] = torchguard.bucketed(
            lambda x: 2 * x, dims={"x": {0: "t"}}, buckets=[4, 8]
        )
        return made

    def verified() -> Callable[[torch.Tensor], torch.Tensor]:
        torch.compiler.reset()
        made: Callable[[torch.Tensor], torch.Tensor] = torchguard.verified(
            lambda x: 2 * x, backend="eager"
        )
        return made

    found = {}
    for name, make in (("bucketed", bucketed), ("verified", verified)):
        make()(x)  # the imports
        function = make()
        found[f"{name}, first call"] = walked(lambda: function(x), package)  # noqa: B023
        if name == "bucketed":
            found[f"{name}, warm call"] = walked(lambda: function(x), package)  # noqa: B023
    torch.compiler.reset()
    return found


@dataclass(frozen=True)
class Walked:
    """What one call entered, in numbers."""

    what: str
    device: str
    files: int
    functions: int
    changes: int
    target: str
    verdict: str


def run(setting: Setting) -> Results:
    """Count what each call enters; with ``--list`` print every function, in order."""
    rows = []
    for name, walk in walks().items():
        print(
            f"{name}: {len(walk.files)} files, {walk.functions} functions, {walk.changes} changes "
            f"of file ({', '.join(walk.files)})"
        )
        if setting.options.list:
            print(*(f"    {each}" for each in walk.entered), sep="\n")
        files, changes = TARGETS[name]
        target = f"at most {files} files"
        if changes is not None:
            target += f" and {changes} changes of file"
        is_reached = len(walk.files) <= files and walk.changes <= (changes or walk.changes)
        verdict = "reached" if is_reached else "missed"
        rows.append(
            Walked(name, "cpu", len(walk.files), walk.functions, walk.changes, target, verdict)
        )
    return {"rows": rows}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="every function, in order")


BENCHMARK = Benchmark(
    "walk",
    "How many files of torchguard does a reader open who follows a call?",
    run,
    rounds=1,
    quick_rounds=1,
    rounds_of="calls",
    devices=("cpu",),
    add_options=_add_options,
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
