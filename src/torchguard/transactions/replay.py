"""replay(): forward and backward twice on one batch, and the bits compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchguard._torch.optimizers import call_unseen
from torchguard.errors import ReplayMismatchError
from torchguard.rollback.interrupts import finish
from torchguard.transactions.state import TrainingState

__all__ = ["replay"]


def replay(training: TrainingState, times: int) -> Iterator[int]:
    """Yield ``times`` times, each time with the training as it was at the first."""
    if times < 2:  # noqa: PLR2004  once compares nothing
        raise ValueError(f"replay: times is {times}, expected 2 or more")
    snapshot = training.capture()
    first: dict[str, Tensor | None] = {}
    finished = False
    try:
        for number in range(times):
            if number:
                # Dropout has to draw the same numbers, and BatchNorm to begin with the same mean.
                finish(snapshot.restore)
            yield number
            if number == 0:
                first = call_unseen(_copies, training)
            else:
                call_unseen(_compare, first, training, number)
        finished = True
    finally:
        if not finished:
            finish(snapshot.restore)


def _results(training: TrainingState) -> Iterator[tuple[str, Tensor | None]]:
    """Yield what forward and backward write: gradients, then buffers."""
    for number, module in enumerate(training.modules):
        model = "model" if len(training.modules) == 1 else f"model[{number}]"
        for name, parameter in module.named_parameters():
            yield f"the gradient of {model}.{name}", parameter.grad
        for name, buffer in module.named_buffers():
            yield f"the buffer {model}.{name}", buffer


def _copies(training: TrainingState) -> dict[str, Tensor | None]:
    return {name: None if t is None else t.detach().clone() for name, t in _results(training)}


def _compare(first: dict[str, Tensor | None], training: TrainingState, number: int) -> None:
    for name, tensor in _results(training):
        before = first.get(name)
        if before is None or tensor is None:
            same = before is tensor
        else:
            same = before.shape == tensor.shape and _same_bits(before, tensor.detach())
        if not same:
            raise ReplayMismatchError(
                f"{name} has other bits in run {number + 1} than in run 1 on the same batch, with "
                "the same random numbers: an operator is not deterministic (see "
                "torch.use_deterministic_algorithms), or the hardware made an error"
            )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or one.dtype != other.dtype:
        return torch.equal(one.to_dense(), other.to_dense())
    # As bytes: two NaN are not equal, and 0.0 equals -0.0.
    flat = [each.contiguous().view(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)
