"""A tensor's metadata: read it, and put it back after an operation has failed.

Metadata is what a tensor is besides its bytes: size, stride, storage offset,
which storage, how many bytes that storage holds, and the version counter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchguard._torch import (
    call_unrecorded,
    has_own_dispatch,
    has_torch_function_unary,
    inner_tensors,
    set_version,
    version_of,
    without_dispatch_modes,
    without_torch_function,
)
from torchguard.rollback.interrupts import persist

__all__ = [
    "Metadata",
    "bytes_needed",
    "capture",
    "read_stride_and_offset",
    "restore",
    "torchs_set_",
]

torchs_set_ = torch.Tensor.set_
"""``set_`` as torch has it, also while install() has another one in its place.

That one reads the tensor first, and what is put back here may be unfit to be read.
"""


class Metadata(NamedTuple):
    """What :func:`capture` read. Holds the storage alive, so ``set_`` can be undone too."""

    size: torch.Size
    stride: tuple[int, ...]
    storage_offset: int
    storage: torch.UntypedStorage
    nbytes: int
    version: int | None
    parts: tuple[tuple[torch.Tensor, Metadata], ...] = ()
    """The tensors a wrapper subclass holds, each with its own metadata."""


def capture(tensor: torch.Tensor) -> Metadata | None:
    """Read a tensor's metadata, unseen by subclasses and modes.

    None where torch has no such metadata: sparse, nested, opaque layouts and the
    wrappers of ``torch.func``. Their failing operations have nothing to restore.
    """
    if has_torch_function_unary(tensor):
        with without_torch_function():
            return _read(tensor)
    return _read(tensor)


def _read(tensor: torch.Tensor) -> Metadata | None:
    parts: tuple[tuple[torch.Tensor, Metadata], ...] = ()
    if type(tensor) is not torch.Tensor:
        inner = [(part, _read(part)) for _, part in inner_tensors(tensor)]
        parts = tuple((part, saved) for part, saved in inner if saved is not None)
    try:
        storage = tensor.untyped_storage()
        return Metadata(
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),  # type: ignore[arg-type]  # symbolic in a compiler
            storage,
            storage.nbytes(),
            version_of(tensor),
            parts,
        )
    except RuntimeError:  # NotImplementedError included: no storage, or no strides
        return None


def restore(tensor: torch.Tensor, saved: Metadata, *, version: int | None) -> None:
    """Put the captured metadata back; the version counter becomes ``version``.

    The other aliases of the storage are untouched, because the storage gets back
    the number of bytes it had. May be called again and again. Raises nothing of its own:
    it runs while another exception is on its way, and that one is what the caller has to see.
    """
    failure = (
        f"torchguard could not put a tensor back to shape {saved.size} after a failed operation"
    )
    persist(_restore, tensor, saved, version, failure=failure)


def _restore(tensor: torch.Tensor, saved: Metadata, version: int | None) -> None:
    with without_torch_function():
        for part, metadata in saved.parts:
            wrote = version != saved.version
            restore(part, metadata, version=version_of(part) if wrote else metadata.version)
        # A wrapper is what its parts are; its own set_ would reach one of them.
        if not saved.parts and not _is_as_saved(tensor, saved):
            call_unrecorded(tensor, _put_back, tensor, saved)
        if version is not None and version_of(tensor) != version:
            set_version(tensor, version)


def _is_as_saved(tensor: torch.Tensor, saved: Metadata) -> bool:
    try:
        if tensor.shape != saved.size:
            return False
        storage = tensor.untyped_storage()
        return (
            read_stride_and_offset(tensor) == (saved.stride, saved.storage_offset)
            and storage is saved.storage
            and storage.nbytes() == saved.nbytes
        )
    except RuntimeError:  # NotImplementedError included: no storage, or no strides
        return False


def read_stride_and_offset(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """``tensor.stride(), tensor.storage_offset()`` of a tensor that may be inconsistent.

    A resize_ that fails with "Stride calculation overflowed" leaves strides that are wrapped
    around, and up to 2.9 a set_ that fails leaves the numbers it was given. Some negative numbers
    are taken for the address of a symbolic one by the methods, which ends the process; the
    operators hand them over as they are.
    """
    if has_own_dispatch(tensor):
        return tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]  # symbolic
    with without_dispatch_modes(tensor):
        stride = tuple(torch.ops.aten.stride.default(tensor))
        return stride, torch.ops.aten.storage_offset.default(tensor)


def _put_back(tensor: torch.Tensor, saved: Metadata) -> None:
    with without_dispatch_modes(tensor):
        # resize_ grows the storage before it looks at the memory format.
        if saved.storage.nbytes() != saved.nbytes:
            saved.storage.resize_(saved.nbytes)
            if _is_as_saved(tensor, saved):
                return
        torchs_set_(tensor, saved.storage, saved.storage_offset, saved.size, saved.stride)


def bytes_needed(
    size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int, itemsize: int
) -> int:
    """Bytes a storage must hold for a strided tensor; 0 for a tensor without elements.

    ``itemsize * (storage_offset + sum((size - 1) * stride) + 1)``
    """
    if 0 in size:
        return 0
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return itemsize * (storage_offset + last + 1)
