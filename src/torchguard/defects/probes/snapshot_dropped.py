"""A copy of an input that is written later is dropped: a swap leaves both the same.

Inductor's ``remove_noop_ops`` replaces ``saved = a.clone()`` by ``a``, which is right only
as long as nothing writes ``a``. The writes to graph inputs come after it in the graph, so
``b.copy_(saved)`` then copies what ``a`` has become.

https://github.com/pytorch/pytorch/issues/198131
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect


def _swap(first: torch.Tensor, second: torch.Tensor) -> None:
    saved = first.clone()
    first.copy_(second)
    second.copy_(saved)


def probe() -> str | None:
    """Swap two tensors, compiled and eager."""
    first, second = torch.zeros(2), torch.ones(2)
    eager = first.clone(), second.clone()
    _swap(*eager)
    torch.compile(_swap)(first, second)
    if torch.equal(first, eager[0]) and torch.equal(second, eager[1]):
        return None
    want = " and ".join(str(value.tolist()) for value in eager)
    return f"swap gives {first.tolist()} and {second.tolist()}, eager {want}"


DEFECT = Defect(
    id="snapshot-dropped",
    summary="compiled: swapping two tensors by way of a clone leaves both the same",
    upstream=("https://github.com/pytorch/pytorch/issues/198131",),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice=(
        "Return the new values from the compiled function and copy them into their tensors outside."
    ),
)
