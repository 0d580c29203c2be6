"""A compiled function that writes into its argument and returns a copy returns the argument.

AOTAutograd writes an in-place update of an input back with a ``copy_`` at the end of
the graph. Inductor carries the update out in the input's own memory
(``reinplace_inplaceable_ops`` in ``torch/_inductor/fx_passes/reinplace.py``), then
replaces the written value by the input everywhere, also where the function returns it;
a ``clone()`` in between is gone by then (``remove_noop_ops`` in ``post_grad.py``). The
caller gets an alias of its own argument.

https://github.com/pytorch/pytorch/issues/195451
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect


def _write_and_copy(x: torch.Tensor) -> torch.Tensor:
    x[0] = 1.0
    return x.clone()


def probe() -> str | None:
    """Update the returned copy in place and see whether the argument changes with it."""
    eager, compiled = torch.zeros(4), torch.zeros(4)
    _write_and_copy(eager).add_(1.0)
    torch.compile(_write_and_copy)(compiled).add_(1.0)
    if torch.equal(compiled, eager):
        return None
    return "x[0] = 1; return x.clone(): the result shares memory with x"


DEFECT = Defect(
    id="result-aliases",
    summary="compiled: the returned copy is the updated input itself, even through .clone()",
    upstream=("https://github.com/pytorch/pytorch/issues/195451",),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice="Call .clone() on the result outside the compiled function before updating it in place.",
)
