"""Runs a function of a benchmark in a process of its own: with an empty cache, or where it may die.

``in_a_process("bench_buckets", "run_row", "eager", ...)`` calls ``run_row("eager", ...)`` of that
file in a fresh Python and returns what it returned. Arguments and result travel as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT


def in_a_process(
    file: str, function: str, *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """Call ``function(*arguments)`` of a benchmark's file; RuntimeError with its output if it died.

    The compiler's cache is an empty folder that goes away afterwards.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        line = ["-W", "ignore", "-m", "benchmarks.processes", str(answer), file, function]
        done = subprocess.run(  # noqa: S603 - this very file
            [sys.executable, *line, json.dumps(arguments)],
            cwd=ROOT,
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
                **(environment or {}),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            output = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(
                f"{file}.{function}{arguments} ended with {done.returncode}:\n{output}"
            )
        return json.loads(answer.read_text(encoding="utf-8"))


def _answer(path: str, file: str, function: str, arguments: str) -> None:
    called = getattr(importlib.import_module(f"benchmarks.{file}"), function)
    Path(path).write_text(json.dumps(called(*json.loads(arguments))), encoding="utf-8")


if __name__ == "__main__":
    _answer(*sys.argv[1:])
