"""``at(t)[index].set(value)``: JAX's spelling of an update that returns a new tensor."""

from __future__ import annotations

from typing import Any, Literal

import torch

from torchguard.assign import Index, Value, sliced_assign, told
from torchguard.indexing import is_basic, positions
from torchguard.internals import has_own_dispatch, inside_transform, keep_whole_in_graph

__all__ = ["At", "Selection", "at"]

Operation = Literal["add", "multiply", "minimum", "maximum"]

_ON_VIEWS: dict[str, Any] = {
    "add": torch.add,
    "multiply": torch.mul,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
}
_REDUCTIONS = {"multiply": "prod", "minimum": "amin", "maximum": "amax"}


def at(t: torch.Tensor) -> At:
    """Start an update of a copy of ``t``, as JAX's ``x.at`` does.

    ======================================  =================================
    torchguard                              JAX
    ======================================  =================================
    ``at(t)[index].set(value)``             ``t.at[index].set(value)``
    ``at(t)[index].add(value)``             ``t.at[index].add(value)``
    ``at(t)[index].multiply(value)``        ``t.at[index].multiply(value)``
    ``at(t)[index].minimum(value)``         ``t.at[index].min(value)``
    ``at(t)[index].maximum(value)``         ``t.at[index].max(value)``
    ``at(t)[index].get()``                  ``t.at[index].get()``
    ======================================  =================================

    ``t`` is not changed. Where ``index`` names an element several times, ``add``,
    ``multiply``, ``minimum`` and ``maximum`` apply every value, as in JAX. Unlike
    JAX, an index out of bounds raises ``IndexError``.

    Example:
        >>> import torch, torchguard
        >>> torchguard.at(torch.zeros(3))[[0, 0, 2]].add(1.0)
        tensor([2., 0., 1.])
    """
    return At(t)


class At:
    """What :func:`at` returns; index it."""

    def __init__(self, t: torch.Tensor) -> None:
        self._t = t

    def __getitem__(self, index: Index) -> Selection:
        return Selection(self._t, index)


class Selection:
    """The elements of a tensor at an index, to be read or replaced in a copy of the tensor."""

    def __init__(self, t: torch.Tensor, index: Index) -> None:
        self._t = t
        self._index = index

    def get(self) -> torch.Tensor:
        """Return the elements. Equals ``t[index]``, a view wherever that is one."""
        return self._t[self._index]

    def set(self, value: Value) -> torch.Tensor:
        """Return a copy with ``value`` at the index. Equals ``sliced_assign(t, index, value)``."""
        return sliced_assign(self._t, self._index, value)

    def add(self, value: Value) -> torch.Tensor:
        """Return a copy with ``value`` added at the index, as often as the index names it.

        Equals ``out = t.clone(); out[index] += value; return out`` where the index
        names no element twice, and ``t.index_put(index, value, accumulate=True)``.
        """
        return combined(self._t, self._index, value, "add")

    def multiply(self, value: Value) -> torch.Tensor:
        """Return a copy multiplied by ``value`` at the index, as often as the index names it."""
        return combined(self._t, self._index, value, "multiply")

    def minimum(self, value: Value) -> torch.Tensor:
        """Return a copy in which ``value`` stands at the index wherever it is smaller.

        Where both are equal, the gradient is split evenly, as ``torch.minimum`` does.
        """
        return combined(self._t, self._index, value, "minimum")

    def maximum(self, value: Value) -> torch.Tensor:
        """Return a copy in which ``value`` stands at the index wherever it is larger.

        Where both are equal, the gradient is split evenly, as ``torch.maximum`` does.
        """
        return combined(self._t, self._index, value, "maximum")


def combined(t: torch.Tensor, index: Index, value: Value, operation: Operation) -> torch.Tensor:
    """Return a copy of ``t`` in which each selected element is combined with its value."""
    try:
        values = _as_tensor(value, t)
        if is_basic(index):  # names no element twice
            return sliced_assign(t, index, _ON_VIEWS[operation](t[index], values))
        where = positions(t, index)
        while values.dim() > where.dim() and values.shape[0] == 1:  # as an assignment does
            values = values.squeeze(0)
        flat, where, values = t.reshape(-1), where.reshape(-1), values.expand(where.shape)
        values = values.reshape(-1)
        if operation == "add":
            result = flat.index_put((where,), values, accumulate=True)
        else:
            result = flat.scatter_reduce(0, where, values, _REDUCTIONS[operation])
        result = result.reshape(t.shape)
        if t.is_contiguous() or has_own_dispatch(t) or inside_transform():
            return result
        return torch.empty_like(t).copy_(result)  # t's memory format
    except Exception as error:
        told(error, f"at().{operation}", t, index, value)
        raise


def _as_tensor(value: Any, t: torch.Tensor) -> torch.Tensor:
    """Convert a value as an assignment does, to ``t``'s dtype; a lone number may move."""
    if isinstance(value, torch.Tensor):
        return value.to(t.device, t.dtype) if value.dim() == 0 else value.to(t.dtype)
    return torch.full((), value, dtype=t.dtype, device=t.device)


keep_whole_in_graph(combined)
