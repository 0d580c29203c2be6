"""A value read through a dtype view is evaluated after a later write to the base, compiled.

Where the element sizes differ, inductor makes the view with a call to
``aten.view.dtype``, whose result has a name of its own. Before it writes an input it
computes what is pending on the input's name (``GraphLowering.mark_buffer_mutated``), and
what is pending on the view's name is left for later, when the memory has changed.

https://github.com/pytorch/pytorch/issues/198101
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect


def _read_then_fill(values: torch.Tensor) -> torch.Tensor:
    halves = values.view(torch.int16) * 2
    halves.add_(4)
    values.fill_(7)
    return halves.view(torch.int32)


def probe() -> str | None:
    """Read through a view, then fill the base, compiled and eager."""
    values = torch.zeros(2, dtype=torch.int32)
    eager = _read_then_fill(values.clone()).view(torch.int16)
    compiled = torch.compile(_read_then_fill)(values.clone()).view(torch.int16)
    if torch.equal(eager, compiled):
        return None
    return f"compiled gives {compiled.tolist()} where eager gives {eager.tolist()}"


DEFECT = Defect(
    id="dtype-view",
    summary="compiled: a value read through a dtype view is computed after a later write",
    upstream=("https://github.com/pytorch/pytorch/issues/198101",),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice="Write the tensor that was viewed outside the compiled function.",
)
