"""Indexed assignment that keeps its gradient, eager and compiled.

``x[index] = value`` inside a compiled function can leave Dynamo with a wrong note
of ``x.requires_grad`` (https://github.com/pytorch/pytorch/issues/169179). Here the
assignment is one node of the graph with a result of its own, and what a result
requires is read from the tensor it stands for.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

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
        IndexError, RuntimeError, TypeError, ValueError: the one the assignment itself
            raises, with the index and the shapes in front of its message.

    Upstream: https://github.com/pytorch/pytorch/issues/169179

    Cost:
        A copy of ``t``, as ``t.clone()`` makes it.

    Example:
        >>> import torch, torchguard
        >>> torchguard.sliced_assign(torch.zeros(2, 3), (slice(None), [0, 2]), 1.0)
        tensor([[1., 0., 1.],
                [1., 0., 1.]])
    """
    try:
        if type(t) is not torch.Tensor and has_own_dispatch(t):
            out = _static(t, index, value)  # most often a fake tensor: a compiler is looking
        elif type(value) is torch.Tensor and (t.requires_grad or value.requires_grad):
            # One node of autograd: a clone and a copy into a view of it are three.
            out = _by_index_put(t, index, value)
        else:
            out = None
        if out is not None:
            return out
        out = _writable_copy(t, index, value) if inside_transform() else t.clone()
        out[index] = value
    except Exception as error:
        if not isinstance(t, torch.Tensor):
            message = f"sliced_assign: t is of type {type(t).__name__}, expected a torch.Tensor"
            raise TypeError(message) from None
        name_the_call(error, "sliced_assign", t, index, value)
        raise
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
        IndexError, RuntimeError, TypeError, ValueError: the one the assignment itself
            raises, with the index and the shapes in front of its message.

    Upstream: https://github.com/pytorch/pytorch/issues/169179

    Cost:
        As the assignment: nothing is copied.

    Example:
        >>> import torch
        >>> from torchguard import sliced_assign_
        >>> sliced_assign_(torch.zeros(3), 1, 5.0)
        tensor([0., 5., 0.])
    """
    try:
        whole = _static(t, index, value) if has_own_dispatch(t) else None
        if whole is not None:
            t.copy_(whole)
        else:
            # A value that overlaps what is written is copied first, installed or not.
            given = separated(torch.Tensor.__setitem__, (t, index, value), {}).args
            t[given[1]] = given[2]
    except Exception as error:
        name_the_call(error, "sliced_assign_", t, index, value)
        raise
    return t


keep_whole_in_graph(sliced_assign, sliced_assign_)


def name_the_call(error: Exception, name: str, t: Any, index: Any, value: Any) -> None:
    """Put the call into the message of an exception that torch has raised."""
    # Exceptions with a meaning of their own (a compiler's) are none of these types.
    if type(error) in {IndexError, RuntimeError, TypeError, ValueError} and len(error.args) == 1:
        shapes = f"t is {_shape_of(t)}, index is {describe_index(index)}"
        error.args = (f"{name}: {shapes}, value is {_shape_of(value)}: {error.args[0]}",)


def _shape_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"of shape {tuple(value.shape)}"
    is_number = isinstance(value, (int, float, complex))
    return repr(value) if is_number else f"of type {type(value).__name__}"


# Few, and found by identity: quicker than a set.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_GATHERS = (torch.int64, torch.bool)


def _by_index_put(t: torch.Tensor, index: Index, value: torch.Tensor) -> torch.Tensor | None:
    """Return ``t.index_put(index, value)`` where that is the same and saves a node of autograd.

    Elsewhere (None) it is no faster: its small allocations take the memory that the last result
    has left, which a CPU's allocator would use again. What ``index_put`` refuses is left to the
    assignment itself, which raises PyTorch's error.
    """
    if value.dtype is not t.dtype or type(t) not in _PLAIN or not torch.is_grad_enabled():
        return None
    items = index if type(index) is tuple and index else (index,)
    for item in items:
        # One integer is no gather, and one boolean no mask: both are left to the assignment.
        if type(item) is not torch.Tensor or item.dtype not in _GATHERS or item.dim() == 0:
            return None
    leading = value.dim() > 0 and value.dim() > _dims_selected(t, items)
    if leading or inside_transform():  # an assignment drops leading dimensions of size 1
        return None
    try:
        return t.index_put(items, value)
    except (IndexError, RuntimeError):
        return None


def _dims_selected(t: torch.Tensor, items: tuple[torch.Tensor, ...]) -> int:
    """Return how many dimensions ``t[items]`` has, for integer tensors and masks."""
    masks = [item for item in items if item.dtype is torch.bool]
    spread = max(1 if item.dtype is torch.bool else item.dim() for item in items)
    taken = len(items) - len(masks) + sum(mask.dim() for mask in masks)
    return t.dim() - taken + spread


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


def _static(t: torch.Tensor, index: Index, value: Value) -> torch.Tensor | None:
    """Assign without asking for a shape or a number that only the data knows, where that helps.

    A compiler has no data: it can't follow an index that is a tensor of one integer (up to 2.13),
    nor the gradient of a value that a mask spreads (up to 2.9).
    """
    parts = parts_of(index, t.dim())
    if parts is None:
        return None
    for part in parts:
        if is_integer_scalar(part.item):
            return _assign_at_scalar(t, parts, part, value)
    masks = [part for part in parts if _is_mask(part.item)]
    others = tuple(part.item for part in parts if not _is_mask(part.item))
    if len(masks) != 1 or not is_basic(others):
        return None
    tensor = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=t.dtype)
    if (tensor.requires_grad and torch.is_grad_enabled()) or masks[0].item.dim() == 0:
        return _assign_at_mask(t, parts, masks[0], tensor)
    return None


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype is torch.bool


def _assign_at_scalar(t: torch.Tensor, parts: list[Part], part: Part, value: Value) -> torch.Tensor:
    """``t[..., i, ...] = value`` for a tensor ``i`` of one integer: assign to that slice, put back.

    The slice is taken first, as torch does: what is left of the index then selects
    from a tensor without that dimension.
    """
    # Read by an index of one element: that is bounds-checked, compiled too.
    row = torch.arange(t.shape[part.dim], device=t.device)[part.item.to(torch.int64).reshape(1)]
    rest = tuple(other.item for other in parts if other.place != part.place)
    selected = sliced_assign(t.index_select(part.dim, row).squeeze(part.dim), rest, value)
    result = t.index_copy(part.dim, row, selected.unsqueeze(part.dim))
    if t.is_contiguous() or inside_transform():
        return result
    return torch.empty_like(t).copy_(result)  # t's memory format


def _assign_at_mask(
    t: torch.Tensor, parts: list[Part], mask: Part, value: torch.Tensor
) -> torch.Tensor:
    """``t[..., mask, ...] = value`` for an index that is basic otherwise: into that view."""
    basic: list[Any] = []
    dim = 0  # of the view, where the mask begins
    for part in parts:
        if part.place == mask.place:
            basic += [slice(None)] * mask.dims
        else:
            basic.append(part.item)
            if part.place < mask.place:
                if part.item is Ellipsis:
                    dim += part.dims
                elif part.item is None or isinstance(part.item, slice):
                    dim += 1
    out = t.clone()
    view = out[tuple(basic)]
    view.copy_(_where_masked(view, dim, mask.item.to(t.device), value))
    return out


def _where_masked(
    t: torch.Tensor, dim: int, mask: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """``t[:, ..., mask] = value``, also where ``value`` has a row for each True of the mask."""
    # B dims before the mask, M dims of the mask, A dims after it; value is (B..., hits, A...)
    after = t.dim() - dim - mask.dim()
    if value.dim() == 0 or value.device == t.device:
        value = value.to(t.device, t.dtype)
    while value.dim() > dim + 1 + after and value.shape[0] == 1:
        value = value.squeeze(0)
    where = mask.reshape(*mask.shape, *[1] * after)
    hits = value.dim() - after - 1  # the dimension of value that runs over the hits
    if hits >= 0 and value.shape[hits] != 1:
        shape = (*t.shape[:dim], value.shape[hits], *t.shape[dim + mask.dim() :])
        return t.masked_scatter(where.expand(t.shape), value.expand(shape))
    if hits >= 0:
        value = value.reshape(*value.shape[:hits], *[1] * mask.dim(), *value.shape[hits + 1 :])
    return torch.where(where, value, t)


# ---- reading an index ----
#
# It is left to torch itself to read an index wherever that can be, so that what is accepted and
# refused is what ``t[index]`` accepts and refuses.


class Part(NamedTuple):
    """One item of an index and the dimensions it takes."""

    item: Any
    place: int
    """The item's position in the tuple."""

    dim: int
    """The first dimension it takes."""

    dims: int
    """How many dimensions it takes: 0 for ``None``, one per dimension of a mask, else 1."""


def is_basic(index: Any) -> bool:
    """Whether ``t[index]`` is a view: integers, slices, ``...`` and ``None``, nothing else."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None or item is Ellipsis or isinstance(item, slice) or is_integer(item)
        for item in items
    )


def is_integer(item: Any) -> bool:
    """Whether an item of an index is one integer, which selects a row."""
    # operator.index() takes these too, but torch reads a boolean as a mask of no dims, and a tensor
    # or an array as a gather: https://docs.pytorch.org/cppdocs/notes/tensor_indexing.html
    if isinstance(item, (bool, np.bool_, torch.Tensor, np.ndarray)):
        return False
    try:
        operator.index(item)
    except TypeError:
        return False
    return True


def parts_of(index: Any, dims: int) -> list[Part] | None:
    """Return the parts of an index into ``dims`` dimensions; None where only torch can read it.

    That is so for lists, which torch reads as a tuple in some cases (lists of booleans
    are masks in all), and for an index that takes more dimensions than there are.
    """
    items = [
        torch.tensor(item)
        if isinstance(item, list) and item and all(isinstance(each, bool) for each in item)
        else item
        for item in (index if isinstance(index, tuple) else (index,))
    ]
    counts: list[int] = []
    for item in items:
        if item is None or item is Ellipsis or isinstance(item, (bool, np.bool_)):
            counts.append(0)
        elif isinstance(item, torch.Tensor):
            # A mask takes one dim for each of its own; uint8 is what masks were before torch 1.2.
            counts.append(item.dim() if item.dtype in {torch.bool, torch.uint8} else 1)
        elif isinstance(item, slice) or is_integer(item):
            counts.append(1)
        else:
            return None
    left = dims - sum(counts)
    ellipses = [place for place, item in enumerate(items) if item is Ellipsis]
    if left < 0:
        return None
    if ellipses:  # torch lets the first of several take all dimensions that are left
        counts[ellipses[0]] = left
    dim = 0
    found = []
    for place, (item, count) in enumerate(zip(items, counts, strict=True)):
        found.append(Part(item, place, dim, count))
        dim += count
    return found


def is_integer_scalar(item: Any) -> bool:
    """Whether an item is a tensor of one integer, which selects a row as an integer does."""
    return (
        isinstance(item, torch.Tensor)
        and item.dim() == 0
        and item.dtype in {torch.int8, torch.int16, torch.int32, torch.int64}
    )


_DESCRIBED = 200  # characters; a list of a thousand numbers says no more than its beginning
_ITEMS = 20


def describe_index(index: Any) -> str:
    """Write an index down for an error message: tensors by dtype and shape."""
    text = _described(index)
    return text if len(text) <= _DESCRIBED else text[: _DESCRIBED - 3] + "..."


def describe_tensor(t: torch.Tensor) -> str:
    """Write a tensor down for an error message: its dtype and shape."""
    return f"<{str(t.dtype).removeprefix('torch.')} tensor of shape {tuple(t.shape)}>"


def _described(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return describe_tensor(item)
    if isinstance(item, np.ndarray):
        return f"<{item.dtype} array of shape {item.shape}>"
    if isinstance(item, tuple):
        return f"({', '.join(_described(each) for each in item)}{',' * (len(item) == 1)})"
    if isinstance(item, list):
        shown = [_described(each) for each in item[:_ITEMS]] + ["..."] * (len(item) > _ITEMS)
        return f"[{', '.join(shown)}]"
    if isinstance(item, slice):
        bounds = ["" if bound is None else str(bound) for bound in (item.start, item.stop)]
        return ":".join(bounds) + ("" if item.step is None else f":{item.step}")
    return "..." if item is Ellipsis else repr(item)
