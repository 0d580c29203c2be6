"""Draws docs/img/bucketed-graphs.png: what reaches the compiler over a stream of batches.

    python docs/make_bucketed_plots.py

Counts, not times: the same on every machine. The backend only counts graphs and calls.
"""  # noqa: INP001

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchguard import Buckets, bucketed

IMAGE = Path(__file__).parent / "img" / "bucketed-graphs.png"
BATCHES = 60


def lengths() -> list[int]:
    """Draw the longest of 8 log-normal lengths, for every batch."""
    drawn = np.random.default_rng(0).lognormal(4.3, 0.7, (BATCHES, 8)).clip(4, 512)
    return [int(each) for each in drawn.max(1)]


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Stand for a model."""
    return x * 2


def stream(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> tuple[list[int], list[int]]:
    """Return graphs compiled and calls that ran uncompiled, after each batch."""
    torch.compiler.reset()
    graphs = compiled_calls = 0

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1

        def run(*inputs: Any) -> Any:
            nonlocal compiled_calls
            compiled_calls += 1
            return graph.forward(*inputs)

        return run

    call = wrap(backend)
    graphs_after, uncompiled_after = [], []
    for calls, length in enumerate(lengths(), start=1):
        call(torch.ones(8, length))
        graphs_after.append(graphs)
        uncompiled_after.append(calls - compiled_calls)
    return graphs_after, uncompiled_after


def ways() -> dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return what the picture compares."""
    buckets = Buckets.fit(lengths(), 8, multiple_of=8, maximum=512)
    return {
        "torch.compile(dynamic=False)": lambda backend: torch.compile(
            scaled, backend=backend, dynamic=False
        ),
        "torch.compile, symbolic from the second size on": lambda backend: torch.compile(
            scaled, backend=backend
        ),
        "bucketed, 8 buckets, all static": lambda backend: bucketed(
            scaled, dims={"x": {1: "t"}}, buckets=buckets, compile={"backend": backend}
        ),
    }


def main() -> int:
    """Draw it."""
    import matplotlib.pyplot as plt  # noqa: PLC0415 - the extra `plot`

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for label, wrap in ways().items():
        graphs, uncompiled = stream(wrap)
        left.plot(range(1, BATCHES + 1), graphs, label=label)
        right.plot(range(1, BATCHES + 1), uncompiled, label=label)
    left.set(title="graphs compiled", xlabel="batches")
    right.set(title="calls that ran uncompiled, without a word", xlabel="batches")
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(IMAGE, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
