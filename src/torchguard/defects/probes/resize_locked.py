"""A failed resize leaves a tensor whose shape describes memory that it does not have.

``resize_``, ``resize_as_``, ``set_`` and every ``out=`` argument write the new
shape and strides first and grow the storage after. When growing fails (memory
that belongs to numpy, no memory left, more elements than 64 bits can count, a
negative size, a memory format that does not fit the rank) the new shape stays:
the next access reads or writes past the end of the storage.

https://github.com/pytorch/pytorch/issues/170298
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from torchguard.defects.catalog import Defect

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


def probe() -> str | None:
    """Let each call fail once and compare the tensor with what it was."""
    spoiled = [name for name, make, call in _CASES if _is_spoiled(make, call)]
    return f"failed and spoiled: {', '.join(spoiled)}" if spoiled else None


DEFECT = Defect(
    id="resize-locked",
    summary="a failed resize_, resize_as_, set_ or out= leaves a shape without memory behind it",
    upstream=("https://github.com/pytorch/pytorch/issues/170298",),
    family="memory",
    probe=probe,
    guards=("resize", "out"),
)
