"""What the guard "overlap" costs: a call, a whole step, an optimizer.

    python benchmarks/bench_overlap.py --json benchmarks/records/<date>-overlap-cpu.json

Plain torch and the guard take turns. Calls are of 10 elements, so that the time is that of the
call. Steps are those of ``bench_host``, whose tensors are so small that the host is all there is.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

if __package__ in {None, ""}:  # run as a file: the folder on the path is this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torchguard
from benchmarks.bench_host import workloads
from benchmarks.harness import AddedTarget, Comparison, Scope, Side, measure
from benchmarks.paired import Variant, calls_for, ratios, take_turns
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.spread import Interval, Spread
from benchmarks.tables import Table

INSTALLED = partial(torchguard.install, "overlap", only_if_needed=False)
CALL = AddedTarget(microseconds=0.8)
NOTHING, CONTROL, GUARD = "nothing", "nothing, once more", 'install("overlap")'

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
        yield Comparison(
            statement,
            what,
            Side(statement, names),
            Side(statement, names, INSTALLED),
            target=target,
        )
    yield Comparison(
        "shift",
        "h[:, 1:] = h[:, :-1], beside the same with .clone() on plain torch",
        Side("h[:, 1:] = h[:, :-1].clone()", names),
        Side("h[:, 1:] = h[:, :-1]", names, INSTALLED),
    )


@dataclass(frozen=True)
class Step:
    """A step with the guard against one without."""

    what: str
    phase: str
    n: int
    calls: int
    nothing_ms: Spread
    ratio: Interval
    control: Interval
    """Nothing against nothing, in the same rounds."""

    verdict: str
    device: str = "cpu"


def steps(setting: Setting) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield three models in training and in inference, and AdamW of both kinds."""
    for workload in workloads(quick=setting.quick, compiled=False):
        yield workload.what, workload.phase, workload.step(workload.computes)
    for kind in ("foreach", "fused"):
        options: dict[str, Any] = {kind: True}
        parameters = [torch.nn.Parameter(torch.ones(16, 16)) for _ in range(100)]
        for parameter in parameters:
            parameter.grad = torch.ones(16, 16)
        yield f"AdamW({kind}=True), 100 tensors", "step", torch.optim.AdamW(
            parameters, **options
        ).step  # fmt: skip


def compared(
    what: str,
    phase: str,
    step: Callable[[], Any],
    setting: Setting,
    guard: Scope = INSTALLED,
) -> Step:
    """Let a step take turns with itself, guarded and not."""
    variants = [
        Variant(NOTHING, step, contextlib.nullcontext),
        Variant(CONTROL, step, contextlib.nullcontext),
        Variant(GUARD, step, guard),
    ]
    calls = calls_for(step, setting.block_seconds(0.05), "cpu")
    found = take_turns(variants, setting.rounds, calls, "cpu")
    ratio = ratios(found, NOTHING)
    same = ratio[GUARD].holds_one or (
        ratio[GUARD].low <= ratio[CONTROL].high and ratio[CONTROL].low <= ratio[GUARD].high
    )
    return Step(
        what=what,
        phase=phase,
        n=setting.rounds,
        calls=calls,
        nothing_ms=Spread.of([1e3 * seconds for seconds in found[NOTHING]]),
        ratio=ratio[GUARD],
        control=ratio[CONTROL],
        verdict="not distinguishable" if same else f"{ratio[GUARD].median:.3g} times",
    )


def run(setting: Setting) -> Results:
    """Measure the calls, then the steps."""
    torchguard.uninstall()
    rows = measure(calls(), setting, block_seconds=4e-3)
    found = []
    for what, phase, step in steps(setting):
        found.append(compared(what, phase, step, setting))
        row = found[-1]
        print(
            f"{what.partition(':')[0][:44]:44} {phase:20} {row.nothing_ms.median:.3g} ms "
            f"{row.ratio.median:.4f} times [{row.ratio.low:.4f}, {row.ratio.high:.4f}], "
            f"control {row.control.median:.4f}: {row.verdict}"
        )
    return {"rows": rows, "steps": found}


BENCHMARK = Benchmark(
    "overlap",
    'What does install("overlap") cost a call, a step, an optimizer?',
    run,
    rounds=31,
    rounds_of="rounds per call and per step",
    devices=("cpu",),
    tables=(
        Table(),
        Table(
            {
                "step": "{what}, {phase}",
                "plain": "{nothing_ms.median:.3g} ms",
                "with the guard [95 %]": "{ratio.median:.3f} times [{ratio.low:.3f}, "
                "{ratio.high:.3f}]",
                "plain, once more [95 %]": "{control.median:.3f} [{control.low:.3f}, "
                "{control.high:.3f}]",
                "verdict": "{verdict}",
            },
            rows="steps",
        ),
    ),
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
