"""Run a program in a Python of its own: for what may crash, or has to start clean."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def run_python(
    program: str, *arguments: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``program``; modules in ``folder`` can be imported, and it is written there as a file."""
    source = textwrap.dedent(program)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONFAULTHANDLER": ""}
    start: tuple[str, ...] = ("-c", source)
    if folder is not None:
        # A program that spawns workers has to be a file.
        path = folder / "program.py"
        path.write_text(source)
        start = (str(path),)
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=240,
    )


def output_of(program: str, *arguments: str, folder: Path | None = None) -> str:
    """Return what ``program`` prints; it has to end well."""
    done = run_python(program, *arguments, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
