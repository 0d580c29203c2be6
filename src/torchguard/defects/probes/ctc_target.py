"""``ctc_loss`` on CPU reads out of bounds when a target is no class.

The CPU kernel uses the target as an index into ``log_probs`` without comparing
it with the number of classes: a target slightly out of range returns a loss made
of whatever memory follows, one far out of range kills the process.

https://github.com/pytorch/pytorch/issues/193794
"""

from __future__ import annotations

import torch
from torch.nn import functional

from torchguard.defects.catalog import Defect

_CLASSES = 3


def _loss(beyond: float) -> float:
    """Return the loss of a target one past the last class, with ``beyond`` in memory there."""
    # T = 2 steps, N = 1 sequence; the classes are the first columns of a wider tensor, so
    # the read out of bounds lands in memory of ours.
    memory = torch.full((2, 1, 2 * _CLASSES), -1.0)
    memory[..., _CLASSES:] = beyond
    log_probs = memory[..., :_CLASSES]
    lengths = torch.tensor([2]), torch.tensor([1])
    return functional.ctc_loss(log_probs, torch.tensor([[_CLASSES]]), *lengths).item()


def probe() -> str | None:
    """Compute one loss twice: only memory that the loss must not read is different."""
    try:
        first, second = _loss(-2.0), _loss(-4.0)
    except (RuntimeError, IndexError, ValueError):
        return None
    if first == second:
        return None
    return f"target 3 of classes 0 to 2: loss {first:.3g} or {second:.3g}, by the memory behind"


DEFECT = Defect(
    id="ctc-target",
    summary="ctc_loss on CPU does not check targets: a loss from foreign memory, or a crash",
    upstream=("https://github.com/pytorch/pytorch/issues/193794",),
    family="memory",
    probe=probe,
    advice="Check targets first: assert 0 <= targets.min() and targets.max() < log_probs.size(-1).",
)
