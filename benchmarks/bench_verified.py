"""What the check costs: the first call, its memory, and every call after it.

Each first call is a process of its own with an empty cache, plain and checked by turns. The
workload "lengths" is a stream of 120 lengths through one graph with dynamic shapes. The memory of a
first step is measured with a model whose weights are nearly all of it, in units of the weights.
"""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Comparison, Spread, measure
from benchmarks.program import Benchmark, Results, Setting, in_a_process
from benchmarks.tables import COMPARISONS, Table
from torchguard import verified

# B batch, T time, D features
B, T, D = 8, 64, 128
ALLOWED = {"transformer": 1.15, "transformer, dropout": 1.3, "lengths": 1.15}
"""How many times as long a first call may take, by workload."""
LENGTHS, FEW = range(8, 128), 3  # in quick mode
LATER_ROUNDS = 51
WIDTH, DEPTH, QUICK_WIDTH = 4096, 4, 64
ALLOWED_WEIGHTS = 3.5


def workload(name: str, device: str) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return a model in training and its batches (B, T, D): one, or one of each length."""
    torch.manual_seed(0)
    if name != "lengths":
        rate = 0.1 if name.endswith("dropout") else 0.0
        layer = nn.TransformerEncoderLayer(D, 4, 4 * D, dropout=rate, batch_first=True)
        return nn.TransformerEncoder(layer, 2).to(device), [torch.randn(B, T, D, device=device)]
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)).to(device)
    order = torch.randperm(len(LENGTHS)).tolist()
    return model, [torch.randn(B, LENGTHS[place], D, device=device) for place in order]


def first_call(name: str, device: str, checked: bool, quick: bool) -> dict[str, float]:
    """Compile and call in this process; return seconds, processor seconds and peak bytes."""
    torch.set_num_threads(1)
    model, batches = workload(name, device)
    compile_: Any = verified if checked else torch.compile
    backend, dynamic = "aot_eager" if quick else "inductor", True if name == "lengths" else None
    compiled = compile_(model, backend=backend, dynamic=dynamic)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for batch in batches[:FEW] if quick else batches:
        compiled(batch).sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    ours = resource.getrusage(resource.RUSAGE_SELF)
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = ours.ru_utime + ours.ru_stime + compilers.ru_utime + compilers.ru_stime
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 1024 * ours.ru_maxrss
    return {"seconds": seconds, "processor_seconds": used, "bytes": peak}


def first_calls(name: str, setting: Setting) -> dict[str, Any]:
    """Measure first calls in processes of their own, plain and checked by turns."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(setting.rounds):
        for checked in (False, True) if number % 2 == 0 else (True, False):
            arguments = name, setting.device, checked, setting.quick
            found[checked].append(in_a_process(first_call, *arguments))
    pairs = list(zip(found[False], found[True], strict=True))
    ratio, processor, memory = (
        Spread.of([one[name] / bare[name] for bare, one in pairs])
        for name in ("seconds", "processor_seconds", "bytes")
    )
    return {
        "n": setting.rounds,
        "plain_seconds": Spread.of([bare["seconds"] for bare, _ in pairs]),
        "checked_seconds": Spread.of([one["seconds"] for _, one in pairs]),
        "ratio": ratio,
        "processor_ratio": processor,
        "memory_ratio": memory,
        "target": f"at most {ALLOWED[name]} times",
        "verdict": "reached" if ratio.median <= ALLOWED[name] else "missed",
    }


def peak_in_weights(dropout: bool, device: str, checked: bool, quick: bool) -> float:
    """Return the peak of a first step above what was there before, in units of the weights."""
    torch.set_num_threads(1)
    width = QUICK_WIDTH if quick else WIDTH
    compile_: Any = verified if checked else torch.compile
    backend = "aot_eager" if quick else "inductor"

    def step(width: int) -> None:
        layers: list[nn.Module] = [nn.Linear(width, width) for _ in range(DEPTH)]
        if dropout:
            layers.insert(1, nn.Dropout())
        model = nn.Sequential(*layers).to(device)
        before.append(_resident(device))
        compile_(model, backend=backend)(torch.randn(2, width, device=device)).sum().backward()

    before: list[int] = []
    step(8)  # imports what compiling needs
    torch.compiler.reset()
    step(width)
    return (_peak(device) - before[1]) / (4 * DEPTH * width * (width + 1))


def _resident(device: str) -> int:
    """Return the bytes in use, and let the peak begin there."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(name))
    return 1024 * int(line.split()[1])


def weights(dropout: bool, setting: Setting) -> dict[str, Any]:
    """Measure the memory of first steps in processes of their own."""
    plain, checked = (
        Spread.of([
            in_a_process(peak_in_weights, dropout, setting.device, checked, setting.quick)
            for _ in range(setting.rounds)
        ])
        for checked in (False, True)
    )  # fmt: skip
    return {
        "n": setting.rounds,
        "plain_weights": plain,
        "checked_weights": checked,
        "target": f"at most {ALLOWED_WEIGHTS} times the weights",
        "verdict": "reached" if checked.median <= ALLOWED_WEIGHTS else "missed",
    }


def later(device: str) -> Iterator[Comparison]:
    """Compare later calls of a tiny graph, static and with dynamic shapes."""
    python = partial(verified, against="python")
    for what, lengths, dynamic, checking in (
        ("a call after the first", [8], None, verified),
        ("a call with dynamic shapes, of a length that was seen", LENGTHS, True, verified),
        ('a call after the first, against="python"', [8], None, python),
    ):
        batches = [torch.ones(length, device=device) for length in lengths]
        names: dict[str, Any] = {"no_grad": torch.no_grad(), "batches": itertools.cycle(batches)}
        ways: tuple[tuple[str, Any], ...] = (("bare", torch.compile), ("checked", checking))
        for side, compile_ in ways:
            scope: dict[str, Any] = {}  # each side has code, and so a cache, of its own
            exec("def tiny(x):\n    return x * 2 + 2", scope)  # noqa: S102
            names[side] = compile_(scope["tiny"], backend="aot_eager", dynamic=dynamic)
            with torch.no_grad():
                for each in batches:
                    names[side](each)
        before, after = (f"with no_grad: {side}(next(batches))" for side, _ in ways)
        yield Comparison(what, what, names, before, after)


def run(setting: Setting) -> Results:
    """Measure first calls, and calls after the first."""
    # Calls after the first take seconds to measure, first calls take minutes.
    more = setting if setting.quick else replace(setting, rounds=LATER_ROUNDS)
    rows = measure(later(setting.device), more, block_seconds=0.05)
    names, dropouts = (["lengths"], [""]) if setting.quick else ([*ALLOWED], ["", ", dropout"])
    firsts = (({"id": f"first-{name}"}, partial(first_calls, name, setting)) for name in names)
    peaks = (({"id": f"weights{name}"}, partial(weights, bool(name), setting)) for name in dropouts)
    return {
        "first_calls": setting.collect(firsts, "first_calls"),
        "weights": setting.collect(peaks, "weights"),
        "rows": rows,
    }


BENCHMARK = Benchmark(
    "verified",
    "What does checking a compiled graph cost: the first call, its memory, every call after it?",
    run,
    rounds=3,
    quick_rounds=1,
    needs_triton=True,
    tables=(
        Table(
            {
                "first calls": "{id}",
                "plain → checked": "{plain_seconds.median:.2f} → {checked_seconds.median:.2f} s",
                "ratio": "{ratio.median:times}",
                "processor": "{processor_ratio.median:times}",
                "memory": "{memory_ratio.median:times}",
                "target": "{verdict}: {target}",
            },
            rows="first_calls",
        ),
        Table(
            {
                "first step, weights dominate": "{id}",
                "peak, in units of the weights": "{plain_weights.median:.1f} → "
                "{checked_weights.median:.1f}",
                "target": "{verdict}: {target}",
            },
            rows="weights",
        ),
        Table(COMPARISONS),
    ),
)
