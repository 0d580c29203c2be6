"""Compiled for a GPU, ``F.pad`` of a sum can lose its fill value (``cu_seqlens``).

A sum over a long dim is split in two kernels. Where the padded result has as many elements
as there are partial sums, inductor computes the padding in the second kernel. There the
padding reads the sum from a register, but ``TritonOverrides.masked``
(``torch/_inductor/codegen/triton.py``) still leaves the fill value to a masked load, which
no longer exists: the test for the border is computed and not used. One sequence of 8193
to 16384 tokens, a cumulative sum and ``F.pad(..., (1, 0))``, as every user of
variable-length flash attention writes it, is enough. The kernel is wrong from 2.8 to 2.13
and right in 2.15.

https://github.com/pytorch/pytorch/issues/189895
"""

from __future__ import annotations

import torch
from torch.nn import functional

from torchguard.defects.catalog import Defect, NotRunHere


def _sequence_bounds(mask: torch.Tensor) -> torch.Tensor:
    """Return where each sequence of a batch begins and ends (B + 1) from its mask (B, T)."""
    ends = mask.sum(dim=-1, dtype=torch.int32).cumsum(dim=0, dtype=torch.int32)
    return functional.pad(ends, (1, 0))


def _compare(device: str) -> str | None:
    # Inductor sums 8192 elements to a partial sum: 2 of them, and 2 bounds.
    mask = torch.ones(1, 16384, dtype=torch.bool, device=device)
    eager = _sequence_bounds(mask).tolist()
    compiled = torch.compile(_sequence_bounds)(mask).tolist()
    return None if compiled == eager else f"bounds of one sequence: {compiled}, not {eager}"


def probe() -> str | None:
    """Compare the bounds of one long sequence with eager, on a GPU."""
    if not torch.cuda.is_available():
        raise NotRunHere("needs a CUDA GPU")
    return _compare("cuda")


DEFECT = Defect(
    id="pad-reduction",
    summary="compiled, GPU: F.pad of a long sum loses its fill value (flash attention cu_seqlens)",
    upstream=("https://github.com/pytorch/pytorch/issues/189895",),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice="Write torch.cat([ends.new_zeros(1), ends]) instead of F.pad(ends, (1, 0)).",
)
