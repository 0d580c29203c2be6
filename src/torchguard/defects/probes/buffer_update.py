"""A module that updates a buffer in forward is trained compiled with wrong gradients.

AOTAutograd's min-cut partitioner saves the buffer for the backward pass and recomputes
there what forward had read from it. Forward writes the buffer within the graph, so the
backward pass reads the updated values, and autograd's version check sees nothing.

https://github.com/pytorch/pytorch/pull/197039
"""

from __future__ import annotations

import copy

import torch

from torchguard.defects.catalog import Defect


class _RunningNorm(torch.nn.Module):
    """Scales by the variance of the batches so far, then counts this one in."""

    variance: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("variance", torch.ones(2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scaled = batch * self.variance.rsqrt() * self.weight
        self.variance.lerp_(batch.square().mean(0), 0.5)
        return scaled.sum()


def probe() -> str | None:
    """Compare the weight's gradient after one step, compiled and eager."""
    eager = _RunningNorm()
    compiled = copy.deepcopy(eager)
    batch = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    eager(batch).backward()
    torch.compile(compiled)(batch).backward()
    want, got = eager.weight.grad, compiled.weight.grad
    if want is None or got is None:
        raise RuntimeError("backward left no gradient")
    if torch.allclose(want, got):
        return None
    return f"compiled gradient {_short(got)} where eager gives {_short(want)}"


def _short(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


DEFECT = Defect(
    id="buffer-update",
    summary="compiled: a module that updates a statistics buffer in forward gets wrong gradients",
    upstream=("https://github.com/pytorch/pytorch/pull/197039",),
    family="gradient",
    probe=probe,
    guards=("verify",),
    advice=(
        "Replace the buffer instead of writing into it: "
        "self.variance = self.variance.lerp(new, 0.1), not lerp_."
    ),
)
