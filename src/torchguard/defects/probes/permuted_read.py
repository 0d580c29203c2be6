"""An index write into x, then an update of x that reads other positions, is wrong compiled.

The update ``x + x.flip(0)`` and its copy into x may run in one loop only if every element
is read where it is written. Inductor's scheduler looks for the reads under the name of the
input, but after the index write the same memory is read under the name of that write
(``Scheduler.fusable_weak_dep``): it finds none and fuses. In-place foreach operators do
the same by another way.

https://github.com/pytorch/pytorch/issues/198270
https://github.com/pytorch/pytorch/issues/198033
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect


def _write_then_flip(values: torch.Tensor) -> None:
    values[torch.arange(4)] = values * 2
    values.add_(values.flip(0))


def probe() -> str | None:
    """Write at indices and add the flipped tensor, compiled and eager."""
    eager, compiled = torch.arange(4.0), torch.arange(4.0)
    _write_then_flip(eager)
    torch.compile(_write_then_flip)(compiled)
    if torch.equal(eager, compiled):
        return None
    return f"compiled gives {compiled.tolist()} where eager gives {eager.tolist()}"


DEFECT = Defect(
    id="permuted-read",
    summary="compiled: an index write into x, then an update that reads x flipped, goes wrong",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/198270",
        "https://github.com/pytorch/pytorch/issues/198033",
    ),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice=(
        "Compute out of place (y = x.index_copy(0, rows, new); return y + y.flip(0)) "
        "and copy the result into x outside the compiled function."
    ),
)
