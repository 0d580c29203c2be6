"""A product with a sparse CSR tensor reads out of bounds when an index is wrong.

``torch.sparse_csr_tensor`` does not check its indices by default, because that
takes time, and the products trust them: a column index past the last column
reads the memory behind the dense factor.

https://github.com/pytorch/pytorch/issues/190045
https://github.com/pytorch/pytorch/issues/141004
https://github.com/pytorch/pytorch/issues/195547
"""

from __future__ import annotations

import warnings

import torch

from torchguard.defects.catalog import Defect

_COLUMNS = 3


def _product(beyond: float) -> float:
    """Return a (1, 3) @ (3, 1) product whose column index is 3, with ``beyond`` in memory there."""
    # The dense factor is the start of a longer tensor, so the read out of bounds lands in
    # memory of ours.
    memory = torch.zeros(4 * _COLUMNS, 1)
    memory[_COLUMNS:] = beyond
    sparse = torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([_COLUMNS]), torch.ones(1), size=(1, _COLUMNS)
    )
    return (sparse @ memory[:_COLUMNS]).item()


def probe() -> str | None:
    """Compute one product twice: only memory that it must not read is different."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that CSR support is in beta state
        try:
            first, second = _product(1.0), _product(2.0)
        except (RuntimeError, IndexError, ValueError):
            return None
    if first == second:
        return None
    return f"column 3 of columns 0 to 2: product {first:g} or {second:g}, by the memory behind"


DEFECT = Defect(
    id="csr-unchecked",
    summary="sparse CSR indices are not checked: a product reads out of bounds",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/190045",
        "https://github.com/pytorch/pytorch/issues/141004",
        "https://github.com/pytorch/pytorch/issues/195547",
    ),
    family="memory",
    probe=probe,
    advice="Build sparse tensors under `with torch.sparse.check_sparse_tensor_invariants():`.",
)
