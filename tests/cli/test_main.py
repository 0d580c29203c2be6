"""``python -m torchguard``: what is common to its commands, and demo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torchguard
from torchguard.__main__ import main
from torchguard.cli import DOCUMENTATION, demo
from torchguard.defects.catalog import built_in_ids


def test_nothing_that_prints_a_text_imports_torch(tmp_path: Path) -> None:
    """As ``--version`` does: torch takes seconds to import, and here it would raise."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    script = tmp_path / "torchguard"  # what pip makes of [project.scripts]
    script.write_text("import sys\nfrom torchguard.__main__ import main\nsys.exit(main())\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, *arguments]
        return subprocess.run(
            line, capture_output=True, text=True, check=False, cwd="/", env=environment
        )

    for start in (["-m", "torchguard"], [str(script)]):
        assert run(*start, "--version").stdout == f"torchguard {torchguard.__version__}\n"
    # Every run adds the options of every command; the ids of the doctor's are in its help.
    assert run("-m", "torchguard", "doctor", "--help").stdout.startswith("usage: ")
    # The test can fail.
    assert "torch was imported" in run("-m", "torchguard", "run", "x.py").stderr


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """--help, and no command at all, lists the commands."""
    try:
        status: object = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    shown, errors = capsys.readouterr()
    assert shown.startswith("usage: python -m torchguard")
    for command in ("demo", "doctor", "run", "plan", "fuzz"):
        assert f"\n    {command} " in shown
    assert "python -m torchguard doctor --only resize-locked" in shown
    assert f"documentation: {DOCUMENTATION}" in shown
    assert not errors


def test_help_of_the_doctor_has_the_ids(capsys: pytest.CaptureFixture[str]) -> None:
    """They are read from the files of the probes: importing those takes seconds."""
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert ", ".join(built_in_ids()) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["docter"], "invalid choice: 'docter'; did you mean 'doctor'?"),
        (["qwertz"], "invalid choice: 'qwertz'; choose from demo, doctor, run, plan, fuzz"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad usage ends with 2 and names the option."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# --- demo


ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = [act.name for act in demo._ACTS]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the whole demo prints, and its picture."""
    picture = tmp_path_factory.mktemp("demo") / "losses.png"
    line = [sys.executable, "-m", "torchguard", "demo", "--picture", str(picture)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout, picture


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_an_act_loses_on_bare_torch_and_keeps_with_its_guard(
    shown: tuple[str, Path], number: int
) -> None:
    act = shown[0].split("\n\n")[number].splitlines()
    assert act[0].startswith(f"{number + 1}. ")
    assert act[2].startswith("   LOST  bare torch: ")
    assert act[3].startswith(f"   kept  {demo._ACTS[number].guard}: ")
    assert act[-1].endswith(f"/docs/{demo._ACTS[number].page}")
    assert (ROOT / "docs" / demo._ACTS[number].page).exists()


def test_it_says_what_was_lost_and_draws_the_losses(shown: tuple[str, Path]) -> None:
    text, picture = shown
    assert text.splitlines()[-1].startswith("Lost: 5 of 5 on bare torch, ")
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
    process: Any = subprocess.Popen(
        [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    failed, text, _ = demo._ended(process)
    assert failed
    assert text == "the process ended with -9"
