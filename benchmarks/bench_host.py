"""How often a step calls a function of a guard, and what that is of the host's time at most.

On every device the guards work on the host: what they add to a step is the calls that enter their
Python code, times what such a call costs: the upper quartile of what ``bench_resize`` and
``bench_verified`` measure for its kind, or for the dearest where it has several. The host's time is
the least of all rounds, because a busy machine makes a step longer and the share smaller.

Compiled models have fewer layers: compiling takes minutes, and the share is that of a layer.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import torchguard
from benchmarks import bench_resize, bench_verified
from benchmarks.bench_end_to_end import SCOPES, Workload, workloads_of
from benchmarks.harness import measure
from benchmarks.models import DecoderSize
from benchmarks.paired import calls_for
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.spread import Spread
from benchmarks.tables import AIM, Table

FOLDER = str(Path(torchguard.__file__).resolve().parent)

# In per cent of the host's time: what was aimed at on a GPU, where the host may be all there is.
TARGETS = {"install()": 0.1, "install(), every guard": 1.0}

# What each kind of call costs is measured by these rows of the other benchmarks.
COSTS: dict[str, tuple[str, ...]] = {
    "resize_": ("same-size-install", "within-storage-install", "grow-1kb", "grow-1mb"),
    "resize_as_": ("grow-1kb", "grow-1mb"),
    "set_": ("set-install",),
    "without out=": ("add-without-out",),
    "with out=": ("add-with-out",),
    "checked graph": ("steady-tiny",),
}


def workloads(*, quick: bool, compiled: bool) -> Iterator[Workload]:
    """Yield the three models with tensors of next to nothing."""
    torch.manual_seed(0)
    few = quick or compiled
    size = DecoderSize(vocabulary=32, context=8, width=12, layers=2 if few else 12, heads=2)
    depths = (1, 1) if few else (3, 4, 6, 3)
    shapes = (size, 1, 8), (depths, 2, 2, 32)
    for workload in workloads_of("{} of the shape of {}", shapes, "cpu", torch.float32):
        kind = "fused" if isinstance(workload.optimizer, torch.optim.AdamW) else "foreach"
        for group in workload.optimizer.param_groups if workload.optimizer else ():
            group[kind] = True  # as on a GPU; on a CPU both would go through the parameters
        yield workload


def entered(call: Callable[[], Any]) -> dict[str, dict[str, int]]:
    """Count the calls that enter torchguard's code from outside, by kind and by torch's function.

    Also used by the tests.
    """
    found: dict[str, Counter[str]] = defaultdict(Counter)

    @functools.cache
    def is_ours(code: CodeType) -> bool:
        return code.co_filename.startswith(FOLDER)

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not is_ours(frame.f_code):
            return
        caller = frame.f_back
        if caller is None or not is_ours(caller.f_code):
            kind, function = _kind(frame)
            found[kind][function] += 1

    threading.setprofile(look)  # threads that the call starts
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {kind: dict(functions) for kind, functions in found.items()}


def _kind(frame: FrameType) -> tuple[str, str]:
    """Say which kind of guard a call enters, and which function of torch stands behind it."""
    path, name, names = Path(frame.f_code.co_filename), frame.f_code.co_name, frame.f_locals
    if (path.stem, name) == ("operation", "guarded"):
        kind = "without out=" if names["out"] is None else "with out="
        return kind, str(names["original"].__name__)
    if path.stem == "resize" and name in {"resize_", "resize_as_", "set_"}:
        return name, name
    if path.parent.name == "verification" and name in {"run", "run_target"}:
        return "checked graph", "a compiled graph"
    return f"{path.stem}.{name}", name


def processor_seconds(step: Callable[[], None], calls: int) -> float:
    """Return what a step takes of the processor: what others do on the machine does not count."""
    begun = time.thread_time()
    for _ in range(calls):
        step()
    return (time.thread_time() - begun) / calls


def costs(setting: Setting) -> tuple[list[Any], dict[str, float]]:
    """Measure what a call of each kind adds: rows as of the other benchmarks, and nanoseconds."""
    wanted = {row for rows in COSTS.values() for row in rows}
    tiny = bench_verified.steady("cpu", ("tiny",), quick=setting.quick)
    made = [each for each in (*bench_resize.comparisons("cpu"), *tiny) if each.id in wanted]
    rows = measure(made, setting, block_seconds=4e-3)
    upper = {row["id"]: row["added_ns"].q3 for row in rows}
    return rows, {kind: max(upper[name] for name in names) for kind, names in COSTS.items()}


def bound_of(calls: Mapping[str, Mapping[str, int]], cost: Mapping[str, float]) -> float:
    """Multiply counts by costs; KeyError for a kind whose cost was not measured."""
    return sum(cost[kind] * sum(functions.values()) for kind, functions in calls.items())


def bounds(
    workload: Workload, setting: Setting, cost: Mapping[str, float], *, compiled: bool
) -> Iterator[dict[str, Any]]:
    """Count what a step enters in each scope, and divide by the host's time."""
    backend = None if not compiled else "aot_eager" if setting.quick else "inductor"
    plain = workload.prepared(backend)
    calls = calls_for(plain, setting.block_seconds(0.01), "cpu")
    taken = [1e3 * processor_seconds(plain, calls) for _ in range(setting.rounds)]
    for scope, allowed in TARGETS.items():
        with SCOPES[scope]():
            step = workload.prepared(backend)
            found = entered(step)
            again = entered(step)
        if found != again:
            raise RuntimeError(f"a step called {found}, and the next one {again}")
        nanoseconds = bound_of(found, cost)
        percent = nanoseconds / (1e4 * min(taken))
        yield {
            "what": workload.what,
            "phase": workload.phase,
            "mode": "compiled" if compiled else "eager",
            "scope": scope,
            "n": setting.rounds,
            "calls": found,  # by kind of guard, and by which function of torch
            "count": sum(sum(functions.values()) for functions in found.values()),
            "bound_ns": round(nanoseconds, 1),
            "host_ms": Spread.of(taken),
            "host_least_ms": float(f"{min(taken):.5g}"),
            "percent": float(f"{percent:.3g}"),
            "target": f"at most {allowed:g} % of the host's time",
            "verdict": "reached" if percent <= allowed else f"missed: {percent:.3g} %",
            "device": "cpu",
        }


def run(setting: Setting) -> Results:
    """Measure what calls cost, then count them in every step."""
    torchguard.uninstall()
    made, cost = costs(replace(setting, rounds=3) if setting.quick else setting)
    rows = list[dict[str, Any]]()
    for compiled in (False, True):
        found = list(workloads(quick=setting.quick, compiled=compiled))
        for workload in found[-1:] if setting.quick else found:
            rows += setting.kept(bounds(workload, setting, cost, compiled=compiled))
            torch.compiler.reset()
    kinds = {kind: round(nanoseconds, 1) for kind, nanoseconds in cost.items()}
    return {"costs": made, "cost_ns": kinds, "rows": rows}


BENCHMARK = Benchmark(
    "host",
    "How many calls of a step enter a guard, and what is that of the host's time at most?",
    run,
    rounds=51,
    devices=("cpu",),
    tables=(
        Table(
            {
                "model": "{what}",
                "step": "{phase}, {mode}",
                "with": "{scope}",
                "calls": "{count}",
                "of": "{calls:counted}",
                "at most": "{bound_ns:time}",
                "the host takes": "{host_least_ms:.3g} ms",
                "of the host's time": "{percent:.2g} %",
                "target": AIM,
            },
            lead="Calls that enter torchguard, counted while a step runs. Each costs at most the "
            "upper quartile of what was measured for its kind ({cost_ns:counted}, ns). The host's "
            "time is the least that the processor took for a step whose tensors are so small that "
            "computing them takes next to nothing. On a GPU the same Python runs, and its step "
            "launches kernels besides; no count there is in this record.",
        ),
    ),
)
