"""An in-place update through ``F.dropout(x, training=False)`` is lost, compiled.

Eager dropout outside training returns its input itself. The decomposition that
AOTAutograd traces returns a clone instead, so the update goes to the clone.

https://github.com/pytorch/pytorch/issues/195422
"""

from __future__ import annotations

import torch
from torch.nn import functional

from torchguard.defects.catalog import Defect


def _add_through_dropout(values: torch.Tensor) -> None:
    functional.dropout(values, 0.5, training=False).add_(1)


def probe() -> str | None:
    """Add 1 through the dropout, compiled and eager."""
    eager, compiled = torch.zeros(2), torch.zeros(2)
    _add_through_dropout(eager)
    torch.compile(_add_through_dropout)(compiled)
    if torch.equal(eager, compiled):
        return None
    return f"compiled leaves {compiled.tolist()} where eager leaves {eager.tolist()}"


DEFECT = Defect(
    id="mutation-dropped",
    summary="compiled: an in-place update through F.dropout(x, training=False) is lost",
    upstream=("https://github.com/pytorch/pytorch/issues/195422",),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice="Update the input itself, not what F.dropout returned.",
)
