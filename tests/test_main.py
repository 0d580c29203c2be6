"""``python -m torchguard``: what is common to its commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torchguard
from torchguard.__main__ import main


def test_runs_as_a_module_and_says_its_version() -> None:
    line = [sys.executable, "-m", "torchguard", "--version"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == f"torchguard {torchguard.__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "doctor" in shown
    assert "run" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["docter"], "invalid choice: 'docter'"),
        (["--colour"], "required: command"),
    ],
)
def test_bad_usage_ends_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
