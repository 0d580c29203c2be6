"""A training step within ``transaction`` against the plain loop.

A state of ResNet-50's size (161 parameters, 159 buffers), so small that the step itself takes
little; next to it a deep copy of both state dicts before each step, as people do today. What a
failed step leaves behind is counted by the tests (``tests/transactions``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import torchguard
from benchmarks.harness import AddedTarget, Comparison, held_bytes, measure
from benchmarks.models import resnet_sized
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Table

CHANNELS = 4
AT_MOST = AddedTarget(200)
KINDS = ("fused", "foreach")
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
    """Compare steps that succeed; the plain loop trains a network of its own."""
    for name in KINDS:
        for way in ("transaction", "deepcopy"):
            net, optimizer = trained(name, device)
            plain, plain_optimizer = trained(name, device)
            batch = torch.randn(2, CHANNELS, 1, 1, device=device)
            loop = {"net": net, "optimizer": optimizer, "batch": batch, "deep_copies": deep_copies}
            loop |= {"plain": plain, "plain_optimizer": plain_optimizer}
            before = PLAIN_LOOP.replace("net(", "plain(").replace("optimizer.", "plain_optimizer.")
            if way == "transaction":
                loop["step"] = torchguard.transaction(net, optimizer)
                after = f"with step: {PLAIN_LOOP}"
            else:
                after = f"deep_copies(net, optimizer); {PLAIN_LOOP}"
            target = AT_MOST if (way, name) == ("transaction", "fused") else None
            what = f"{way}: 161 parameters, 159 buffers, AdamW({name}=True)"
            yield Comparison(f"{way}-{name}", what, loop, before, after, target=target)


def memory(name: str, device: str) -> dict[str, int]:
    """Count what a block holds when its optimizer has stepped, next to what a deep copy holds."""
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


def run(setting: Setting) -> Results:
    """Measure every row, and count the bytes."""
    device = setting.device
    held = (({"what": f"AdamW({name}=True)"}, partial(memory, name, device)) for name in KINDS)
    return {
        "rows": measure(steps(device), setting, block_seconds=0.2),
        "memory": setting.collect(held, "memory"),
    }


BENCHMARK = Benchmark(
    "transaction",
    "What does a training step within `transaction` cost?",
    run,
    rounds=25,
    tables=(
        Table(),
        Table(
            lead="Bytes of tensors that a block holds on the device when its optimizer has "
            "stepped.",
            rows="memory",
        ),
    ),
)
