"""ULP-scale noise: tensors that are off by about as much as rounding makes them.

Two computations of the same thing agree except for rounding, unless an input lies within it of a
discontinuity, such as those of ReLU and argmax: then both are right and far apart. With noise in
the last digits they no longer are; what is really wrong still is.
"""

from __future__ import annotations

import torch

_EPSILONS = 32
"""How far a value is off at most, relative to itself, in units of the dtype's ``eps``; 1 for a
dtype of 16 bits."""


def perturb_(values: torch.Tensor, seed: int) -> None:
    """Multiply each value in place by a random factor close to 1; zero stays zero.

    If autocast is on, it is as far from 1 as the dtype that autocast takes rounds.
    """
    # Integers have no digits to change, nor have the 8-bit types, of which one is a tenth.
    if not (values.is_floating_point() or values.is_complex()) or values.itemsize == 1:
        return
    real = torch.view_as_real(values) if values.is_complex() else values
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(real.shape, generator=generator, device="cpu", dtype=torch.float64) * 2 - 1
    noisy = (real.to(torch.float64) * (1 + drawn.to(real.device) * _noise_scale(real))).to(
        real.dtype
    )
    real.copy_(torch.where(noisy.isfinite(), noisy, real))  # the largest number is one too


def _noise_scale(values: torch.Tensor) -> float:
    dtypes = [values.dtype]
    if torch.is_autocast_enabled(values.device.type):
        dtypes.append(torch.get_autocast_dtype(values.device.type))
    details = [torch.finfo(dtype) for dtype in dtypes]
    return max(each.eps * (1 if each.bits == 16 else _EPSILONS) for each in details)  # noqa: PLR2004
