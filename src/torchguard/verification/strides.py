"""The strides of a compiled graph's outputs: whether a program can see them, and eager's again.

Inductor keeps the strides of a graph's outputs as AOTAutograd hands them over, and says why:
"user-land view() will not throw because inductor output different strides than eager"
(https://github.com/pytorch/pytorch/blob/main/torch/_inductor/graph.py). By then decompositions
have run, and some do not keep them: ``cat([empty, x])`` has become ``x.clone()``, which has the
strides of ``x``, where eager's result is contiguous. The first key-value cache of a decoder is
made so, and ``view()`` of it raises in compiled code only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["same_strides", "with_strides"]

Strides = tuple[int, ...]


def same_strides(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether no program can tell the strides of ``actual`` from those of ``expected``.

    The dims have to come in the same order, from the largest stride to the smallest, and two
    dims that ``view()`` can merge have to stay so. Dims of size 1 have no say. Where ``expected``
    has an expanded dim, anything will do: a compiler may write out what eager returns as a view,
    but not the other way round, for nobody could write into it any more.
    """
    order = _order(expected)
    return order is None or (order == _order(actual) and _merged(expected) <= _merged(actual))


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims from the largest stride to the smallest; None where one is expanded."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    strides = [(stride, dim) for dim, (size, stride) in enumerate(sizes) if size > 1]
    if not tensor.numel() or any(stride == 0 for stride, _ in strides):
        return None
    return tuple(dim for _, dim in sorted(strides, key=lambda pair: (-pair[0], pair[1])))


def _merged(tensor: torch.Tensor) -> set[int]:
    """Return the dims that ``view()`` can merge with the next one."""
    sizes = list(zip(tensor.shape, tensor.stride(), strict=True))
    dims = [dim for dim, (size, _) in enumerate(sizes) if size > 1]
    return {
        dim
        for dim, after in itertools.pairwise(dims)
        if sizes[dim][1] == sizes[after][0] * sizes[after][1]
    }


def with_strides(
    function: Callable[..., Any], outputs: Mapping[int, Strides]
) -> Callable[..., Any]:
    """Return ``function`` with some of its outputs copied into memory with other strides.

    Args:
        function: returns a list or a tuple.
        outputs: by position, the strides of a tensor whose order of dims the output shall have.
    """
    orders = {
        position: tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))
        for position, strides in outputs.items()
    }

    def run(*inputs: Any) -> Any:
        returned = list(function(*inputs))
        for position, order in orders.items():
            returned[position] = _copied(returned[position], order)
        return returned

    return run


def _copied(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    strides, size = [0] * tensor.dim(), 1
    for dim in reversed(order):
        strides[dim] = size
        size *= max(tensor.size(dim), 1)
    sizes = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(length == 1 or has == wanted for length, has, wanted in sizes):
        return tensor
    # Not permute().contiguous(): the result would be a view, and eager's is not.
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
