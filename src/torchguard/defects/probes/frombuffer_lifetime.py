"""A tensor made by ``torch.frombuffer`` does not keep its memory alive.

``torch.frombuffer`` takes the address of the buffer, releases the buffer at once
and keeps only a reference to the object. ``mmap.close()``,
``SharedMemory.close()`` and ``bytearray.clear()`` believe nobody uses the memory
and free it under the tensor.

Nobody has reported it for torch; the same hazard elsewhere:
https://github.com/numpy/numpy/issues/9537
https://github.com/python/cpython/issues/102349
"""

from __future__ import annotations

import mmap

import torch

from torchguard.defects.catalog import Defect

_SIZE = 16 * mmap.PAGESIZE


def probe() -> str | None:
    """Close a mapping under a tensor, map other memory, and read the tensor."""
    mapping = mmap.mmap(-1, _SIZE)
    mapping[:] = b"\x01" * _SIZE
    t = torch.frombuffer(mapping, dtype=torch.uint8)
    try:
        mapping.close()
    except BufferError:  # what a live memoryview brings about
        return None
    # The kernel puts a mapping of the same size where the closed one was; where it
    # does not, reading the tensor faults.
    other = mmap.mmap(-1, _SIZE)
    other[:] = b"\x02" * _SIZE
    seen = int(t[-1])
    return None if seen == 1 else "after mmap.close() the tensor reads another mapping's memory"


DEFECT = Defect(
    id="frombuffer-lifetime",
    summary="torch.frombuffer lets go of the buffer: close() or clear() frees a live tensor",
    upstream=(),
    family="memory",
    probe=probe,
    guards=("numpy",),
    advice="Write torch.frombuffer(memoryview(buffer), ...): then close() raises BufferError.",
)
