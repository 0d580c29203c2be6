"""What the guard "overlap" costs: a call, a whole step, an optimizer.

Calls are of 10 elements, and steps are those of ``bench_host``, so that the host is all there is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import torchguard
from benchmarks.bench_host import workloads
from benchmarks.harness import AddedTarget, Comparison, installed, measure
from benchmarks.paired import guarded_step, steps_table
from benchmarks.program import Benchmark, Case, Results, Setting
from benchmarks.tables import Table

INSTALLED = installed("overlap")
CALL = AddedTarget(0.8)

# What, the statement, and what was aimed at.
CALLS: tuple[tuple[str, str, AddedTarget | None], ...] = (
    ("x.add_(y)", "x.add_(y)", CALL),
    ("x += y", "iadd(x, y)", CALL),
    ("x.add_(1.0)", "x.add_(1.0)", None),
    ("x.zero_()", "x.zero_()", None),
    ("x[2:5] = 1.0", "x[2:5] = 1.0", None),
    ("x[2:5] = z", "x[2:5] = z", None),
    ("torch.add(x, y, out=w)", "torch.add(x, y, out=w)", None),
    ("torch.add(x, y)", "torch.add(x, y)", None),
    ("x * y, which is not patched", "x * y", None),
)


def calls() -> Iterator[Comparison]:
    """Yield calls in which nothing overlaps, then a shift beside the same with a clone."""
    names: dict[str, Any] = {name: torch.ones(10) for name in ("x", "y", "w")}
    names |= {"z": torch.ones(3), "torch": torch, "iadd": operator.iadd, "h": torch.ones(16, 64)}
    for what, statement, target in CALLS:
        yield Comparison(statement, what, names, statement, statement, INSTALLED, target=target)
    yield Comparison(
        "shift",
        "h[:, 1:] = h[:, :-1], beside the same with .clone() on plain torch",
        names,
        "h[:, 1:] = h[:, :-1].clone()",
        "h[:, 1:] = h[:, :-1]",
        INSTALLED,
    )


def steps(setting: Setting) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield three models in training and in inference, and AdamW of both kinds."""
    for workload in workloads(quick=setting.quick, compiled=False):
        yield workload.what, workload.phase, workload.step(workload.computes)
    for kind in ("foreach", "fused"):
        parameters = [torch.nn.Parameter(torch.ones(16, 16)) for _ in range(100)]
        for parameter in parameters:
            parameter.grad = torch.ones(16, 16)
        fused = kind == "fused"
        optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=not fused)
        yield f"AdamW({kind}=True), 100 tensors", "step", optimizer.step


def _cases(setting: Setting) -> Iterator[Case]:
    for what, phase, step in steps(setting):
        yield {"what": what, "phase": phase}, partial(guarded_step, step, INSTALLED, setting)


def run(setting: Setting) -> Results:
    """Measure the calls, then the steps."""
    torchguard.uninstall()
    return {
        "rows": measure(calls(), setting, block_seconds=4e-3),
        "steps": setting.collect(_cases(setting), "steps"),
    }


BENCHMARK = Benchmark(
    "overlap",
    'What does install("overlap") cost a call, a step, an optimizer?',
    run,
    rounds=31,
    devices=("cpu",),
    tables=(Table(), steps_table("with the guard", "steps")),
)
