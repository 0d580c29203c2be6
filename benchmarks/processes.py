"""Runs a function of a benchmark in a process of its own: with an empty cache, or where it may die.

``in_a_process("bench_buckets", "run_row", "eager", ...)`` calls ``run_row("eager", ...)`` of that
file in a fresh Python and returns what it returned. Arguments and result travel as JSON.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ROOT


def in_a_process(
    file: str,
    function: str,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    quick: bool = False,
) -> Any:
    """Call ``function(*arguments)`` of a benchmark's file; RuntimeError with its output if it died.

    The compiler's cache is an empty folder that goes away afterwards. ``quick`` lets a fork of this
    process do, which has imported torch: not for what is measured, and not beside CUDA.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        call = [str(answer), file, function, json.dumps(arguments)]
        own = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"), **(environment or {})}
        if quick and sys.platform == "linux" and not torch.cuda.is_available():
            fork = multiprocessing.get_context("fork").Process(target=_answer, args=(call, own))
            fork.start()
            fork.join()
            status, output = fork.exitcode, "see above"
        else:
            line = [sys.executable, "-W", "ignore", "-m", "benchmarks.processes", *call]
            environment = {**os.environ, **own}
            done = subprocess.run(  # noqa: S603 - this very file
                line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
            )
            status, output = done.returncode, (done.stdout + done.stderr)[-2000:]
        if status != 0:
            raise RuntimeError(f"{file}.{function}{arguments} ended with {status}:\n{output}")
        return json.loads(answer.read_text(encoding="utf-8"))


def _answer(call: Sequence[str], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    path, file, function, arguments = call
    called = getattr(importlib.import_module(f"benchmarks.{file}"), function)
    Path(path).write_text(json.dumps(called(*json.loads(arguments))), encoding="utf-8")


if __name__ == "__main__":
    _answer(sys.argv[1:], {})
