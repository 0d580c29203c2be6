"""ULP-scale noise: tensors that are off by about as much as rounding makes them.

Two computations of the same thing agree but for rounding, unless an input lies within it of a
discontinuity, such as those of ReLU and argmax: then both are right and far apart. With noise in
the last digits they no longer are; what is really wrong still is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from torchguard.state.tensors import Elements

_EPSILONS = 32
"""How far a value is off at most, relative to itself, in units of the dtype's ``eps``; 1 for a
dtype of 16 bits."""


def can_be_perturbed(values: torch.Tensor) -> bool:
    """Whether it has digits to change: no integers, nor 8-bit types, of which one is a tenth."""
    return (values.is_floating_point() or values.is_complex()) and values.itemsize > 1


def perturb_(values: torch.Tensor, seed: int) -> None:
    """Multiply each value in place by a random factor close to 1; zero stays zero.

    Where autocast is on, it is as far from 1 as the dtype that autocast takes rounds.
    """
    if not can_be_perturbed(values):
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


@contextlib.contextmanager
def perturbed(tensors: Iterable[torch.Tensor], seed: int) -> Iterator[bool]:
    """Perturb weights for a while, in place; yields whether any value has changed.

    What another thread writes meanwhile is lost, so shared memory, of other processes, is left
    alone, and what can't be written like that: meta, sparse, inference, subclasses.
    """
    plain = {
        id(tensor): tensor
        for tensor in tensors
        if type(tensor) in {torch.Tensor, torch.nn.Parameter}
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_inference()
        and not (tensor.device.type == "cpu" and tensor.is_shared())
    }
    # All are copied before the first is changed: some lie in the same memory.
    before = Elements(plain.values())
    caches = torch.is_autocast_cache_enabled()
    try:
        with torch.no_grad():
            for tensor in plain.values():
                with contextlib.suppress(RuntimeError):  # it overlaps itself, or is conjugate
                    perturb_(tensor.detach(), seed)
        # The cache holds casts of the weights as they were, and must not keep any of these.
        torch.set_autocast_cache_enabled(False)
        yield before.differ() > 0
    finally:
        torch.set_autocast_cache_enabled(caches)
        before.restore()
