"""The head of every record: when, with what and on what machine it was made."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent

_QUERY = (
    "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw",
    "persistence_mode", "utilization.gpu",
)  # fmt: skip


def context(benchmark: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Describe the run of a benchmark that was given these arguments."""
    gpu = gpu_facts() if torch.cuda.is_available() else {}
    return {
        "benchmark": f"bench_{benchmark}",
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", "run", benchmark, *arguments]),
        "revision": _revision(),
        "versions": {
            "torchguard": importlib.import_module("torchguard").__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda if torch.cuda.is_available() else None,
            "numpy": importlib.metadata.version("numpy"),
            "python": platform.python_version(),
        },
        "hardware": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "driver": gpu.pop("driver_version", None),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "threads": torch.get_num_threads(),
        # How busy the machine is, this program not yet included; a quiet one shows 0.
        "load_average_at_start": round(os.getloadavg()[0], 2),
        **({"gpu_at_start": gpu} if gpu else {}),
    }


def gpu_facts() -> dict[str, str]:
    """Ask the driver for its version and the clocks; empty where there is no ``nvidia-smi``."""
    line = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=20)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return dict(zip(_QUERY, values, strict=False))


def _revision() -> str | None:
    """Return the commit, with ``-dirty`` behind it where a file of the commit was changed.

    A copy of the checkout may be no repository: whoever made it says which commit it is.
    """
    if "BENCHMARKS_REVISION" in os.environ:
        return os.environ["BENCHMARKS_REVISION"]
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(  # noqa: S603
            command, cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    model = [named.get("model name", platform.machine())]
    model += [f"{name} {named[name]}" for name in ("cpu family", "model") if name in named]
    return ", ".join(model)
