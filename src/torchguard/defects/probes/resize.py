"""A resize that fails, or memory that goes: tensors whose shape describes what they don't have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import torchguard
from torchguard.defects.catalog import Defect, NotRunHere

# --- resize-locked

_MORE_THAN_ANY_MACHINE_HAS = 2**50  # elements: 4 PiB of float32, yet no overflow
_HALF_OF_TOO_MANY = 2**40  # squared, it does not fit 64 bits


def _growable() -> Tensor:
    return torch.arange(4.0)


def _locked() -> Tensor:
    return torch.from_numpy(np.arange(4, dtype=np.float32))


def _locked_and_empty() -> Tensor:
    return torch.from_numpy(np.empty(0, dtype=np.float32))


def _set_beyond_a_locked_storage(t: Tensor) -> None:
    t.set_(_locked().untyped_storage(), 0, (5, 5), (5, 1))


_Case = tuple[str, Callable[[], Tensor], Callable[[Tensor], object]]

# Name, the tensor before, the call that can't succeed.
_CASES: tuple[_Case, ...] = (
    ("resize_", _locked, lambda t: t.resize_(5, 5)),
    ("resize_as_", _locked, lambda t: t.resize_as_(torch.ones(5, 5))),
    ("set_", _growable, _set_beyond_a_locked_storage),
    ("out=", _locked_and_empty, lambda t: torch.neg(torch.ones(5, 5), out=t)),
    ("too large", _growable, lambda t: t.resize_(_MORE_THAN_ANY_MACHINE_HAS)),
    ("overflow", _growable, lambda t: t.resize_(_HALF_OF_TOO_MANY, _HALF_OF_TOO_MANY)),
    ("negative", _growable, lambda t: t.resize_(-1)),
    ("format", _growable, lambda t: t.resize_(2, 2, memory_format=torch.channels_last)),
)


def _metadata(t: Tensor) -> tuple[object, ...]:
    storage = t.untyped_storage()
    return (t.shape, t.stride(), t.storage_offset(), storage.data_ptr(), storage.nbytes())


def _is_spoiled(make: Callable[[], Tensor], call: Callable[[Tensor], object]) -> bool:
    t = make()
    values, before = t.tolist(), _metadata(t)
    try:
        call(t)
    except (RuntimeError, ValueError, MemoryError):
        # Values are read only where the metadata came back: reading a spoiled tensor may crash.
        return _metadata(t) != before or t.tolist() != values
    return False


def _resize_locked() -> str | None:
    """Let each call fail once and compare the tensor with what it was.

    A failed resize leaves a tensor whose shape describes memory that it does not have.

    ``resize_``, ``resize_as_``, ``set_`` and every ``out=`` argument write the new
    shape and strides first and grow the storage after. When growing fails (memory
    that belongs to numpy, no memory left, more elements than 64 bits can count, a
    negative size, a memory format that does not fit the rank) the new shape stays:
    the next access reads or writes past the end of the storage.
    """
    spoiled = [name for name, make, call in _CASES if _is_spoiled(make, call)]
    return f"failed and spoiled: {', '.join(spoiled)}" if spoiled else None


RESIZE_LOCKED = Defect(
    id="resize-locked",
    summary="a failed resize_, resize_as_, set_ or out= leaves a shape without memory behind it",
    upstream=("https://github.com/pytorch/pytorch/issues/170298",),
    family="memory",
    probe=_resize_locked,
    guards=("resize", "out"),
)


# --- resize-shared


def _resize_shared() -> str | None:
    """Grow a shared tensor; a process that survives must have an intact tensor.

    Growing a tensor in shared memory kills the process.

    ``share_memory_`` moves the data to a storage that has no allocator but keeps
    the mark "resizable" of the storage it replaces. ``resize_`` trusts the mark and
    calls through the null allocator.

    Not reported; another defect with the same null allocator is
    https://github.com/pytorch/pytorch/issues/184748
    """
    t = torch.ones(4)
    try:
        t.share_memory_()
    except RuntimeError as error:
        raise NotRunHere("no shared memory on this machine") from error
    try:
        t.resize_(1000)
    except RuntimeError:
        if t.shape != (4,) or t.tolist() != [1.0] * 4:
            return f"resize_ failed, yet the shape is {tuple(t.shape)}"
        return None
    described, held = t.numel() * t.element_size(), t.untyped_storage().nbytes()
    return f"{described} bytes described, {held} held" if described > held else None


RESIZE_SHARED = Defect(
    id="resize-shared",
    summary="resize_ of a tensor in shared memory calls a null allocator: the process dies",
    upstream=(),
    family="memory",
    probe=_resize_shared,
    guards=("resize",),
)


# --- stride-overflow

_OVERFLOWING_SIZE = (0, 5, 10, 10, 2**58)


def _stride_overflow() -> str | None:
    """Let a resize fail and read the stride of what is left.

    After a resize_ whose strides overflow, reading the strides kills the process.

    ``resize_`` of a size without elements but with more than 64 bits of strides, such as
    ``(0, 5, 10, 10, 2**58)``, writes the size, multiplies, notices and raises. The strides stay
    wrapped around, and a negative number below ``-2**62`` is how torch stores the address of a
    symbolic size: ``t.stride()`` follows it.

    Not reported by itself; it is the most violent form of
    https://github.com/pytorch/pytorch/issues/170298
    """
    t = torch.arange(4.0)
    try:
        t.resize_(_OVERFLOWING_SIZE)
    except RuntimeError:
        return None if t.stride() == (1,) else f"resize_ failed, yet the stride is {t.stride()}"
    return None


STRIDE_OVERFLOW = Defect(
    id="stride-overflow",
    summary="a failed resize_ leaves strides that are read as addresses: the process dies",
    upstream=("https://github.com/pytorch/pytorch/issues/170298",),
    family="memory",
    probe=_stride_overflow,
    guards=("resize",),
)


# --- storage-shrunk


def _shrunk() -> Tensor:
    t = torch.ones(4)
    t.untyped_storage().resize_(0)
    return t


def _storage_shrunk() -> str | None:
    """Read a tensor whose storage was shrunk to nothing: a null pointer.

    Shrinking a storage leaves its tensors pointing at memory that is gone.

    ``UntypedStorage.resize_`` knows nothing of the tensors that use the storage:
    they keep their shape, and no operator compares a shape with the size of the
    storage before it reads.
    """
    t = _shrunk()
    try:
        total = t.sum().item()
    except RuntimeError:
        return None
    described, held = t.numel() * t.element_size(), t.untyped_storage().nbytes()
    return f"summed {described} bytes of {held} to {total}" if described > held else None


def _storage_shrunk_guarded() -> str | None:
    """Ask ``check_consistent`` which tensor is spoiled, before anything reads it."""
    tensors = {"intact": torch.ones(4), "shrunk": _shrunk()}
    try:
        torchguard.check_consistent(tensors)
    except torchguard.InconsistentTensorError as error:
        text = str(error)
        if "shrunk" in text and "intact" not in text:
            return None
        return "check_consistent raised, but did not name the tensor"
    return "check_consistent accepted a tensor without memory"


STORAGE_SHRUNK = Defect(
    id="storage-shrunk",
    summary="after storage.resize_(0) any access to the tensor reads memory that is gone",
    upstream=("https://github.com/pytorch/pytorch/issues/171676",),
    family="memory",
    probe=_storage_shrunk,
    guards=("check_consistent",),
    only_detects=True,
    limits="the access itself still reads that memory: check before it, where a storage may shrink",
    guarded_probe=_storage_shrunk_guarded,
)
