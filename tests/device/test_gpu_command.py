"""The command that makes every record on a GPU, each of its pieces from beginning to end."""

from __future__ import annotations

import sys
from pathlib import Path

import fake_device as fake
import pytest
from benchmarks.gpu import PIECES

from support.child_process import run_command

NAMES = [piece.name for piece in PIECES if piece.name in {"transaction", "resize", "assign"}]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_piece_of_the_command_finishes(name: str, tmp_path: Path) -> None:
    """Of tiny sizes and without inductor, which needs Triton."""
    line = [sys.executable, "-m", "benchmarks", "gpu", "--rehearse", "cuda", "--minutes", "6"]
    done = run_command([*line, "--only", name, "--out", str(tmp_path)], cwd=fake.HERE.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" {name}: finished" in done.stdout, done.stdout
