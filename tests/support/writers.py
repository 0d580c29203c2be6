"""Processes that write a checkpoint and are killed while they do."""

from __future__ import annotations

import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

OLD = {"weight": torch.arange(300.0), "step": 1}


def same(state: Any, other: Any) -> bool:
    return state["step"] == other["step"] and torch.equal(state["weight"], other["weight"])


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def left(folder: Path) -> list[str]:
    """The temporary files in a folder."""
    return [name for name in names(folder) if "torchguard-" in name]


@contextmanager
def size_limited(size: int) -> Iterator[None]:
    """Writing beyond this size fails, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def start(run: Callable[..., object], *args: Any) -> int:
    """Run this in a forked process, return its number; it ends with 0 unless it returns False."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if run(*args) is not False else 1)
        except BaseException:  # noqa: BLE001  the parent's tests must not go on here
            traceback.print_exc()
        finally:
            os._exit(2)
    return child


def status(child: int) -> int:
    return os.waitpid(child, 0)[1]


def repeat(times: int, write: Callable[[int], object]) -> None:
    for turn in range(times):
        write(turn)


def kill_after(seconds: float, child: int) -> None:
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
