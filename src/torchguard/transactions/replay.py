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
    first: dict[str, _Bits | None] = {}
    finished = False
    try:
        for number in range(times):
            if number:
                # Dropout has to draw the same numbers, and BatchNorm to begin with the same mean.
                finish(snapshot.restore)
            yield number
            if number:
                call_unseen(_compare, first, training, number)
            else:
                first = {name: call_unseen(_bits, each) for name, each in _results(training)}
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


_Bits = tuple[torch.Size, Tensor]


def _bits(tensor: Tensor | None) -> _Bits | None:
    """Return a shape and a copy of the elements as bytes: so NaN equals NaN, and 0.0 not -0.0."""
    if tensor is None:
        return None
    dense = (tensor if tensor.layout is torch.strided else tensor.to_dense()).detach()
    copied = dense.clone(memory_format=torch.contiguous_format)
    return tensor.shape, copied.view(-1).view(torch.uint8)


def _compare(first: dict[str, _Bits | None], training: TrainingState, number: int) -> None:
    for name, tensor in _results(training):
        before, now = first.get(name), _bits(tensor)
        if before is None or now is None:
            same = before is now
        else:
            same = before[0] == now[0] and torch.equal(before[1], now[1])
        if not same:
            raise ReplayMismatchError(
                f"{name} has other bits in run {number + 1} than in run 1 on the same batch, with "
                "the same random numbers: an operator is not deterministic (see "
                "torch.use_deterministic_algorithms), or the hardware made an error"
            )
