"""``x[1:] = x[:-1].clone()`` becomes a copy over overlapping memory, compiled.

Inductor removes the clone as a no-op while the graph is still functional. The reinplacing
pass then turns the assignment into ``x[1:].copy_(x[:-1])`` without a look at whether the
source is a view of the memory it writes.

https://github.com/pytorch/pytorch/issues/197829
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect


def _shift(values: torch.Tensor) -> None:
    values[1:] = values[:-1].clone()


def probe() -> str | None:
    """Shift by one, compiled and eager."""
    eager, compiled = torch.arange(4.0), torch.arange(4.0)
    _shift(eager)
    torch.compile(_shift)(compiled)
    if torch.equal(eager, compiled):
        return None
    return f"compiled gives {compiled.tolist()} where eager gives {eager.tolist()}"


DEFECT = Defect(
    id="shift-overlap",
    summary="compiled: x[1:] = x[:-1].clone() becomes a copy over overlapping memory",
    upstream=("https://github.com/pytorch/pytorch/issues/197829",),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice=(
        "Return torch.cat((x[:1], x[:-1])) from the compiled function and copy it into x outside."
    ),
)
