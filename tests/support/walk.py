"""Which files of torchguard a call enters, for whoever follows it: exact counts, no times.

    python tests/support/walk.py        every function that three calls enter, in order

Functions of torch and of Python, and comprehensions, are not counted; nor is a generator that goes
on. What is counted is the first call of a new function after one like it, so that no import is part
of it.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

import torchguard

PACKAGE = Path(torchguard.__file__).parent
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


def walked(call: Callable[[], object]) -> Walk:
    """Make a call and note the functions of torchguard that it enters."""
    entered: list[str] = []
    codes: set[CodeType] = set()
    generators: dict[int, FrameType] = {}  # held, so that no other frame gets the address
    prefix = f"{PACKAGE}/"

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


def bucketed() -> Callable[[], torch.Tensor]:
    """Return a first call of ``bucketed``."""
    x = torch.ones(3)
    double = torchguard.bucketed(lambda x: 2 * x, dims={"x": {0: "t"}}, buckets=[4, 8])
    return lambda: double(x)


def verified() -> Callable[[], torch.Tensor]:
    """Return a first call of ``verified``."""
    torch.compiler.reset()
    x = torch.ones(3)
    double = torchguard.verified(lambda x: 2 * x, backend="eager")
    return lambda: double(x)


def walks() -> dict[str, Walk]:
    """Walk the first and a warm call of ``bucketed``, and the first of ``verified``."""
    found = {}
    for make in (bucketed, verified):
        make()()  # the imports
        call = make()
        found[f"{make.__name__}, first call"] = walked(call)
        if make is bucketed:
            found["bucketed, warm call"] = walked(call)
    torch.compiler.reset()
    return found


if __name__ == "__main__":
    for name, walk in walks().items():
        counts = f"{len(walk.files)} files, {walk.functions} functions, {walk.changes} changes"
        sys.stdout.write("\n    ".join([f"{name}: {counts} of file", *walk.entered]) + "\n")
