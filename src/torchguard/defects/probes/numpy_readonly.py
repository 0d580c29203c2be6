"""A tensor made from read-only memory can be written to.

torch has no read-only tensors: ``from_numpy``, ``as_tensor`` and ``frombuffer``
warn once and drop the flag. A write then changes an immutable ``bytes`` object,
or kills the process where the memory is mapped without the right to write, as
``np.load(..., mmap_mode="r")`` does.

https://github.com/pytorch/pytorch/issues/46741
https://github.com/pytorch/pytorch/issues/5442
"""

from __future__ import annotations

import mmap
import warnings
from contextlib import suppress

import numpy as np
import torch

from torchguard.defects.catalog import Defect


def probe() -> str | None:
    """Write through a tensor into a bytes object, then into a read-only mapping."""
    immutable = bytes(bytearray(b"immutable"))  # an object of its own, no interned constant
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning is about exactly this
        with suppress(RuntimeError, ValueError, TypeError):
            torch.from_numpy(np.frombuffer(immutable, dtype=np.uint8)).fill_(ord("x"))
        if immutable != b"immutable":
            return f"fill_ changed an immutable bytes object to {immutable!r}"

        # What np.load(..., mmap_mode="r") gives, without a file.
        mapping = mmap.mmap(-1, mmap.PAGESIZE, access=mmap.ACCESS_READ)
        mapped = np.frombuffer(mapping, dtype=np.uint8)
        with suppress(RuntimeError, ValueError, TypeError):
            torch.from_numpy(mapped).fill_(1)  # dies of SIGSEGV where the flag is dropped
        return None if not mapped.any() else "fill_ wrote to an array mapped read-only"


DEFECT = Defect(
    id="numpy-readonly",
    summary="a tensor made from a read-only array writes to immutable memory or crashes",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/46741",
        "https://github.com/pytorch/pytorch/issues/5442",
    ),
    family="memory",
    probe=probe,
    guards=("numpy",),
    advice="Copy what is read-only: torch.from_numpy(a if a.flags.writeable else a.copy()).",
)
