"""Calls a function of a benchmark in a process of its own, with an empty cache of the compiler."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_a_process(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Any:
    """Call a function of a module in a fresh Python; a process that dies raises."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCHINDUCTOR_CACHE_DIR": folder, **(environment or {})}
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, initializer=_set, initargs=(own,)) as process:
            return process.submit(function, *arguments).result()


def _set(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
