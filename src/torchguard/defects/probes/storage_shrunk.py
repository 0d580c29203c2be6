"""Shrinking a storage leaves its tensors pointing at memory that is gone.

``UntypedStorage.resize_`` knows nothing of the tensors that use the storage:
they keep their shape, and no operator compares a shape with the size of the
storage before it reads.

https://github.com/pytorch/pytorch/issues/171676
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchguard.defects.catalog import Defect


def _shrunk() -> Tensor:
    t = torch.ones(4)
    t.untyped_storage().resize_(0)
    return t


def probe() -> str | None:
    """Read a tensor whose storage was shrunk to nothing: a null pointer."""
    t = _shrunk()
    try:
        total = t.sum().item()
    except RuntimeError:
        return None
    described, held = t.numel() * t.element_size(), t.untyped_storage().nbytes()
    return f"summed {described} bytes of {held} to {total}" if described > held else None


def guarded_probe() -> str | None:
    """Ask ``check_consistent`` which tensor is spoiled, before anything reads it."""
    import torchguard  # noqa: PLC0415 - the guarded run alone needs the guards

    tensors = {"intact": torch.ones(4), "shrunk": _shrunk()}
    try:
        torchguard.check_consistent(tensors)
    except torchguard.InconsistentTensorError as error:
        text = str(error)
        if "shrunk" in text and "intact" not in text:
            return None
        return "check_consistent raised, but did not name the tensor"
    return "check_consistent accepted a tensor without memory"


DEFECT = Defect(
    id="storage-shrunk",
    summary="after storage.resize_(0) any access to the tensor reads memory that is gone",
    upstream=("https://github.com/pytorch/pytorch/issues/171676",),
    family="memory",
    probe=probe,
    guards=("check_consistent",),
    only_detects=True,
    limits="the access itself still reads that memory: check before it, where a storage may shrink",
    guarded_probe=guarded_probe,
)
