"""Eager raises, the compiled function returns a value.

The decompositions that inductor compiles leave out what the eager kernels check.
``index_select``, ``index_add`` and ``index_copy`` become plain indexing, where -1 is the
last row: a padding id of -1 reads or writes a real row. ``binary_cross_entropy`` becomes
two logarithms, and the test of its range is a comment in the decomposition.

https://github.com/pytorch/pytorch/issues/197554
https://github.com/pytorch/pytorch/issues/183608
https://github.com/pytorch/pytorch/issues/151918
https://github.com/pytorch/pytorch/issues/169779
https://github.com/pytorch/pytorch/issues/185885
https://github.com/pytorch/pytorch/issues/182965
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from torchguard.defects.catalog import Defect

if TYPE_CHECKING:
    from collections.abc import Callable

_CHECKED = ("index_select", "index_add", "index_copy", "binary_cross_entropy")
"""The operators of ``_checked``, in the order of its arguments."""


def _checked(
    selected: torch.Tensor, added: torch.Tensor, copied: torch.Tensor, chance: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    rows = torch.ones(3, 2)
    return (
        rows.index_select(0, selected),
        rows.index_add(0, added, rows[:1]),
        rows.index_copy(0, copied, rows[:1]),
        functional.binary_cross_entropy(chance, torch.ones(1)),
    )


def probe() -> str | None:
    """Call each operator with the one input that eager rejects."""
    first, last = torch.tensor([0]), torch.tensor([-1])
    valid = [first, first.clone(), first.clone(), torch.tensor([0.5])]
    invalid = [last, last.clone(), last.clone(), torch.tensor([1.5])]
    compiled = torch.compile(_checked)
    compiled(*valid)  # a failing compilation must not pass for a check that is kept
    lost = []
    for position, name in enumerate(_CHECKED):
        inputs = [*valid[:position], invalid[position], *valid[position + 1 :]]
        if _raises(_checked, inputs) and not _raises(compiled, inputs):
            lost.append(name)
    return f"accepted where eager raises: {', '.join(lost)}" if lost else None


def _raises(function: Callable[..., object], inputs: list[torch.Tensor]) -> bool:
    try:
        function(*inputs)
    except (IndexError, RuntimeError):
        return True
    return False


DEFECT = Defect(
    id="checks-lost",
    summary="compiled: index -1 or a probability of 1.5 gives a value where eager raises",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/197554",
        "https://github.com/pytorch/pytorch/issues/183608",
        "https://github.com/pytorch/pytorch/issues/151918",
        "https://github.com/pytorch/pytorch/issues/169779",
        "https://github.com/pytorch/pytorch/issues/185885",
        "https://github.com/pytorch/pytorch/issues/182965",
    ),
    family="compile",
    probe=probe,
    advice="Check indices and probabilities before they enter the compiled function.",
)
