"""What the check costs: the first call, its memory, and every call after it.

Targets: the first call at most 15 % over a plain compile, a later call within 1 us.

Each first call is a process of its own with an empty cache, plain and checked by turns. The
workload "lengths" is a stream of 120 lengths through one graph with dynamic shapes, some of which
are checked again.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.harness import AddedTarget, Comparison, measure
from benchmarks.processes import in_a_process
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.spread import Spread
from benchmarks.tables import AIM, COMPARISONS, Table
from torchguard import verified_backend

# B batch, T time, D features
B, T, D = 8, 64, 128
ALLOWED_RATIO = 1.15
LATER = AddedTarget(1)
LATER_DYNAMIC = AddedTarget(0.5)
WORKLOADS = ("transformer", "lengths", "tiny")
LENGTHS = range(8, 128)  # of the workload "lengths"; quick mode has few of them
GRAPHS, FEW = 1000, 3  # of the workload "tiny"; in quick mode
LATER_ROUNDS = 51


def transformer(device: str) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return a small transformer in training, without dropout, and a batch (B, T, D)."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 4, 4 * D, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).to(device), [torch.randn(B, T, D, device=device)]


def perceptron(device: str) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return two layers, and batches (B, T, D) of 120 lengths, in an order without a rule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)).to(device)
    order = torch.randperm(len(LENGTHS)).tolist()
    return model, [torch.randn(B, LENGTHS[place], D, device=device) for place in order]


def tiny(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes a graph of two operations, another one for each number."""
    scope: dict[str, Any] = {}
    exec(f"def tiny_{number}(x):\n    return x * {number} + {number}", scope)  # noqa: S102
    function: Callable[[torch.Tensor], torch.Tensor] = scope[f"tiny_{number}"]
    return function


def first_call(
    workload: str, device: str, count: int, checked: bool, quick: bool
) -> dict[str, float]:
    """Compile and call in this process; return seconds, processor seconds and peak bytes."""
    # 1,000 graphs through inductor would take an hour of the C++ compiler.
    inner = "aot_eager" if workload == "tiny" or quick else "inductor"
    backend: Any = verified_backend(inner) if checked else inner
    calls: list[Callable[[], Any]]
    if workload == "tiny":
        x = torch.ones(8, device=device)
        functions = [torch.compile(tiny(number), backend=backend) for number in range(count)]
        calls = [functools.partial(function, x) for function in functions]
        torch.compile(tiny(count), backend=inner)(x)  # what is imported lazily
    else:
        dynamic = True if workload == "lengths" else None
        model, batches = perceptron(device) if dynamic else transformer(device)
        compiled: Any = torch.compile(model, backend=backend, dynamic=dynamic)
        batches = batches[:FEW] if quick else batches
        calls = [functools.partial(_train, compiled, batch) for batch in batches]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for call in calls:
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    import resource  # noqa: PLC0415 - POSIX only

    ours = resource.getrusage(resource.RUSAGE_SELF)
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = ours.ru_utime + ours.ru_stime + compilers.ru_utime + compilers.ru_stime
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 1024 * ours.ru_maxrss
    checks = sum(graph.checks for graph in backend.stats().graphs) if checked else 0
    return {"seconds": seconds, "processor_seconds": used, "bytes": peak, "checks": checks}


def _train(model: Callable[..., torch.Tensor], batch: torch.Tensor) -> None:
    model(batch).sum().backward()


def first_calls(workload: str, setting: Setting) -> dict[str, Any]:
    """Measure first calls in processes of their own, plain and checked by turns."""
    count = FEW if setting.quick else setting.options.graphs
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(setting.rounds):
        for checked in (False, True) if number % 2 == 0 else (True, False):
            arguments = (workload, setting.device, count, checked, setting.quick)
            call = ("bench_verified", "first_call", *arguments)
            found[checked].append(in_a_process(*call, quick=setting.quick))
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
        "checks": pairs[0][1]["checks"],
        "target": f"at most {ALLOWED_RATIO} times",
        "verdict": "reached" if ratio.median <= ALLOWED_RATIO else "missed",
    }


def steady(device: str, workloads: Sequence[str], *, quick: bool) -> Iterator[Comparison]:
    """Return later calls: the transformer, a tiny graph, and a graph with dynamic shapes.

    Those of the last have its lengths by turns, each of which has been called before.
    """
    model, batch = transformer(device)
    lengths = LENGTHS[:FEW] if quick else LENGTHS
    each_length = [torch.ones(length, device=device) for length in lengths]
    first = "a call after the first"
    new = "a call of a graph with dynamic shapes, after the first of its length"
    cases: dict[str, tuple[Any, list[torch.Tensor], bool | None, str, AddedTarget]] = {
        "transformer": (model.eval(), batch, None, first, LATER),
        "tiny": (tiny(2), [torch.ones(8, device=device)], None, first, LATER),
        "lengths": (tiny(2), each_length, True, new, LATER_DYNAMIC),
    }
    for name, (function, batches, dynamic, what, target) in cases.items():
        if name not in workloads:
            continue
        names: dict[str, Any] = {"no_grad": torch.no_grad(), "x": batches[0]}
        names["batches"] = itertools.cycle(batches)
        for side, backend in (("bare", "aot_eager"), ("checked", verified_backend("aot_eager"))):
            names[side] = torch.compile(_another(function), backend=backend, dynamic=dynamic)
            with torch.no_grad():
                for each in batches:
                    names[side](each)
        call = "with no_grad: {}(" + ("x)" if len(batches) == 1 else "next(batches))")
        pair = call.format("bare"), call.format("checked")
        yield Comparison(f"steady-{name}", what, names, *pair, target=target)


def _another(function: Any) -> Any:
    """Return a function with code of its own, so that two compilations don't share a cache."""
    scope: dict[str, Any] = {"function": function}
    exec("def call(x):\n    return function(x)", scope)  # noqa: S102
    return scope["call"]


def run(setting: Setting) -> Results:
    """Measure first calls, and calls after the first."""
    workloads = WORKLOADS[1:] if setting.quick else WORKLOADS
    # Calls after the first take seconds to measure, first calls take minutes.
    later = replace(setting, rounds=3 if setting.quick else LATER_ROUNDS)
    calls = steady(setting.device, workloads, quick=setting.quick)
    rows = measure(calls, later, block_seconds=0.05)
    firsts = (
        ({"id": f"first-{workload}"}, functools.partial(first_calls, workload, setting))
        for workload in workloads
    )
    return {"first_calls": setting.collect(firsts, "first_calls"), "rows": rows}


BENCHMARK = Benchmark(
    "verified",
    "What does checking a compiled graph cost: the first call, its memory, every call after it?",
    run,
    rounds=7,
    quick_rounds=1,
    options={"--graphs": {"type": int, "default": GRAPHS, "help": "of the workload tiny"}},
    tables=(
        Table(
            {
                "first calls": "{id}",
                "checks": "{checks}",
                "plain → checked": "{plain_seconds.median:.2f} → {checked_seconds.median:.2f} s",
                "ratio": "{ratio.median:times}",
                "processor": "{processor_ratio.median:times}",
                "memory": "{memory_ratio.median:times}",
                "target": AIM,
            },
            rows="first_calls",
        ),
        Table({"workload": "{id}", **COMPARISONS}),
    ),
)
