"""What ``checked()`` costs: an operator, a model's step, the same compiled.

    python benchmarks/bench_checks.py --json benchmarks/records/<date>-checks-cpu.json

Plain torch and the scope take turns; each step runs in a scope that is open already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

if __package__ in {None, ""}:  # run as a file: the folder on the path is this one
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torchguard
from benchmarks.bench_overlap import compared
from benchmarks.models import Decoder, DecoderSize
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Table


def steps(setting: Setting) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Yield two operators, then a model in training, eager and compiled."""
    ids = torch.randint(0, 1000, (16384,))
    weight = torch.randn(1000, 768)
    yield "embedding, 16,384 ids, 768 columns", "call", lambda: functional.embedding(ids, weight)
    few = torch.tensor([1, 2, 3])
    yield "embedding, 3 ids, 768 columns", "call", lambda: functional.embedding(few, weight)
    logits, labels = torch.randn(64, 32000), torch.randint(0, 32000, (64,))
    labels[0] = -100
    yield (
        "cross_entropy, 64 rows, 32,000 classes",
        "call",
        lambda: functional.cross_entropy(logits, labels),
    )
    torch.manual_seed(0)
    model = Decoder(DecoderSize(vocabulary=8192, context=64, width=256, layers=4, heads=4))
    batch = torch.randint(0, 100, (2, 64))
    yield "decoder", "eager, forward and backward", training(model, model, batch)
    if not setting.quick:
        yield "decoder", "compiled, forward and backward", training(
            model, torch.compile(model, dynamic=False), batch
        )  # fmt: skip


def training(
    model: torch.nn.Module, call: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
) -> Callable[[], None]:
    """Return forward, loss and backward."""

    def step() -> None:
        logits = call(ids)
        functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        model.zero_grad()

    return step


def run(setting: Setting) -> Results:
    """Measure each."""
    torchguard.uninstall()
    found = []
    for what, phase, step in steps(setting):
        with torchguard.checked():
            step()  # compiles
        found.append(compared(what, phase, step, setting, torchguard.checked))
        row = found[-1]
        print(
            f"{what[:44]:44} {phase:30} {row.nothing_ms.median:.3g} ms "
            f"{row.ratio.median:.4f} times [{row.ratio.low:.4f}, {row.ratio.high:.4f}], "
            f"control {row.control.median:.4f}: {row.verdict}"
        )
    return {"rows": found}


BENCHMARK = Benchmark(
    "checks",
    "What does checked() cost an operator, a model, a compiled model?",
    run,
    rounds=21,
    rounds_of="rounds per step",
    devices=("cpu",),
    tables=(
        Table(
            {
                "step": "{what}, {phase}",
                "plain": "{nothing_ms.median:.3g} ms",
                "in the scope [95 %]": "{ratio.median:.3f} times [{ratio.low:.3f}, "
                "{ratio.high:.3f}]",
                "plain, once more [95 %]": "{control.median:.3f} [{control.low:.3f}, "
                "{control.high:.3f}]",
                "verdict": "{verdict}",
            },
        ),
    ),
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
