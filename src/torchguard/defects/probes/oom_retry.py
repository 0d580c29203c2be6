"""Retrying a step after a caught out-of-memory error trains on the wrong numbers.

Nothing of a step is undone when it fails: gradients that the backward had
accumulated before the failure stay and are added again, BatchNorm counts the
batch and updates its running statistics again in the second forward, and
GradScaler refuses a second ``unscale_`` because the first never reached
``update``.

Nobody has reported it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

from torchguard.defects.catalog import Defect

_BATCH = 4


def _run_out_of_memory(_gradient: Tensor) -> None:
    torch.empty(2**50)  # 4 PiB: no machine has them


def _train_with_one_retry() -> tuple[float, int]:
    """Return the gradient of the last bias and BatchNorm's count after a failure and a retry."""
    norm, last = nn.BatchNorm1d(2), nn.Linear(2, 1)
    for memory_runs_out in (True, False):
        inputs = torch.arange(2.0 * _BATCH).reshape(_BATCH, 2).requires_grad_()
        if memory_runs_out:
            # Called at the end of the backward, when `last` and `norm` have their gradients.
            inputs.register_hook(_run_out_of_memory)
        try:
            last(norm(inputs)).sum().backward()
        except RuntimeError:
            continue
    gradient, count = last.bias.grad, norm.num_batches_tracked
    return (0.0 if gradient is None else gradient.item()), (0 if count is None else int(count))


def _scaler_refuses_the_retry() -> bool:
    weight = nn.Parameter(torch.ones(1))
    # All that unscale_ reads of an optimizer; a real one would import torch's compiler here.
    optimizer = cast("torch.optim.Optimizer", SimpleNamespace(param_groups=[{"params": [weight]}]))
    scaler = torch.amp.GradScaler("cpu")
    for attempt in range(2):
        weight.grad = None
        scaler.scale(weight.sum()).backward()
        try:
            scaler.unscale_(optimizer)
        except RuntimeError:
            return attempt == 1
        # Here the first step() runs out of memory, so update() is never reached.
    return False


def probe() -> str | None:
    """Let a backward run out of memory once, repeat the step and look at what is different."""
    gradient, batches = _train_with_one_retry()
    seen: list[str] = []
    if gradient != _BATCH:
        seen.append(f"gradient {gradient:g}, right is {_BATCH}")
    if batches != 1:
        seen.append(f"BatchNorm counted {batches} of 1 batch")
    if _scaler_refuses_the_retry():
        seen.append("GradScaler stuck")
    return f"after a retry: {', '.join(seen)}" if seen else None


DEFECT = Defect(
    id="oom-retry",
    summary="a step retried after out of memory has doubled gradients and counts its batch twice",
    upstream=(),
    family="memory",
    probe=probe,
    advice=(
        "Before the retry, call optimizer.zero_grad(), restore BatchNorm's buffers from a copy "
        "and make a new GradScaler from its state_dict()."
    ),
)
