"""The commands of ``python -m torchguard``, and what they have in common."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial

DOCUMENTATION = "https://torchguard.github.io/torchguard/"


def _positive(text: str, *, kind: Callable[[str], float], expected: str) -> float:
    with contextlib.suppress(ValueError):
        number = kind(text)
        if number > 0:
            return number
    # Another error would be reported with the name of this function.
    raise argparse.ArgumentTypeError(f"{text!r} is no {expected}")


# Read an option that counts something, and one that is a time, for argparse.
positive_int = partial(_positive, kind=int, expected="whole number from 1 on")
positive_float = partial(_positive, kind=float, expected="number above 0")


def write(text: str) -> None:
    """Write to standard output, also where its reader has closed it: ``doctor | head``."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which would raise again:
        # https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interrupted(command: str) -> int:
    """Say that a command was interrupted and return its exit status, as a shell reports SIGINT."""
    sys.stderr.write(f"torchguard {command}: interrupted\n")
    return 130
