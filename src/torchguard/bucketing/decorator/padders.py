"""How to pad one tensor of a shape that is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from torchguard.bucketing.padding import Fill, Side, pad_to_bucket

__all__ = ["Padder", "padder"]

# Below this many elements one operator less is faster; above, pad_to_bucket chooses.
_SMALL = 1 << 17


def padder(
    shape: tuple[int, ...], dims: tuple[tuple[int, int], ...], fill: Fill, side: Side
) -> Padder:
    """Return a function that pads these dims of a tensor of this shape: (dim, size) each."""
    if fill == "repeat-last" and 0 in shape:
        fill = 0  # nothing is there to repeat, and nothing of it will be seen
    pads = [0] * (2 * len(shape))
    for dim, size in dims:
        # constant_pad_nd counts from the last dim, left before right.
        pads[2 * (len(shape) - 1 - dim) + (side == "right")] = size - shape[dim]
    number = fill if isinstance(fill, (bool, int, float, complex)) else None
    small = math.prod(shape) < _SMALL
    pad = torch.constant_pad_nd

    def carefully(x: torch.Tensor) -> torch.Tensor:
        for dim, size in dims:
            x = pad_to_bucket(x, dim, size, value=fill, side=side).tensor
        return x

    def quickly(x: torch.Tensor) -> torch.Tensor:
        # What pad_to_bucket does in the end; it has checked the first call of this kind.
        if x.is_cpu and type(x) is torch.Tensor:
            return pad(x, pads, number)  # type: ignore[arg-type]
        return carefully(x)

    quick = small and number is not None
    return Padder(quickly if quick else carefully, carefully, dims, fill)


class Padder(NamedTuple):
    """How to pad one tensor."""

    quickly: Callable[[torch.Tensor], torch.Tensor]
    carefully: Callable[[torch.Tensor], torch.Tensor]
    dims: tuple[tuple[int, int], ...]
    fill: Fill
