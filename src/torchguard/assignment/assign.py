"""Indexed assignment that keeps its gradient, eager and compiled.

``x[index] = value`` inside a compiled function can leave Dynamo with a wrong note
of ``x.requires_grad`` (https://github.com/pytorch/pytorch/issues/169179). Here the
assignment is one node of the graph with a result of its own, and what a result
requires is read from the tensor it stands for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchguard._public import public
from torchguard._torch import has_own_dispatch, inside_transform, keep_whole_in_graph
from torchguard.equivalence.operands import separated

Index = Any
"""Whatever stands between the brackets of ``t[...]``."""

Value = Any
"""A tensor or a number."""


@public
def sliced_assign(t: torch.Tensor, index: Index, value: Value) -> torch.Tensor:
    """Return a copy of ``t`` that has ``value`` at ``index``.

    Equals ``out = t.clone(); out[index] = value; return out``: the same values,
    dtype (``t``'s), memory format, broadcasting and device rules. Inside a
    compiled function it makes no graph break, and ``requires_grad`` of the result
    is right while tracing on every version of torch. It works under
    ``torch.func.vmap`` and ``torch.func.grad`` also where only ``value`` or
    ``index`` is transformed, which an assignment in place does not.

    If ``index`` names an element more than once, one of its values is stored and
    which one is torch's choice; ``torch.use_deterministic_algorithms(True)`` makes
    it the last, as for ``out[index] = value``.

    Args:
        t: the tensor to copy; it is not changed.
        index: what you would write in ``t[...]``: integers, slices, ``...``, ``None``,
            booleans, masks, integer tensors, lists, arrays, or a tuple of them.
        value: a number, or a tensor that broadcasts to the shape of ``t[index]``.

    Raises:
        IndexError, RuntimeError, TypeError, ValueError: what the assignment itself raises.

    Upstream: https://github.com/pytorch/pytorch/issues/169179

    Cost:
        A copy of ``t``, as ``t.clone()`` makes it.

    Example:
        >>> import torch, torchguard
        >>> torchguard.sliced_assign(torch.zeros(2, 3), (slice(None), [0, 2]), 1.0)
        tensor([[1., 0., 1.],
                [1., 0., 1.]])
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"sliced_assign: t is of type {type(t).__name__}, expected a torch.Tensor")
    # Most often a fake tensor: a compiler is looking.
    if type(t) is not torch.Tensor and has_own_dispatch(t):
        out = _at_scalar(t, index, value)
        if out is not None:
            return out
    out = _writable_copy(t, index, value) if inside_transform() else t.clone()
    out[index] = value
    return out


@public
def sliced_assign_(t: torch.Tensor, index: Index, value: Value) -> torch.Tensor:
    """Write ``value`` into ``t`` at ``index`` and return ``t``.

    Equals ``t[index] = value``: every alias and view of ``t`` sees it, and a leaf
    that requires grad refuses it with PyTorch's error. Inside a compiled
    function, use the tensor that it returns: ``requires_grad`` of that is right while
    tracing; other names of the same tensor are right under ``install("setitem")``.

    Args:
        t: the tensor to write into.
        index: what you would write in ``t[...]``.
        value: a number, or a tensor that broadcasts to the shape of ``t[index]``.

    Raises:
        IndexError, RuntimeError, TypeError, ValueError: what the assignment itself raises.

    Upstream: https://github.com/pytorch/pytorch/issues/169179

    Cost:
        As the assignment: nothing is copied.

    Example:
        >>> import torch
        >>> from torchguard import sliced_assign_
        >>> sliced_assign_(torch.zeros(3), 1, 5.0)
        tensor([0., 5., 0.])
    """
    whole = _at_scalar(t, index, value) if has_own_dispatch(t) else None
    if whole is not None:
        return t.copy_(whole)
    # A value that overlaps what is written is copied first, installed or not.
    given = separated(torch.Tensor.__setitem__, (t, index, value), {}).args
    t[given[1]] = given[2]
    return t


keep_whole_in_graph(sliced_assign, sliced_assign_)


def _writable_copy(t: torch.Tensor, index: Index, value: Value) -> torch.Tensor:
    """Copy ``t`` into a tensor that is batched, or tracked, wherever ``index`` or ``value`` is.

    Writing a batched value into a tensor that isn't is refused
    (https://docs.pytorch.org/functorch/stable/ux_limitations.html). What a
    transformed tensor makes is transformed itself.
    """
    items = [*index, value] if isinstance(index, (tuple, list)) else [index, value]
    together = t.new_zeros(())
    for item in items:
        if isinstance(item, torch.Tensor):
            together = together + item.new_zeros((), dtype=t.dtype, device=t.device)
    return together.new_empty(t.shape).copy_(t)


def _at_scalar(t: torch.Tensor, index: Index, value: Value) -> torch.Tensor | None:
    """Assign where an item of the index is a tensor of one integer; None if none is.

    A compiler can't follow it up to 2.13, because it has no data to read the number from.
    """
    items = index if isinstance(index, tuple) else (index,)
    place = next((place for place, item in enumerate(items) if _is_integer_scalar(item)), None)
    counts = [_dims_taken(item) for item in items]
    taken = [count for count in counts if count is not None]
    # Lists and arrays are left to torch, which alone can read them, and so is a wrong index.
    if place is None or len(taken) < len(counts) or sum(taken) > t.dim():
        return None
    dim = sum(taken[:place])
    if any(item is Ellipsis for item in items[:place]):
        dim = t.dim() - sum(taken[place:])
    # Read by an index of one element: that is bounds-checked, compiled too.
    row = torch.arange(t.shape[dim], device=t.device)[items[place].to(torch.int64).reshape(1)]
    # The slice is taken first, as torch does: what is left of the index selects from that.
    rest = (*items[:place], *items[place + 1 :])
    selected = sliced_assign(t.index_select(dim, row).squeeze(dim), rest, value)
    result = t.index_copy(dim, row, selected.unsqueeze(dim))
    if t.is_contiguous() or inside_transform():
        return result
    return torch.empty_like(t).copy_(result)  # t's memory format


def _is_integer_scalar(item: Any) -> bool:
    """Whether an item is a tensor of one integer, which selects a row as an integer does."""
    return (
        isinstance(item, torch.Tensor)
        and item.dim() == 0
        and item.dtype in {torch.int8, torch.int16, torch.int32, torch.int64}
    )


def _dims_taken(item: Any) -> int | None:
    """Return how many dims an item of an index takes; None if only torch can tell."""
    # https://docs.pytorch.org/cppdocs/notes/tensor_indexing.html
    if item is None or item is Ellipsis or isinstance(item, (bool, np.bool_)):
        return 0
    if isinstance(item, torch.Tensor):
        # A mask takes one dim for each of its own; uint8 is what masks were before torch 1.2.
        return item.dim() if item.dtype in {torch.bool, torch.uint8} else 1
    return 1 if isinstance(item, (slice, int, np.integer, torch.SymInt)) else None
