"""``t.numpy()`` points at freed memory once ``t`` moves to shared memory.

The array keeps the tensor alive, not the storage. ``share_memory_``, which a
queue or a spawned DataLoader worker calls on every tensor that it sends, swaps
the storage of the tensor for one in shared memory and frees the old one, with
the array still pointing there.

https://github.com/pytorch/pytorch/issues/51849
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

from torchguard.defects.catalog import Defect, NotRunHere


def probe() -> str | None:
    """Share a tensor and see whether the memory under its array is still owned by anybody."""
    # Memory of numpy's, because its end of life can be watched.
    owner = np.ones(1000, dtype=np.float32)
    address = owner.ctypes.data
    owner_is_alive = weakref.ref(owner)
    t = torch.from_numpy(owner)
    view = t.numpy()
    del owner
    try:
        torch.ones(1).share_memory_()
    except RuntimeError as error:
        raise NotRunHere("no shared memory on this machine") from error
    try:
        t.share_memory_()
    except RuntimeError:
        return None  # refused: the memory stays where the array looks
    if view.ctypes.data != address or owner_is_alive() is not None:
        return None
    return "share_memory_() freed the memory that t.numpy() still points at"


DEFECT = Defect(
    id="numpy-view-share",
    summary="t.numpy() dangles after share_memory_(), a queue put or a spawned DataLoader",
    upstream=("https://github.com/pytorch/pytorch/issues/51849",),
    family="memory",
    probe=probe,
    guards=("numpy",),
    advice="Call t.share_memory_() before t.numpy(), or keep t.numpy().copy().",
)
