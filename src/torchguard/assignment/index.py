"""What an index selects: which dimension each part of it takes, and at which positions it lands.

Everything here leaves it to torch itself to read an index, so that it accepts and refuses what
``t[index]`` does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

_DESCRIBED = 200  # characters; a list of a thousand numbers says no more than its beginning


class Part(NamedTuple):
    """One item of an index and the dimensions it takes."""

    item: Any
    place: int
    """Where it stands in the tuple."""

    dim: int
    """The first dimension it takes."""

    dims: int
    """How many dimensions it takes: 0 for ``None``, one per dimension of a mask, else 1."""


def is_basic(index: Any) -> bool:
    """Whether ``t[index]`` is a view: integers, slices, ``...`` and ``None``, nothing else."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is None or item is Ellipsis or isinstance(item, slice) or _is_integer(item)
        for item in items
    )


def is_slice(item: Any) -> bool:
    """Whether an item keeps the dimensions it takes: a slice, or ``...``."""
    return item is Ellipsis or isinstance(item, slice)


def _is_integer(item: Any) -> bool:
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
    """Return the parts of an index into ``dims`` dimensions; None where only torch can tell.

    That is so for lists, which torch reads as a tuple in some cases (lists of booleans
    are masks in all), and for an index that takes more dimensions than there are.
    """
    items = [
        torch.tensor(item) if isinstance(item, list) and _are_booleans(item) else item
        for item in (index if isinstance(index, tuple) else (index,))
    ]
    counts: list[int] = []
    for item in items:
        if item is None or item is Ellipsis or isinstance(item, (bool, np.bool_)):
            counts.append(0)
        elif isinstance(item, torch.Tensor):
            # A mask takes one dim for each of its own; uint8 is what masks were before torch 1.2.
            counts.append(item.dim() if item.dtype in {torch.bool, torch.uint8} else 1)
        elif isinstance(item, slice) or _is_integer(item):
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


def _are_booleans(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, bool) for item in items)


def positions(t: torch.Tensor, index: Any) -> torch.Tensor:
    """Return where the elements of ``t[index]`` stand in ``t.reshape(-1)``, in its shape.

    Each dimension's coordinates are an expanded ``arange``, which takes no memory
    until torch picks the selected ones out of it.
    """
    index, scalars = _without_scalars(t, index)
    # Read by an index of one element: that is bounds-checked, compiled too.
    rows = {
        dim: torch.arange(t.shape[dim], device=t.device)[row.reshape(1)].squeeze(0)
        for dim, row in scalars.items()
    }
    found = torch.zeros((), dtype=torch.int64, device=t.device).expand(t.shape)[index]
    for dim, stride in _strides(t):
        found = found + (rows[dim] if dim in rows else _along(dim, t.shape, t)[index]) * stride
    return found


def positions_in_bounds(t: torch.Tensor, index: Any, *, clip: bool) -> torch.Tensor:
    """Return what :func:`positions` does for an index whose integers may be out of bounds.

    With ``clip`` they are moved to the nearest element. Without, the position of an element that
    isn't there is ``t.numel()``: each indexed dimension is read as if it had one row more, and
    what lands there is out of bounds.
    """
    items = index if isinstance(index, tuple) else (index,)
    parts = parts_of(tuple(_as_rows(item) for item in items), t.dim())
    if parts is None:
        raise IndexError(f"no such index into {t.dim()} dimensions: {describe_index(index)}")
    sizes, kept, rows = list(t.shape), list[Any](), dict[int, torch.Tensor]()
    for part in parts:
        if not _names_rows(part):
            kept.append(part.item)
            continue
        size = t.shape[part.dim]
        if clip and size == 0:
            raise IndexError(f"dimension {part.dim} has no elements to clip to")
        row = torch.as_tensor(part.item, dtype=torch.int64, device=t.device)
        row = torch.where(row < 0, row + size, row)
        row = row.clamp(0, size - 1) if clip else torch.where((row < 0) | (row > size), size, row)
        sizes[part.dim] = size if clip else size + 1
        if row.dim() == 0:  # its number would be read, which a compiler can't
            rows[part.dim] = row
        kept.append(row if row.dim() else 0)
    read = tuple(kept)
    found = torch.zeros((), dtype=torch.int64, device=t.device).expand(sizes)[read]
    inside = torch.ones_like(found, dtype=torch.bool)
    for dim, stride in _strides(t):
        along = rows[dim] if dim in rows else _along(dim, sizes, t)[read]
        found = found + along * stride
        inside = inside & (along < t.shape[dim])
    return torch.where(inside, found, t.numel())


def _strides(t: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield each dimension and its stride in ``t.reshape(-1)``, the last first."""
    stride = 1
    for dim in reversed(range(t.dim())):
        yield dim, stride
        stride = stride * t.shape[dim]


def _along(dim: int, sizes: Sequence[int], t: torch.Tensor) -> torch.Tensor:
    """Return the coordinates of one dimension, expanded over the others."""
    shape = [sizes[dim] if each == dim else 1 for each in range(len(sizes))]
    return torch.arange(sizes[dim], device=t.device).reshape(shape).expand(sizes)


def _without_scalars(t: torch.Tensor, index: Any) -> tuple[Any, dict[int, torch.Tensor]]:
    """Put 0 in place of each tensor of one integer, and return those tensors by dimension.

    torch reads their number and selects that row, as it does for an integer. A compiler or a
    transform can't read it.
    """
    parts = parts_of(index, t.dim())
    scalars = [part for part in parts or () if is_integer_scalar(part.item)]
    if parts is None or not scalars or any(t.shape[part.dim] == 0 for part in scalars):
        return index, {}
    items = tuple(0 if is_integer_scalar(part.item) else part.item for part in parts)
    return items, {part.dim: part.item for part in scalars}


def is_integer_scalar(item: Any) -> bool:
    """Whether an item is a tensor of one integer, which selects a row as an integer does."""
    return (
        isinstance(item, torch.Tensor)
        and item.dim() == 0
        and item.dtype in {torch.int8, torch.int16, torch.int32, torch.int64}
    )


def _as_rows(item: Any) -> Any:
    """Turn a list into a tensor; one that some versions of torch read as a tuple is refused."""
    if not isinstance(item, list):
        return item
    if all(isinstance(each, bool) or _is_integer(each) for each in item):
        return torch.tensor(item, dtype=None if item else torch.int64)
    raise TypeError(f"expected a list of integers, got {describe_index(item)}: write a tensor")


def _names_rows(part: Part) -> bool:
    """Whether an item of an index names rows by number, so that it can be out of bounds."""
    if isinstance(part.item, torch.Tensor):
        return part.item.dtype not in {torch.bool, torch.uint8}
    return _is_integer(part.item)


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
        return f"[{', '.join(_first(item))}]"
    if isinstance(item, slice):
        return f"{_bound(item.start)}:{_bound(item.stop)}" + (
            "" if item.step is None else f":{item.step}"
        )
    return "..." if item is Ellipsis else repr(item)


def _first(items: list[Any]) -> Iterator[str]:
    for item in items[:20]:
        yield _described(item)
    if len(items) > 20:  # noqa: PLR2004
        yield "..."


def _bound(bound: Any) -> str:
    return "" if bound is None else str(bound)
