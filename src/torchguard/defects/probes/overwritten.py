"""A clone taken between two writes to an input holds both writes, compiled.

The clone is removed as a no-op, and the reinplacing pass computes the first write in the
input's own memory because a later ``copy_`` writes that input anyway. It does not ask
whether that ``copy_`` writes another value while the first one is still returned. A
functional ``slice_scatter`` of an input that is written later ends the same way.

https://github.com/pytorch/pytorch/issues/198094
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect


def _clone_between_writes(values: torch.Tensor) -> torch.Tensor:
    values[0] = 1
    between = values.clone()
    values[1] = 2
    return between


def probe() -> str | None:
    """Clone between two writes, compiled and eager."""
    eager = _clone_between_writes(torch.zeros(4))
    compiled = torch.compile(_clone_between_writes)(torch.zeros(4))
    if torch.equal(eager, compiled):
        return None
    return f"compiled gives {compiled.tolist()} where eager gives {eager.tolist()}"


DEFECT = Defect(
    id="overwritten",
    summary="compiled: a clone taken between two writes to x holds both of them",
    upstream=("https://github.com/pytorch/pytorch/issues/198094",),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice=(
        "Compute out of place (y = x.index_fill(0, row, 1)) "
        "and copy the result into x outside the compiled function."
    ),
)
