"""A training step within ``transaction`` against the plain loop.

A decoder whose step does real work, and a state of ResNet-50's size (161 parameters, 159 buffers)
whose step does next to none, so that the host's part shows; next to both a deep copy of the state
dicts before each step, as people do today. The tests count what a failed step leaves behind.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import torchguard
from benchmarks.harness import Comparison, held_bytes, measure
from benchmarks.models import Decoder, DecoderSize, resnet_sized
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Table

CHANNELS, WORDS = 4, 1024
NETS = {
    "decoder": "decoder of 0.93 million parameters, batch (8, 64)",
    "tiny": "161 parameters, 159 buffers, next to no work",
}
KINDS = ("fused", "foreach")
PLAIN_LOOP = "loss(net).backward(); optimizer.step(); optimizer.zero_grad()"


def trained(which: str, kind: str, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network, and its AdamW of a kind."""
    decoder = which == "decoder"
    net: nn.Module = (
        Decoder(DecoderSize(WORDS, 64, 128, 4, 4)) if decoder else resnet_sized(CHANNELS, 1, 2)
    )
    net.to(device)
    fused, foreach = (name == kind for name in KINDS)
    return net, torch.optim.AdamW(net.parameters(), fused=fused, foreach=foreach)


def loss_of(which: str, device: str) -> Any:
    """Return what takes a network and computes its loss, always of the same batch."""
    if which == "tiny":
        batch = torch.randn(2, CHANNELS, 1, 1, device=device)
        return lambda net: net(batch).sum()
    ids = torch.randint(WORDS, (8, 64), device=device)
    return lambda net: functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())


def deep_copies(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return what a loop that wants to restore has to copy before each step."""
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()))


def steps(nets: list[str], device: str) -> Iterator[Comparison]:
    """Compare steps that succeed; the plain loop trains a network of its own."""
    ways = "transaction", "deepcopy"
    for which, name, way in itertools.product(nets, KINDS, ways):
        net, optimizer = trained(which, name, device)
        plain, plain_optimizer = trained(which, name, device)
        loop = {"net": net, "optimizer": optimizer, "deep_copies": deep_copies}
        loop |= {"plain": plain, "plain_optimizer": plain_optimizer}
        loop["loss"] = loss_of(which, device)
        before = PLAIN_LOOP.replace("(net)", "(plain)").replace("optimizer.", "plain_optimizer.")
        if way == "transaction":
            loop["step"] = torchguard.transaction(net, optimizer)
            after = f"with step: {PLAIN_LOOP}"
        else:
            after = f"deep_copies(net, optimizer); {PLAIN_LOOP}"
        what = f"{NETS[which]}, AdamW({name}=True), {way}"
        yield Comparison(f"{which}-{way}-{name}", what, loop, before, after)


def memory(which: str, name: str, device: str) -> dict[str, int]:
    """Count what a block holds when its optimizer has stepped, next to what a deep copy holds."""
    net, optimizer = trained(which, name, device)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes its state
    step, gradients = torchguard.transaction(net, optimizer), [p.grad for p in net.parameters()]
    held = at_step = 0
    # The second block ends the checks of first steps; what a block leaves to the next counts.
    for _ in range(3):
        optimizer.zero_grad()
        held += held_bytes(step.__enter__, device)
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient
        at_step = held + held_bytes(optimizer.step, device)
        held = at_step + held_bytes(lambda: step.__exit__(None, None, None), device)
    copied = held_bytes(lambda: deep_copies(net, optimizer), device)
    weights, buffers = (sum(each.nbytes for each in of()) for of in (net.parameters, net.buffers))
    return {"held": at_step, "deepcopy": copied, "parameters": weights, "buffers": buffers}


def run(setting: Setting) -> Results:
    """Measure every row, and count the bytes."""
    device, nets = setting.device, ["tiny"] if setting.quick else list(NETS)
    held = (
        (
            {"what": f"{NETS[which]}, AdamW({name}=True)", "id": f"{which}-{name}"},
            partial(memory, which, name, device),
        )
        for which, name in itertools.product(nets, KINDS)
    )
    return {
        "rows": measure(steps(nets, device), setting, block_seconds=0.2),
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
            {
                "": "{what}",
                "transaction": "{held:bytes}",
                "a deep copy": "{deepcopy:bytes}",
                "parameters": "{parameters:bytes}",
                "buffers": "{buffers:bytes}",
            },
            lead="Bytes of tensors that a block holds on the device when its optimizer has "
            "stepped.",
            rows="memory",
        ),
    ),
)
