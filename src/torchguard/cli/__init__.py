"""The commands of ``python -m torchguard``, and what they have in common."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from torchguard._public import DOCUMENTATION as DOCUMENTATION

_FAILED, _CANT_WRITE = 70, 74  # EX_SOFTWARE and EX_IOERR of sysexits.h


def positive_int(text: str) -> int:
    """Read an option that counts something, for argparse."""
    with contextlib.suppress(ValueError):
        if (number := int(text)) > 0:
            return number
    # Another error would be reported with the name of this function.
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")


def status_of(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command and return its status, which is neither 0 nor 1 if it could not do its work."""
    if sys.stderr is None:  # closed by the shell: doctor 2>&-
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - stays open
    if sys.stdout is None:
        return _cant_write("it is closed")
    try:
        return command(options)
    except Exception:  # noqa: BLE001 - any
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return _FAILED


def write(text: str) -> None:
    """Write to standard output, also where its reader has closed it: ``doctor | head``.

    Raises:
        SystemExit: it can't be written to, as on a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    except (OSError, ValueError) as error:  # ValueError: a file object that is closed
        _discard_output()
        raise SystemExit(_cant_write(error)) from None


def _cant_write(why: object) -> int:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"torchguard: can't write to standard output: {why}\n")
    return _CANT_WRITE


def _discard_output() -> None:
    """Let Python, which flushes standard output once more at exit, succeed.

    https://docs.python.org/3/library/signal.html#note-on-sigpipe
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interrupted(command: str) -> int:
    """Say that a command was interrupted and return its exit status, as a shell reports SIGINT."""
    sys.stderr.write(f"torchguard {command}: interrupted\n")
    return 130
