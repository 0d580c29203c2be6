"""The commands of ``python -m torchguard``, and what they have in common."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

DOCUMENTATION = "https://torchguard.github.io/torchguard/"


def positive_int(text: str) -> int:
    """Read an option that counts something, for argparse."""
    with contextlib.suppress(ValueError):
        if (number := int(text)) > 0:
            return number
    # Another error would be reported with the name of this function.
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")


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
