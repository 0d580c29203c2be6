"""Processes that tests start."""

from __future__ import annotations

import time
from pathlib import Path


def wait_until_gone(pid: int) -> bool:
    """Wait until a process has ended; one that no parent waits for stays as a zombie."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state.split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False
