"""Growing a tensor in shared memory kills the process.

``share_memory_`` moves the data to a storage that has no allocator but keeps
the mark "resizable" of the storage it replaces. ``resize_`` trusts the mark and
calls through the null allocator.

Nobody has reported it; a kin with the same null allocator is
https://github.com/pytorch/pytorch/issues/184748
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect, NotRunHere


def probe() -> str | None:
    """Grow a shared tensor; a process that survives must have an intact tensor."""
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


DEFECT = Defect(
    id="resize-shared",
    summary="resize_ of a tensor in shared memory calls a null allocator: the process dies",
    upstream=(),
    family="memory",
    probe=probe,
    guards=("resize",),
)
