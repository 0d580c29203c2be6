"""One stream of sizes, from cold to warm, with each engine of ``bucketed`` and in other ways.

    python benchmarks/bench_stream.py --json benchmarks/records/<date>-stream-cpu.json

Three phases: ``steady``, sizes as in training; ``tail``, where most sizes come once; ``shift``,
where longer ones take over. Each row is a process of its own with an empty compiler cache, and
runs the stream once, so that all it compiles is in its time.

Two questions are answered with numbers. What does ``engine="auto"`` take in the second half of each
phase, against the best row there? And how far is it, at any call of the stream, above the row that
took least up to that call: the best choice in hindsight? It compiles where that breaks even, so
that should be about twice at most. About four minutes on two quiet cores.

Shapes: B batch, T time, D features.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

if __package__ in {None, ""}:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import in_a_process
from benchmarks.program import Benchmark, Results, Setting
from torchguard import Buckets, bucketed

BATCH, FEATURES, LAYERS = 8, 96, 3
LONGEST = 512
COUNT = 6
PHASES = (("steady", 1200), ("tail", 120), ("shift", 900))
ROWS = (
    "eager",
    "compile",
    "compile dynamic=True",
    "by hand: the buckets of fit 6",
    "bucketed static",
    "bucketed ranges",
    "bucketed auto",
)
AUTO = "bucketed auto"
STEADY_TARGET = 1.05
HINDSIGHT_TARGET = 2.0
_LEAST_SECONDS = 1.0
"""Before so many seconds a row's time is mostly that of its first calls."""


class Model(nn.Module):
    """Gated layers with a norm in front: much that is elementwise, as compilers like it."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(FEATURES) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        for gate, norm in zip(self.gates, self.norms, strict=True):
            hidden = norm(x)
            x = x + functional.silu(gate(hidden)) * torch.tanh(hidden) * torch.sigmoid(hidden)
        return x


def sizes_of(phase: str, count: int) -> list[int]:
    """Draw the sizes T of a phase."""
    random = np.random.default_rng(len(phase))
    if phase == "tail":
        return [int(size) for size in random.permutation(np.arange(4, LONGEST))[:count]]
    middle = 4.2 if phase == "steady" else 5.0
    return [int(size) for size in random.lognormal(middle, 0.5, count).clip(4, LONGEST)]


def stream(*, quick: bool = False) -> list[tuple[str, int]]:
    """Return (phase, size) of each call."""
    return [
        (phase, size)
        for phase, count in PHASES
        for size in sizes_of(phase, max(count // 100, 4) if quick else count)
    ]


def ladder() -> Buckets:
    """Fit buckets to another sample of the same sizes."""
    random = np.random.default_rng(1)
    sample = [*random.lognormal(4.2, 0.5, 1200), *random.lognormal(5.0, 0.5, 900)]
    clipped = [int(size) for size in np.clip(sample, 4, LONGEST)]
    return Buckets.fit(clipped, COUNT, multiple_of=8, maximum=LONGEST)


def wrapped(row: str, model: nn.Module, backend: str) -> tuple[Callable[..., Any], Any]:
    """Return what a row calls, and its bucketed module if it has one."""
    if row == "eager":
        return model, None
    if row.startswith("compile"):
        return torch.compile(
            model, dynamic=True if "dynamic" in row else None, backend=backend
        ), None
    if row.startswith("bucketed"):
        engine: Any = row.removeprefix("bucketed ")
        module = bucketed(
            model,
            dims={"x": {1: "t"}},
            buckets=ladder(),
            engine=engine,
            compile={"backend": backend},
        )
        return module, module
    config: Any = importlib.import_module("torch._dynamo.config")
    setattr(
        config, "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit", 64
    )
    compiled, buckets = torch.compile(model, dynamic=False, backend=backend), ladder()

    def padded(x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        found: torch.Tensor = compiled(
            functional.pad(x, (0, 0, 0, buckets.bucket_for(length) - length))
        )
        return found[:, :length]

    return padded, None


def run_row(row: str, device: str, backend: str, quick: bool) -> dict[str, Any]:
    """Run the stream once and return what each call took."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model().to(device).eval()
    inputs = torch.randn(BATCH, LONGEST, FEATURES, device=device)
    calls = stream(quick=quick)
    with torch.no_grad():
        for _ in range(3):
            model(inputs)
        begun = time.perf_counter()
        call, module = wrapped(row, model, backend)
        seconds = []
        for _, size in calls:
            call(inputs[:, :size].contiguous())
            if device == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            seconds.append(round(now - begun, 6))
            begun = now
    stats = None if module is None else module.stats()
    return {
        "row": row,
        "device": device,
        "seconds": seconds,
        "total_s": sum(seconds),
        "graphs": None if stats is None else stats.graphs,
        "engines": {} if stats is None else stats.as_dict()["engines"],
    }


def judged(rows: list[dict[str, Any]], calls: list[tuple[str, int]]) -> dict[str, Any]:
    """Compare auto with the best row: late in each phase, and in hindsight at each call."""
    by_name = {row["row"]: row["seconds"] for row in rows}
    auto = by_name[AUTO]
    starts = [next(i for i, (name, _) in enumerate(calls) if name == phase) for phase, _ in PHASES]
    late = []
    for (phase, _), (start, end) in zip(PHASES, pairwise([*starts, len(calls)]), strict=True):
        middle = (start + end) // 2
        taken = {
            name: 1e3 * float(np.median(seconds[middle:end])) for name, seconds in by_name.items()
        }
        best = min((name for name in taken if name != AUTO), key=lambda name: taken[name])
        late.append({
            "phase": phase, "start": start, "best": best, "milliseconds": taken,
            "auto_over_best": taken[AUTO] / taken[best],
        })  # fmt: skip
    others = [list(accumulate(seconds)) for name, seconds in by_name.items() if name != AUTO]
    least = [min(each) for each in zip(*others, strict=True)]
    ratios = [
        ours / best
        for ours, best in zip(accumulate(auto), least, strict=True)
        if best >= _LEAST_SECONDS or len(calls) < 100  # noqa: PLR2004 - a quick run
    ]
    return {"phases": late, "worst_over_hindsight": max(ratios, default=1.0)}


def run(setting: Setting) -> Results:
    """Run every row."""
    backend = "eager" if setting.quick else "inductor"
    rows = []
    for row in ROWS:
        found = in_a_process("bench_stream", "run_row", row, setting.device, backend, setting.quick)
        print(f"{row:32} {setting.device:4} {found['total_s']:8.1f} s in all")
        rows.append(found)
    summary = {"device": setting.device, **judged(rows, stream(quick=setting.quick))}
    return {"rows": rows, "summary": [{**summary, "verdicts": list(sentences(summary))}]}


def verdicts(record: dict[str, Any]) -> Iterator[str]:
    """Say whether the targets are reached."""
    for summary in record["summary"]:
        yield from summary["verdicts"]


def sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    """Say what was found on one device."""
    for each in summary["phases"]:
        ratio = each["auto_over_best"]
        word = "reached" if ratio <= STEADY_TARGET else "missed"
        yield (
            f"{each['phase']}, second half: auto takes {ratio:.2f} times what {each['best']} takes "
            f"(target: at most {STEADY_TARGET:g}): {word}"
        )
    worst = summary["worst_over_hindsight"]
    word = "reached" if worst <= HINDSIGHT_TARGET else "missed"
    yield (
        f"from cold, at no call above {worst:.2f} times the best row in hindsight "
        f"(target: about {HINDSIGHT_TARGET:g}): {word}"
    )


BENCHMARK = Benchmark(
    "stream",
    "What does a stream of sizes take from cold with each engine of `bucketed`?",
    run,
    devices=("cpu",),
    afterwards=verdicts,
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
