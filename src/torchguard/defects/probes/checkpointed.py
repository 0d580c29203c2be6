"""Checkpointed blocks whose second run, in backward, is not the first one again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from torchguard.defects.probes import gradient_defect, issues

_recompute_defect = partial(gradient_defect, guards=("recompute",))

_ADVICE = "Keep {} out of checkpointed blocks, or train without activation checkpointing."


def _checkpointed(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def _difference(block: Callable[[Tensor], Tensor], begin: Callable[[], object]) -> str | None:
    """Compare the gradient of the block's input, without checkpointing and with it."""
    found = []
    runs: list[Callable[[Tensor], Tensor]] = [block, lambda x: _checkpointed(block, x)]
    for run in runs:
        begin()
        x = torch.linspace(-2.0, 2.0, 8).requires_grad_(True)
        found.append(torch.autograd.grad(run(x).sum(), x)[0])
    plain, checkpointed = found
    if torch.allclose(plain, checkpointed):
        return None
    numbers = f"{checkpointed[0].item():.3g} where it is {plain[0].item():.3g}"
    return f"the gradient is {numbers} without checkpointing"


@_recompute_defect(
    "BatchNorm and running statistics inside torch.utils.checkpoint are updated twice",
    title="checkpoint() updates BatchNorm twice",
    upstream=issues(96136),
    advice=_ADVICE.format("BatchNorm"),
)
def recompute_buffers() -> str | None:
    """Count the batches of a BatchNorm: the second run of the block writes the buffers again."""
    norm = nn.BatchNorm1d(1)
    x = torch.ones(4, 1, requires_grad=True)
    _checkpointed(norm, x).sum().backward()
    counted = norm.num_batches_tracked
    return f"one batch is counted {counted} times" if counted != 1 else None


@_recompute_defect(
    "a checkpointed block reads what it has written: wrong gradients",
    title="checkpoint() reads what it wrote: wrong gradients",
    advice=_ADVICE.format("running statistics that forward reads"),
)
def recompute_reads() -> str | None:
    """Scale by a running statistic: the second run reads what the first one wrote."""

    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.scale.mul_(2.0)
            return (x * self.scale).sin()

    block = Scaled()
    return _difference(block, lambda: block.scale.fill_(1.0))


@_recompute_defect(
    "a checkpointed block draws from Python, numpy or its own generator: wrong gradients",
    title="checkpoint() draws other numbers: wrong gradients",
    advice=_ADVICE.format("random numbers that are not of torch's default generator"),
)
def recompute_random() -> str | None:
    """Draw from a torch.Generator: torch restores its default one alone."""
    generator = torch.Generator()

    def block(x: Tensor) -> Tensor:
        return (x * torch.rand((), generator=generator)).sin()

    return _difference(block, lambda: generator.manual_seed(0))


@_recompute_defect(
    "rrelu in training inside activation checkpointing has a wrong gradient",
    title="rrelu in checkpoint() has a wrong gradient",
    upstream=issues(193671),
    advice="Pass early_stop=False to checkpoint, or use_reentrant=True.",
)
def rrelu_checkpoint() -> str | None:
    """Take the gradient of rrelu, whose noise is what backward multiplies with.

    It is saved before it is drawn, and with the last saved tensor torch stops the second run.
    """
    block = partial(nn.functional.rrelu, training=True)
    return _difference(block, lambda: torch.manual_seed(0))
