"""Counts what a call makes torch do: operators, kernels, copies, bytes. Numbers, not times.

All but the CUDA graphs is read from the trace of ``torch.profiler``, which holds every call of
an ATen operator and, on a GPU, every launch.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.clocks import peak_bytes

_LAUNCHES = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "copies"}


@dataclass(frozen=True)
class Counts:
    """What one call did."""

    operators: dict[str, int]
    """Calls of ATen operators by name, those that operators make themselves included."""

    kernels: int
    """Kernels that ran on the GPU; 0 where there is none."""

    copies: int
    """Copies and fills of the GPU's memory that are no kernels."""

    peak_bytes: int
    """The most that was allocated at one time, over what was allocated before."""

    @property
    def calls(self) -> int:
        """How many operators were called."""
        return sum(self.operators.values())


def counted(call: Callable[[], Any], device: str) -> Counts:
    """Count what a call does; call it once before, so that it is warm."""
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with profile(activities=activities, profile_memory=not on_gpu) as profiled:
        peak = peak_bytes(call) if on_gpu else call()
    events = _trace(profiled)
    launches = Counter(_LAUNCHES.get(event.get("cat", "")) for event in events)
    return Counts(
        operators=dict(Counter(event["name"] for event in events if _is_operator(event))),
        kernels=launches["kernels"],
        copies=launches["copies"],
        peak_bytes=peak if on_gpu else _peak(events),
    )


def _trace(profiled: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _is_operator(event: dict[str, Any]) -> bool:
    # The compiler marks its regions in the same way, with a name of words.
    return event.get("cat") == "cpu_op" and re.fullmatch(r"\w+::\w+", event["name"]) is not None


def _peak(events: list[dict[str, Any]]) -> int:
    """Add up what was allocated and freed, in its order.

    What was allocated before is left out when it is freed, or the peak of a step would depend on
    what was profiled before it.
    """
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    held: dict[int, int] = {}
    most = 0
    for change in sorted(changes, key=lambda each: int(each["Ev Idx"])):
        if change["Bytes"] > 0:
            held[change["Addr"]] = change["Bytes"]
        else:
            held.pop(change["Addr"], None)
        most = max(most, sum(held.values()))
    return most


@contextlib.contextmanager
def recordings() -> Iterator[list[None]]:
    """Yield a list that gets an entry with every CUDA graph whose recording begins.

    The compiler records through ``torch.cuda.graph``; once in a process it records an empty one,
    to which the memory of the others belongs.
    """
    begun: list[None] = []
    enter = torch.cuda.graph.__enter__

    def counting(self: Any) -> None:
        begun.append(None)
        enter(self)

    with mock.patch.object(torch.cuda.graph, "__enter__", counting):
        yield begun
