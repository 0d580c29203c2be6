"""What the commands of ``python -m torchguard`` have in common."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from torchguard.version import __version__

__all__ = ["interrupted", "positive_float", "positive_int", "show_version_alone", "write"]


def show_version_alone() -> None:
    """Print the version and exit if this process was started for that and nothing else.

    While Python looks for the program of ``-m``, ``sys.argv[0]`` is ``"-m"``; any other program
    that is told ``--version`` and imports torchguard is left alone.
    """
    as_module = sys.argv[:1] == ["-m"] and sys.orig_argv[-3:] == ["-m", "torchguard", "--version"]
    as_script = Path(*sys.argv[:1]).stem == "torchguard" and sys.argv[1:] == ["--version"]
    if as_module or as_script:
        write(f"torchguard {__version__}\n")
        sys.exit()


def positive_int(text: str) -> int:
    """Read an option that counts something, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        # Another error would be reported with the name of this function.
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return number


def positive_float(text: str) -> float:
    """Read an option that is a time, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def write(text: str) -> None:
    """Write to standard output, also where nobody reads on: ``doctor | head``."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interrupted(command: str) -> int:
    """Say that a command was interrupted and return its exit status, as a shell reports SIGINT."""
    sys.stderr.write(f"torchguard {command}: interrupted\n")
    return 130
