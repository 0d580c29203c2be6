"""A training step within ``transaction`` against the plain loop; and every operator of it failing.

A state of ResNet-50's size (161 parameters, 159 buffers), so small that the step itself takes
little; beside it a deep copy of both state dicts before each step, as people do today.

The table of faults is counted (tests/support/fault_injection.py). ``--faults table`` counts AdamW
with AMP; ``pairs`` adds cases in which each pair of values occurs; ``all`` takes an hour.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

import torchguard
from benchmarks.harness import AddedTarget, Comparison, measure
from benchmarks.models import resnet_sized
from benchmarks.program import Benchmark, Case, Results, Setting
from benchmarks.tables import Table
from support import fault_injection as faults

CHANNELS = 4
AT_MOST = AddedTarget(200)
WAYS = {
    "nothing": faults.nothing,
    "zero_grad": faults.zero_grad,
    "zero_grad, scaler reset": faults.composer,
    "copy of everything": faults.deep_copy,
    "transaction": faults.transaction,
}
ON_A_GPU = 4  # every so-many-th operator fails there, where minutes are few
KINDS = ("fused", "foreach")
FAULTS = ("table", "pairs", "all")
RESTORES = {"copy of everything", "transaction"}
PLAIN_LOOP = "net(batch).sum().backward(); optimizer.step(); optimizer.zero_grad()"


def trained(kind: str, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return such a network, and its AdamW of a kind."""
    net = resnet_sized(CHANNELS, 1, 2).to(device)
    fused, foreach = (name == kind for name in KINDS)
    return net, torch.optim.AdamW(net.parameters(), fused=fused, foreach=foreach)


def deep_copies(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return what a loop that wants to restore has to copy before each step."""
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()))


def steps(device: str) -> Iterator[Comparison]:
    """Compare steps that succeed."""
    for name in KINDS:
        net, optimizer = trained(name, device)
        names = {"net": net, "optimizer": optimizer, "deep_copies": deep_copies}
        names["batch"] = torch.randn(2, CHANNELS, 1, 1, device=device)
        names["step"] = torchguard.transaction(net, optimizer)
        what = f"161 parameters, 159 buffers, AdamW({name}=True)"
        yield Comparison(
            f"transaction-{name}",
            what,
            names,
            PLAIN_LOOP,
            f"with step: {PLAIN_LOOP}",
            target=AT_MOST if name == "fused" else None,
            why="each of 320 tensors is asked for memory, version, gradient and flags, 50 ns each",
        )
        yield Comparison(
            f"deepcopy-{name}",
            f"{what}, state dicts copied before each step",
            names,
            PLAIN_LOOP,
            f"deep_copies(net, optimizer); {PLAIN_LOOP}",
        )


def held_bytes(function: Callable[[], object], device: str) -> int:
    """Return how many bytes of tensors a call allocates on a device and does not free."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        kept = function()
        held = torch.cuda.memory_allocated() - before
    else:
        with torch.profiler.profile(profile_memory=True) as profile:
            kept = function()
        held = sum(each.self_cpu_memory_usage for each in profile.key_averages())
    del kept
    return held


def memory(name: str, device: str) -> dict[str, int]:
    """Count what a block holds when its optimizer has stepped, beside what a deep copy holds."""
    net, optimizer = trained(name, device)
    step = torchguard.transaction(net, optimizer)
    for _ in range(2):  # the second block finds the optimizer's state, and what is kept
        held = held_bytes(step.__enter__, device)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        held += held_bytes(optimizer.step, device)
        step.__exit__(None, None, None)
        optimizer.zero_grad()
    copied = held_bytes(lambda: deep_copies(net, optimizer), device)
    return {"held": held, "deepcopy": copied, "buffers": sum(each.nbytes for each in net.buffers())}


def chosen(how: str, device: str) -> list[faults.Case]:
    """Return the cases of ``--faults``."""
    table = [faults.Case("AdamW", kind, amp=True, device=device) for kind in ("loop", "fused")]
    every = list(faults.every_case(device))
    return {"table": table, "pairs": [*table, *faults.covering(every)], "all": every}[how]


def counted(setting: Setting) -> Iterator[Case]:
    """Yield each case with each way of cleaning up: how its fault points end is counted."""
    every = 256 if setting.quick else 1 if setting.device == "cpu" else ON_A_GPU

    def found(case: faults.Case, name: str) -> dict[str, Any]:
        restores = name in RESTORES
        ended = faults.count(case, WAYS[name], restores=restores, every=every)
        return {**asdict(ended), "examples": ended.examples[:5] if restores else []}

    for case in chosen(setting.options.faults, setting.device):
        for name in WAYS:
            yield {"case": str(case), "way": name}, partial(found, case, name)


def run(setting: Setting) -> Results:
    """Measure every row, and count the faults."""
    device = setting.device
    held = (({"what": f"AdamW({name}=True)"}, partial(memory, name, device)) for name in KINDS)
    return {
        "rows": measure(steps(device), setting, block_seconds=0.2),
        "memory": setting.collect(held, "memory"),
        "faults": setting.collect(counted(setting), "faults"),
    }


BENCHMARK = Benchmark(
    "transaction",
    "What does a training step within `transaction` cost, and what does a failed one leave behind?",
    run,
    rounds=25,
    options={"--faults": {"choices": FAULTS, "default": "table", "help": "default: %(default)s"}},
    tables=(
        Table(),
        Table(
            lead="Bytes of tensors that a block holds on the device when its optimizer has "
            "stepped. On a CPU random states are 5056 of them; the rest is buffers, and without a "
            "fused optimizer parameters and state.",
            rows="memory",
        ),
        Table(
            {
                "cleaned up by": "{way}",
                "training": "{case}",
                "fault points": "{points}",
                "wrong": "{wrong}",
                "raises again": "{stuck}",
                "counts": "{committed}",
            },
            lead="Each operator of a step raises, once before and once after it has run; then the "
            "same batch is tried again. Wrong: something differs from a run that never failed. "
            "Counts: the failure came after the optimizer's step, which is not tried again.",
            rows="faults",
        ),
    ),
)
