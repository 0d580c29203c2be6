"""What torch raises where memory runs out, which is not one class."""

from __future__ import annotations

import torch

__all__ = ["is_out_of_memory"]

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out.

    That is ``torch.OutOfMemoryError``, the ``RuntimeError`` of PyTorch's CPU allocator ("can't
    allocate memory"), cuBLAS' CUBLAS_STATUS_ALLOC_FAILED, and Python's ``MemoryError``.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
