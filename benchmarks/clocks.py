"""What only a GPU has: the time between two CUDA events, its clocks, its driver, its memory."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

_QUERY = (
    "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw",
    "persistence_mode", "utilization.gpu",
)  # fmt: skip


def on_both_clocks(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds the host took for a call, and those between the events around it.

    The GPU has nothing left to do when the first event is recorded, so the events' time is the
    host's where the host is slower, and the GPU's where the GPU is. The host does not wait.
    """
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begun.record()
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    ended.record()
    torch.cuda.synchronize()
    return host, float(begun.elapsed_time(ended)) / 1e3


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most that a call has allocated at one time, over what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def gpu_facts() -> dict[str, str]:
    """Ask the driver for its version and the clocks; empty where there is no ``nvidia-smi``."""
    line = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=20)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(_QUERY, values, strict=False))
