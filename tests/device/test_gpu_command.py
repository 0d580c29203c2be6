"""The command that makes every record on a GPU, from beginning to end."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import fake_device as fake
import pytest
from benchmarks.gpu import PIECES

from support.child_process import run_command
from support.slow import slow_except

LINE = [sys.executable, "-m", "benchmarks", "gpu", "--minutes", "6"]


@pytest.mark.parametrize(
    "name", slow_except([piece.name for piece in PIECES], "transaction", "resize", "assign")
)
def test_each_piece_of_the_command_finishes(name: str, tmp_path: Path) -> None:
    """Of tiny sizes and without inductor, which needs Triton."""
    line = [*LINE, "--rehearse", "cuda", "--only", name, "--out", str(tmp_path)]
    done = run_command(line, cwd=fake.HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert f" {name}: finished" in done.stdout, log


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is here")
def test_a_piece_that_needs_triton_says_so(tmp_path: Path) -> None:
    done = run_command(
        [*LINE, "--only", "verified", "--out", str(tmp_path)], cwd=fake.HERE.parents[1]
    )
    assert " b verified: needs Triton after " in done.stdout, done.stdout + done.stderr
    assert "verified needs Triton: `import triton` fails here" in (tmp_path / "log.txt").read_text()
