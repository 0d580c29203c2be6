"""An index write that is right only into memory of its own is done in place.

``index_put`` makes a copy, then writes. Inductor drops the copy when nothing reads the
original afterwards, in two cases too many:

- Up to 2.13 ``can_inplace`` (``torch/_inductor/fx_passes/reinplace.py``) allows an expanded
  view, whose rows are one and the same memory: all of them change. ``index_select`` under
  ``vmap(grad(...))`` has such a write in its gradient.
- In ``x[index] += 1`` an index that occurs twice has to read the old value twice. The
  lowering of ``index_put`` stores what is read in a buffer of its own (2.6 did not: issue
  138908), but where the graph computes the indices itself, reads and writes have the same
  index expression, the scheduler makes one loop of them, and the second read sees the first
  write. That is so up to 2.15.

https://github.com/pytorch/pytorch/issues/188084
https://github.com/pytorch/pytorch/issues/183986
https://github.com/pytorch/pytorch/issues/175791
https://github.com/pytorch/pytorch/issues/174074
https://github.com/pytorch/pytorch/issues/138908
https://github.com/pytorch/pytorch/issues/197582
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect


def _write(row: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return 3 rows of which the first is overwritten; add 1 to the first two ``counts``."""
    first = torch.tensor([0])
    rows = (row * 2).expand(3, 2).index_put((first,), row)
    twice = torch.arange(4) % 2  # 0, 1, 0, 1
    counts[twice] += 1
    return rows


def probe() -> str | None:
    """Compare both writes, compiled in one graph, with eager."""
    row = torch.ones(1, 2)
    eager_counts, counts = torch.arange(4.0), torch.arange(4.0)
    eager_rows = _write(row, eager_counts)
    rows = torch.compile(_write)(row, counts)
    seen = []
    if not torch.equal(rows, eager_rows):
        seen.append("a write to one row of an expanded view hit all")
    if not torch.equal(counts, eager_counts):
        seen.append("x[0, 1, 0, 1] += 1 added twice")
    return "; ".join(seen) or None


DEFECT = Defect(
    id="expand-duplicate",
    summary="compiled: a write into an expanded view, or at an index given twice, is wrong",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/188084",
        "https://github.com/pytorch/pytorch/issues/183986",
        "https://github.com/pytorch/pytorch/issues/175791",
        "https://github.com/pytorch/pytorch/issues/174074",
        "https://github.com/pytorch/pytorch/issues/138908",
        "https://github.com/pytorch/pytorch/issues/197582",
    ),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice=(
        "Write x = x.index_put((index,), x[index] + 1) for x[index] += 1, and clone() an "
        "expanded view before writing into it."
    ),
)
