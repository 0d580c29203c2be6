"""ULP-scale noise: tensors that are off by about as much as rounding makes them.

Two computations of the same thing agree except for rounding, unless an input lies within it of a
discontinuity, such as those of ReLU and argmax: then both are right and far apart. With noise in
the last digits they no longer are; what is really wrong still is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchguard._torch import without_dispatch_modes
from torchguard.equivalence.compare import Difference, as_double, value_of
from torchguard.equivalence.outcome import Outcome

_EPSILONS = 32
"""How far a value is off at most, relative to itself, in units of the dtype's ``eps``; 1 for a
dtype of 16 bits."""

_RUNS = 16
"""How many runs the reference makes at most, each with its inputs perturbed otherwise."""

_MULTIPLE = 2.0
"""How many times further than the reference from itself the candidate may be from it."""


def perturb_(values: torch.Tensor, seed: int) -> None:
    """Multiply each value in place by a random factor close to 1; zero stays zero.

    If autocast is on, it is as far from 1 as the dtype that autocast takes rounds.
    """
    # Integers have no digits to change, nor have the 8-bit types, of which one is a tenth.
    if not (values.is_floating_point() or values.is_complex()) or values.itemsize == 1:
        return
    real = torch.view_as_real(values) if values.is_complex() else values
    generator = torch.Generator().manual_seed(seed)
    with without_dispatch_modes(real):  # a mode may make it deterministic
        drawn = torch.rand(real.shape, generator=generator, device="cpu", dtype=torch.float64)
    drawn = drawn * 2 - 1
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


def perturb_all(seed: int, values: Sequence[Any], written: Iterable[torch.Tensor] = ()) -> None:
    """Perturb tensors in place: those that require a gradient, as weights do, or else all.

    What the run writes stays, so that what comes out shows by how much the change has moved.
    """
    # Data may be compared with a constant (a mask of ones), what requires a gradient is not.
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    chosen = [tensor for tensor in tensors if tensor.requires_grad] or tensors
    storages = {each.untyped_storage().data_ptr(): each for each in reversed(chosen)}
    for each in written:
        storages.pop(each.untyped_storage().data_ptr(), None)
    for each in storages.values():
        whole = torch.empty(0, dtype=each.dtype, device=each.device)
        perturb_(whole.set_(each.untyped_storage()), seed)


def not_by_rounding(
    found: Sequence[Difference],
    reference: Outcome,
    candidate: Outcome,
    again: Callable[[int], Outcome | None],
) -> list[Difference]:
    """Return the differences that the reference does not show when its inputs are perturbed.

    ``again`` runs it with inputs that are perturbed by a seed.
    """
    compared = []
    for each in found:
        if each.apart is not None:
            one, two = (value_of(run, each.part, each.key) for run in (reference, candidate))
            if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
                compared.append((each, each.apart.clone(), one, two))
    try:
        for seed in range(_RUNS if compared else 0):
            other = again(seed)
            if other is None:
                return list(found)
            for each, left, one, two in compared:
                left.logical_and_(~_reached(one, two, value_of(other, each.part, each.key)))
            if not any(left.any() for _, left, _, _ in compared):
                break
    except torch.OutOfMemoryError:
        return list(found)
    explained = {id(each) for each, left, _, _ in compared if not left.any()}
    return [each for each in found if id(each) not in explained]


def _reached(one: torch.Tensor, other: torch.Tensor, now: Any) -> torch.Tensor:
    """Return at which elements another run of the reference is about as far from it."""
    if not isinstance(now, torch.Tensor) or now.shape != one.shape:
        return torch.zeros((), dtype=torch.bool, device=one.device)
    if not (one.is_floating_point() or one.is_complex()):
        return torch.eq(now.detach(), other)
    expected = as_double(one.detach())
    away, off = ((as_double(each.detach()) - expected).abs() for each in (now, other))
    return away.isfinite() & (_MULTIPLE * away >= off)
