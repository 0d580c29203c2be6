"""The commands at a terminal of 80 columns: no line is longer, and nothing is lost in a pipe."""

from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path

import pytest

from support.child_process import run_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="a pseudoterminal of POSIX"),
]

FAILS = """
import sys
import numpy as np, torch
t = torch.from_numpy(np.zeros(4))
for _ in range(3):
    try:
        t.resize_(5, 5)
    except RuntimeError:
        pass
sys.exit(3)
"""


def at_a_terminal(*arguments: str, folder: Path, columns: int = 80) -> tuple[list[str], int]:
    """Run a command at a terminal; return the lines as they are seen, and its status."""
    import fcntl  # noqa: PLC0415 - not on every system
    import pty  # noqa: PLC0415 - likewise
    import termios  # noqa: PLC0415 - likewise

    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        line = [sys.executable, "-m", "torchguard", *arguments]
        os.execve(sys.executable, line, ENVIRONMENT)  # noqa: S606 - the point
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    shown = b""
    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:  # its other end is closed
            break
        if not read:
            break
        shown += read
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = re.sub(
        r"\r\x1b\[K[^\r\n]*(?=\r\x1b)", "", shown.decode()
    )  # what a bar wrote over itself
    return re.sub(r"\x1b\[[0-9;]*[mK]", "", text).replace("\r", "").splitlines(), status


ENVIRONMENT = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
ENVIRONMENT.pop("COLUMNS", None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A program, lengths, and a checkpoint that is cut off."""
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "nothing.py").write_text("print(1)")
    lengths = " ".join(str(5 + 37 * n % 499) for n in range(600))
    (tmp_path / "lengths.txt").write_text(lengths)
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("plan", "lengths.txt", "--buckets", "24", "--tokens", "4096"), 0),
        (("verify", "model.pt"), 1),
        (("run", "fails.py"), 3),
        (("run", "nothing.py"), 0),
        (("doctor", "resize-locked"), 0),
    ],
    ids=["plan", "verify", "run with an event", "run without one", "doctor"],
)
def test_a_line_fits(arguments: tuple[str, ...], status: int, folder: Path) -> None:
    lines, ended = at_a_terminal(*arguments, folder=folder)
    assert ended == status
    assert lines
    # An address or a path is in one piece, whatever its length.
    named = ("https://", str(folder))
    assert [line for line in lines if len(line) > 80 and not any(n in line for n in named)] == []


def test_what_is_folded_is_one_line_in_a_pipe(folder: Path) -> None:
    done = run_command(
        [sys.executable, "-m", "torchguard", "verify", "model.pt"], cwd=folder, env=ENVIRONMENT
    )
    at_terminal, _ = at_a_terminal("verify", "model.pt", folder=folder)
    assert len(done.stdout.splitlines()) < len(at_terminal)
    assert done.stdout.split() == " ".join(at_terminal).split()


def test_the_report_of_run_names_guards_events_and_what_to_do(folder: Path) -> None:
    line = [sys.executable, "-m", "torchguard", "run", "--guards", "resize,out", "fails.py"]
    done = run_command(line, cwd=folder, env=ENVIRONMENT)
    assert done.returncode == 3
    report = done.stderr.partition("torchguard: 3 events")[2].splitlines()
    assert report == [
        " in this run; guarded: resize, out",
        "  3 x rolled_back at fails.py:7",
        "      resize: resize_ failed",
        "      what to do: nothing is left half-done: catch the error and go on, or fix its cause",
        "  more: https://torchguard.github.io/torchguard/reference/events.html",
    ]


def test_run_says_at_a_terminal_alone_that_nothing_happened(folder: Path) -> None:
    lines, _ = at_a_terminal("run", "nothing.py", folder=folder)
    assert lines == ["1", "torchguard: nothing happened in this run; guarded: resize"]
    line = [sys.executable, "-m", "torchguard", "run", "nothing.py"]
    assert run_command(line, cwd=folder, env=ENVIRONMENT).stderr == ""
