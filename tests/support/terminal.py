"""Terminals for programs that draw on them."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(*arguments: str) -> str:
    """Run ``python -m torchguard`` on a pseudo-terminal and return what that has shown."""
    import pty  # noqa: PLC0415 - POSIX only

    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "torchguard", *arguments]
    environment = {**os.environ, "NO_COLOR": "", "TERM": "xterm-256color"}
    with subprocess.Popen(line, stdout=theirs, stderr=subprocess.DEVNULL, env=environment):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says EIO when the other side has closed
            while part := os.read(ours, 65536):
                shown += part
    os.close(ours)
    return shown.decode()
