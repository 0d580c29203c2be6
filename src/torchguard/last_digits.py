"""Other last digits: a tensor that is off by about as much as rounding makes it.

Two computations of the same thing agree but for rounding, unless the function jumps: a ReLU
passes a gradient on or stops it, an argmax names one place or another. Where an input of such a
step lies within the rounding error of the jump, the two may land on either side, both right and
far apart. With other last digits they no longer do; what is really wrong still is.
"""

from __future__ import annotations

import torch

__all__ = ["nudge"]

_DIGITS = 32
"""By how many units in the last place a value is off at most; one where there are 16 bits."""


def nudge(values: torch.Tensor, seed: int) -> None:
    """Change every value in place by a random number of last digits. Zero stays zero.

    Integers and the 8-bit types, of which a digit is a tenth of the value, stay as they are.
    """
    if not (values.is_floating_point() or values.is_complex()) or values.itemsize == 1:
        return
    real = torch.view_as_real(values) if values.is_complex() else values
    digits = 1 if torch.finfo(real.dtype).bits == 16 else _DIGITS  # noqa: PLR2004
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(real.shape, generator=generator, device="cpu", dtype=torch.float64) * 2 - 1
    factors = 1 + drawn.to(real.device) * digits * torch.finfo(real.dtype).eps
    real.copy_(real.to(torch.float64) * factors)
