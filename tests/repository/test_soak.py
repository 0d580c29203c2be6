"""The soak: a short one finds nothing lost, and without the guards it finds something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchguard

SOAK = Path(__file__).parent.parent.parent / "benchmarks" / "soak.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(SOAK), *options]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.slow
def test_nothing_is_lost() -> None:
    done = run("--steps", "160", "--rounds", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost" in done.stdout
    assert "8 threads, 40 rounds each" in done.stdout
    # Every kind of failure had its turn.
    for name in ("resize_shared", "no_memory", "swapped_storage", "half_an_index_write", "hook"):
        assert f"{name} " in done.stdout


@pytest.mark.slow
def test_something_is_lost_without_the_guards() -> None:
    done = run("--steps", "60", "--without-guards")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG: inconsistent: " in done.stdout


def test_a_thread_that_leaves_a_guard_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SOAK.parent.parent)
    from benchmarks import soak  # noqa: PLC0415

    def forgets(seed: int, rounds: int, wrong: list[str]) -> None:
        del seed, rounds, wrong
        torchguard.install("resize", only_if_needed=False)

    monkeypatch.setattr(soak, "at_random", forgets)
    try:
        found = soak.storm(2, 1)
        assert found[0] == "still installed: ('resize',)"
        assert "torch.Tensor.resize_ is not what it was" in found
        assert found[-1] == "a resize is still guarded"
        torchguard.uninstall()
        monkeypatch.setattr(torch, "add", torch.sub)
        monkeypatch.setattr(soak, "at_random", lambda *_: monkeypatch.undo())
        assert soak.storm(2, 1) == ["torch.add is not what it was"]
    finally:
        torchguard.uninstall()
