"""Sparse compressed tensors (CSR, CSC, BSR, BSC): what a resize_ that fails does to them.

torch resizes the row pointers first, in place, and then looks at the rest, so a call that
raises can leave ``crow_indices()`` with a shape that its memory does not have. They are out of
reach from here, so a tensor with the old row pointers takes their place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchguard._torch import (
    call_unrecorded,
    call_with_grad,
    set_version,
    version_of,
    without_torch_function,
)
from torchguard.rollback.interrupts import persist

__all__ = [
    "COMPRESSED",
    "Compressed",
    "capture_compressed",
    "restore_compressed",
    "torchs_copy_",
    "torchs_resize_as_sparse_",
]

# As torch has them: those that guarded() puts in their place look at the tensor first, and what is
# put back here may be unfit to be read.
torchs_copy_ = torch.Tensor.copy_
torchs_resize_as_sparse_ = torch.Tensor.resize_as_sparse_

COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_BY_ROWS = frozenset({torch.sparse_csr, torch.sparse_bsr})


class Compressed(NamedTuple):
    """What :func:`capture_compressed` read."""

    before: torch.Tensor
    """The tensor as it was: a copy of its row pointers, and its own indices and values."""

    storages: tuple[tuple[torch.UntypedStorage, int], ...]
    """Of row pointers, indices and values, with the number of bytes each had."""

    version: int | None


def capture_compressed(tensor: torch.Tensor) -> Compressed | None:
    """Remember a sparse compressed tensor; None for every other layout.

    Copies the row pointers, one number per row (or column), and shares the rest.
    """
    with without_torch_function():
        if tensor.layout not in COMPRESSED or tensor.is_meta:
            return None
        read: Compressed = call_with_grad(False, _read, tensor)
        return read


def _read(tensor: torch.Tensor) -> Compressed:
    by_rows = tensor.layout in _BY_ROWS
    pointers = tensor.crow_indices() if by_rows else tensor.ccol_indices()
    indices = tensor.col_indices() if by_rows else tensor.row_indices()
    values = tensor.values()
    before = torch.sparse_compressed_tensor(
        pointers.clone(),
        indices,
        values,
        tensor.shape,
        layout=tensor.layout,
        check_invariants=False,
    )
    storages = [part.untyped_storage() for part in (pointers, indices, values)]
    sizes = tuple((storage, storage.nbytes()) for storage in storages)
    return Compressed(before, sizes, version_of(tensor))


def restore_compressed(tensor: torch.Tensor, saved: Compressed) -> None:
    """Make the tensor what it was; like :func:`torchguard.rollback.metadata.restore`."""
    failure = (
        f"torchguard could not put a sparse tensor back to shape {saved.before.shape} after a "
        "failed operation"
    )
    with without_torch_function():
        persist(call_unrecorded, tensor, _restore, tensor, saved, failure=failure)


def _restore(tensor: torch.Tensor, saved: Compressed) -> None:
    torchs_resize_as_sparse_(tensor, saved.before)
    torchs_copy_(tensor, saved.before)
    for storage, nbytes in saved.storages:
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)
    if saved.version is not None:
        set_version(tensor, saved.version)
