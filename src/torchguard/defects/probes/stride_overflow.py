"""After a resize_ whose strides overflow, reading the strides kills the process.

``resize_`` of a size without elements but with more than 64 bits of strides, such as
``(0, 5, 10, 10, 2**58)``, writes the size, multiplies, notices and raises. The strides stay
wrapped around, and a negative number below ``-2**62`` is how torch stores the address of a
symbolic size: ``t.stride()`` follows it.

Nobody has reported it; it is the most violent form of
https://github.com/pytorch/pytorch/issues/170298
"""

from __future__ import annotations

import torch

from torchguard.defects.catalog import Defect

_SIZE = (0, 5, 10, 10, 2**58)


def probe() -> str | None:
    """Let a resize fail and read the stride of what is left."""
    t = torch.arange(4.0)
    try:
        t.resize_(_SIZE)
    except RuntimeError:
        return None if t.stride() == (1,) else f"resize_ failed, yet the stride is {t.stride()}"
    return None


DEFECT = Defect(
    id="stride-overflow",
    summary="a failed resize_ leaves strides that are read as addresses: the process dies",
    upstream=("https://github.com/pytorch/pytorch/issues/170298",),
    family="memory",
    probe=probe,
    guards=("resize",),
)
