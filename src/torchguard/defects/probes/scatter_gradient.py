"""The compiled gradient of ``slice_scatter`` and its kin is wrong for the input.

The gradient for the input is the output's gradient with zeros scattered into it. After
``.sum()`` the output's gradient is one number, expanded (stride 0), and up to 2.11 the
shape rules of ``slice_scatter`` and ``select_scatter`` (``torch/_meta_registrations.py``)
and the reference of ``diagonal_scatter`` (``torch/_refs``) keep the strides of what they
scatter into. Inductor believes them and lets all positions share one element, where
eager makes an ordinary copy first. So every position gets the gradient, or none.

https://github.com/pytorch/pytorch/issues/180164
https://github.com/pytorch/pytorch/issues/180771
https://github.com/pytorch/pytorch/issues/180772
https://github.com/pytorch/pytorch/issues/183898
https://github.com/pytorch/pytorch/issues/183602
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect

_OPERATORS = "slice_scatter", "select_scatter", "diagonal_scatter"


def _loss(
    for_slice: torch.Tensor, for_select: torch.Tensor, for_diagonal: torch.Tensor
) -> torch.Tensor:
    row = for_slice.new_zeros(3)
    return (
        torch.slice_scatter(for_slice, row[None], dim=0, start=1, end=2).sum()
        + torch.select_scatter(for_select, row, dim=0, index=1).sum()
        + torch.diagonal_scatter(for_diagonal, row).sum()
    )


def probe() -> str | None:
    """Compare the gradients of the three operators, compiled in one graph, with eager."""
    wrong = []
    eager = [torch.ones(3, 3, requires_grad=True) for _ in _OPERATORS]
    compiled = [torch.ones(3, 3, requires_grad=True) for _ in _OPERATORS]
    _loss(*eager).backward()
    torch.compile(_loss)(*compiled).backward()
    for name, expected, actual in zip(_OPERATORS, eager, compiled, strict=True):
        if expected.grad is None or actual.grad is None:
            raise AssertionError(name)
        if not torch.equal(actual.grad, expected.grad):
            wrong.append(name)
    return f"wrong input gradient: {', '.join(wrong)}" if wrong else None


DEFECT = Defect(
    id="scatter-gradient",
    summary="compiled: wrong input gradient of slice_scatter, select_scatter, diagonal_scatter",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/180164",
        "https://github.com/pytorch/pytorch/issues/180771",
        "https://github.com/pytorch/pytorch/issues/180772",
        "https://github.com/pytorch/pytorch/issues/183898",
        "https://github.com/pytorch/pytorch/issues/183602",
    ),
    family="gradient",
    probe=probe,
    guards=("slice_scatter",),
    advice="Write out = x.clone(); out[start:end] = source instead of torch.slice_scatter.",
)
