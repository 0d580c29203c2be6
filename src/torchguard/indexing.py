"""What an index selects: which dimension each part of it takes, and at which positions it lands.

Everything here leaves the reading of an index to torch itself, so that whatever
``t[index]`` accepts, or refuses, is accepted or refused alike.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Part", "describe_index", "is_basic", "is_slice", "parts_of", "positions"]

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
            counts.append(item.dim() if item.dtype in {torch.bool, torch.uint8} else 1)
        elif isinstance(item, slice) or _is_integer(item):
            counts.append(1)
        else:
            return None
    left = dims - sum(counts)
    ellipses = [place for place, item in enumerate(items) if item is Ellipsis]
    if left < 0 or len(ellipses) > 1:
        return None
    if ellipses:
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
    found = torch.zeros((), dtype=torch.int64, device=t.device).expand(t.shape)[index]
    stride = 1
    for dim in reversed(range(t.dim())):
        size = t.shape[dim]
        along = torch.arange(size, device=t.device)
        along = along.reshape([size if each == dim else 1 for each in range(t.dim())])
        found = found + along.expand(t.shape)[index] * stride
        stride = stride * size
    return found


def describe_index(index: Any) -> str:
    """Write an index down for an error message: tensors by dtype and shape."""
    text = _described(index)
    return text if len(text) <= _DESCRIBED else text[: _DESCRIBED - 3] + "..."


def _described(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        name = str(item.dtype).removeprefix("torch.")
        return f"<{name} tensor of shape {tuple(item.shape)}>"
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
