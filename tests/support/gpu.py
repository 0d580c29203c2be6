"""Tests on a GPU: the mark, and memory that runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
each_device = pytest.mark.parametrize("device", ["cpu", CUDA])
MIB = 2**20


@contextlib.contextmanager
def little_memory(device: str) -> Iterator[int]:
    """Yield a number of float32 elements that can't be allocated, and let torch find that out.

    On a GPU this process gets 64 MiB more than it has reserved. On a CPU no machine has 64 TiB.
    """
    if device == "cpu":
        yield 2**44
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = torch.cuda.memory_reserved() + 64 * MIB
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        yield 256 * MIB // 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def out_of_memory(device: str) -> type[Exception]:
    """What torch raises: on a CPU it has no type of its own."""
    return torch.OutOfMemoryError if device == "cuda" else RuntimeError
