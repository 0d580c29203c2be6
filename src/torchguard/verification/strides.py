"""The strides of a compiled graph's outputs: whether a program can see them, and eager's again.

Inductor keeps the strides of a graph's outputs as AOTAutograd hands them over, and says why:
"user-land view() will not throw because inductor output different strides than eager"
(https://github.com/pytorch/pytorch/blob/main/torch/_inductor/graph.py). By then decompositions
have run, and some do not keep them: ``cat([empty, x])`` has become ``x.clone()``, which has the
strides of ``x``, where eager's result is contiguous. The first key-value cache of a decoder is
made so, and ``view()`` of it raises in compiled code only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["with_strides"]

Strides = tuple[int, ...]


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
