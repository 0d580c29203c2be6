"""``python -m torchguard demo``: each act loses on PyTorch and keeps with its guard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.child_process import run_command, started
from torchguard.cli import DOCUMENTATION, demo

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [act.name for act in demo._ACTS]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the whole demo prints, and its picture."""
    picture = tmp_path_factory.mktemp("demo") / "losses.png"
    line = [sys.executable, "-m", "torchguard", "demo", "--picture", str(picture)]
    done = run_command(line)
    assert not done.stderr
    return done.stdout, picture


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_an_act_loses_on_bare_torch_and_keeps_with_its_guard(
    shown: tuple[str, Path], number: int
) -> None:
    act = shown[0].split("\n\n")[number].splitlines()
    assert act[0].startswith(f"{number + 1}. ")
    assert act[2].startswith("   LOST  PyTorch: ")
    assert act[3].startswith(f"   kept  {demo._ACTS[number].guard}: ")
    assert act[-1].endswith(f" {DOCUMENTATION}{demo._ACTS[number].page}")
    assert (ROOT / "docs" / demo._ACTS[number].page).with_suffix(".md").exists()


def test_it_says_what_was_lost_and_draws_the_losses(shown: tuple[str, Path]) -> None:
    text, picture = shown
    assert text.splitlines()[-2] == "Lost: 6 of 6 in PyTorch, 0 with torchguard"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"the losses: {picture}" in text


@pytest.mark.parametrize("name", ["no/losses.png", "losses.unknown"])
def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path, name: str) -> None:
    curves = {"bare": [1.0, 2.0], "guarded": [1.0, 2.0]}
    assert "the losses are not drawn: " in demo._drawn(curves, str(tmp_path / name))


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install matplotlib" in demo._drawn({}, str(tmp_path / "losses.png"))


def test_an_act_that_dies_is_lost() -> None:
    line = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    with started(line) as process:
        failed, text, _ = demo._ended(process)
    assert failed
    assert text == "the process ended with -9"
