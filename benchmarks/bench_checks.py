"""What ``checked()`` costs in a scope that is open: an operator, a model's step, it compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

import torchguard
from benchmarks.models import Decoder, DecoderSize
from benchmarks.paired import guarded_step, steps_table
from benchmarks.program import Benchmark, Case, Results, Setting


def steps(setting: Setting) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield three calls of operators, then a model in training, eager and compiled."""
    ids = torch.randint(0, 1000, (16384,))
    weight = torch.randn(1000, 768)
    yield "embedding, 16,384 ids, 768 columns", "call", lambda: functional.embedding(ids, weight)
    few = torch.tensor([1, 2, 3])
    yield "embedding, 3 ids, 768 columns", "call", lambda: functional.embedding(few, weight)
    logits, labels = torch.randn(64, 32000), torch.randint(0, 32000, (64,))
    labels[0] = -100
    what = "cross_entropy, 64 rows, 32,000 classes"
    yield what, "call", lambda: functional.cross_entropy(logits, labels)
    torch.manual_seed(0)
    size = DecoderSize(128, 64, 16, 1, 2) if setting.quick else DecoderSize(8192, 64, 256, 4, 4)
    model = Decoder(size)
    batch = torch.randint(0, 100, (2, 64))
    yield "decoder", "eager, forward and backward", training(model, model, batch)
    if not setting.quick:
        compiled: Any = torch.compile(model, dynamic=False)
        yield "decoder", "compiled, forward and backward", training(model, compiled, batch)


def training(
    model: torch.nn.Module, call: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
) -> Callable[[], None]:
    """Return forward, loss and backward."""

    def step() -> None:
        logits = call(ids)
        functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        model.zero_grad()

    return step


def _cases(setting: Setting) -> Iterator[Case]:
    for what, phase, step in steps(setting):
        with torchguard.checked():
            step()  # compiles
        found = partial(guarded_step, step, torchguard.checked, setting)
        yield {"what": what, "phase": phase}, found


def run(setting: Setting) -> Results:
    """Measure each."""
    torchguard.uninstall()
    return {"rows": setting.collect(_cases(setting))}


BENCHMARK = Benchmark(
    "checks",
    "What does checked() cost an operator, a model, a compiled model?",
    run,
    rounds=21,
    devices=("cpu",),
    tables=(steps_table("in the scope", "rows"),),
)
