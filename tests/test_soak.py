"""The soak: a short one finds nothing lost, and without the guards it finds something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent / "benchmarks" / "soak.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(SOAK), *options]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.slow
def test_nothing_is_lost() -> None:
    done = run("--steps", "160", "--rounds", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost" in done.stdout
    # Every kind of failure had its turn.
    for name in ("resize_shared", "no_memory", "swapped_storage", "half_an_index_write", "hook"):
        assert f"{name} " in done.stdout


@pytest.mark.slow
def test_something_is_lost_without_the_guards() -> None:
    done = run("--steps", "60", "--without-guards")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: inconsistent: " in done.stdout
