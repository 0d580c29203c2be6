"""``python -m torchguard``: what is common to its commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchguard
from support.child_process import run_command
from torchguard.__main__ import main
from torchguard.cli import DOCUMENTATION
from torchguard.defects.catalog import all_ids


def test_nothing_that_prints_a_text_imports_torch(tmp_path: Path) -> None:
    """As ``--version`` does: torch takes seconds to import, and here it would raise."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    script = tmp_path / "torchguard"  # what pip makes of [project.scripts]
    script.write_text("import sys\nfrom torchguard.__main__ import main\nsys.exit(main())\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_command([sys.executable, *arguments], cwd="/", env=environment)

    for start in (["-m", "torchguard"], [str(script)]):
        assert run(*start, "--version").stdout == f"torchguard {torchguard.__version__}\n"
    # Every run adds the options of every command; the ids of the doctor's are in its help.
    assert run("-m", "torchguard", "doctor", "--help").stdout.startswith("usage: ")


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
    for command in ("demo", "doctor", "run", "plan"):
        assert f"\n    {command} " in shown
    assert "python -m torchguard doctor resize-locked" in shown
    assert f"documentation: {DOCUMENTATION}" in shown
    assert not errors


def test_help_of_the_doctor_has_the_ids(capsys: pytest.CaptureFixture[str]) -> None:
    """They are read from the files of the probes: importing those takes seconds."""
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert ", ".join(all_ids()) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["docter"], "invalid choice: 'docter'; did you mean 'doctor'?"),
        (["qwertz"], "invalid choice: 'qwertz'; choose from demo, doctor, run, plan"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad usage ends with 2 and names the option."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is full")
@pytest.mark.parametrize(
    "command", ["doctor resize-locked --json", "plan {lengths}", "verify {lengths}"]
)
def test_output_that_cant_be_written(tmp_path: Path, command: str) -> None:
    """0 and 1 are answers, and a traceback is no way to say that the disk is full."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3 4 5")
    line = f"{sys.executable} -m torchguard {command.format(lengths=lengths)}"
    right = run_command(["sh", "-c", f"{line} > /dev/null"]).returncode
    for output, status in {
        "> /dev/full": 74,
        ">&-": 74,
        "> /dev/null 2> /dev/full": right,
        "> /dev/null 2>&-": right,
    }.items():
        done = run_command(["sh", "-c", f"{line} {output}"])
        assert (done.returncode, output) == (status, output)
        assert "Traceback" not in done.stderr
        assert status == right or "can't write to standard output" in done.stderr
    piped = run_command(["bash", "-c", f"set -o pipefail; {line} | head -c 1"])
    assert (piped.returncode, len(piped.stdout)) == (right, 1)


def test_a_command_that_fails_has_found_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise MemoryError("not enough")

    monkeypatch.setattr(torchguard, "verify_checkpoint", fails)
    assert main(["verify", "x"]) == 70
    assert "MemoryError: not enough" in capsys.readouterr().err
