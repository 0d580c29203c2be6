"""``python -m torchguard demo``: each act loses on PyTorch and keeps with its guard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchguard.cli import DOCUMENTATION, demo

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [act.name for act in demo._ACTS]


@pytest.fixture(scope="module")
def shown() -> str:
    """What the whole demo prints."""
    line = [sys.executable, "-m", "torchguard", "demo"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_an_act_loses_on_bare_torch_and_keeps_with_its_guard(shown: str, number: int) -> None:
    act = shown.split("\n\n")[number].splitlines()
    assert act[0].startswith(f"{number + 1}. ")
    assert act[2].startswith("   LOST  PyTorch: ")
    assert act[3].startswith(f"   kept  {demo._ACTS[number].guard}: ")
    assert act[-1].endswith(f" {DOCUMENTATION}{demo._ACTS[number].page}")
    assert (ROOT / "docs" / demo._ACTS[number].page).with_suffix(".md").exists()


def test_it_counts_the_losses(shown: str) -> None:
    assert shown.splitlines()[-1].startswith("Lost: 5 of 5 in PyTorch, 0 with torchguard")


def test_an_act_that_dies_is_lost() -> None:
    process: Any = subprocess.Popen(
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    failed, text = demo._ended(process)
    assert failed
    assert text == "the process ended with -9"
