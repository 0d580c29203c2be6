"""``at(t)[index].set(value)``: JAX's spelling of an update that returns a new tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from torchguard._public import public
from torchguard._torch import has_own_dispatch, inside_transform, keep_whole_in_graph
from torchguard.assignment.assign import (
    Index,
    Part,
    Value,
    describe_index,
    describe_tensor,
    is_basic,
    is_integer,
    is_integer_scalar,
    name_the_call,
    parts_of,
    sliced_assign,
)

Operation = Literal["set", "add", "subtract", "multiply", "divide", "power", "min", "max"]
Mode = Literal["promise_in_bounds", "clip", "drop", "fill"]

_ON_VIEWS: dict[str, Any] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "power": torch.pow,
    "min": torch.minimum,
    "max": torch.maximum,
}
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_REDUCTIONS = {"multiply": "prod", "divide": "prod", "power": "prod", "min": "amin", "max": "amax"}


@public
def at(t: torch.Tensor) -> At:
    """Start an update of a copy of ``t``, as JAX's ``x.at`` does.

    ======================================  =================================
    torchguard, and JAX with ``t.at``       numpy, on a copy of ``t``
    ======================================  =================================
    ``at(t)[index].set(value)``             ``t[index] = value``
    ``at(t)[index].add(value)``             ``np.add.at(t, index, value)``
    ``at(t)[index].subtract(value)``        ``np.subtract.at(t, index, value)``
    ``at(t)[index].multiply(value)``        ``np.multiply.at(t, index, value)``
    ``at(t)[index].divide(value)``          ``np.divide.at(t, index, value)``
    ``at(t)[index].power(value)``           ``np.power.at(t, index, value)``
    ``at(t)[index].min(value)``             ``np.minimum.at(t, index, value)``
    ``at(t)[index].max(value)``             ``np.maximum.at(t, index, value)``
    ``at(t)[index].apply(function)``        ``function.at(t, index)``
    ``at(t)[index].get()``                  ``t[index]``
    ======================================  =================================

    ``t`` is not changed, and ``index`` is read as torch reads it in ``t[index]``. Where it names an
    element several times, every operation but ``set`` is applied each time. Values are tensors,
    numbers, lists or numpy arrays, and become ``t``'s dtype. ``mul`` is ``multiply``.

    Unlike JAX, an index out of bounds raises ``IndexError`` (on CUDA it is an assert, as in
    ``t[index]``). JAX's ``mode=`` is taken by every method: ``"clip"`` moves such an index to the
    nearest element, ``"drop"`` or ``"fill"`` leaves it out of an update and reads ``fill_value``
    for it. Negative indices count from the end first.

    Upstream: https://docs.jax.dev/en/latest/_autosummary/jax.numpy.ndarray.at.html

    Example:
        >>> import torch, torchguard
        >>> torchguard.at(torch.zeros(3))[[0, 0, 2]].add(1.0)
        tensor([2., 0., 1.])
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"at: t is of type {type(t).__name__}, expected a torch.Tensor")
    return At(t)


class At:
    """What :func:`at` returns; index it."""

    def __init__(self, t: torch.Tensor) -> None:
        self._t = t

    def __getitem__(self, index: Index) -> Selection:
        # Tensors stand for the arrays of an index, which compilers don't trace everywhere.
        if isinstance(index, tuple):
            return Selection(self._t, tuple([_without_array(item) for item in index]))
        return Selection(self._t, _without_array(index))

    if not TYPE_CHECKING:  # type checkers find it themselves

        def __getattr__(self, name: str) -> Any:
            if name in vars(Selection) and not name.startswith("_"):
                raise AttributeError(
                    f"at: the index is missing: write at(x)[index].{name}(...), or "
                    f"at(x)[...].{name}(...) for all elements"
                )
            raise AttributeError(f"'At' object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"at({describe_tensor(self._t)})"


class Selection:
    """The elements of a tensor at an index, to be read or replaced in a copy of the tensor."""

    def __init__(self, t: torch.Tensor, index: Index) -> None:
        self._t = t
        self._index = index

    def __repr__(self) -> str:
        index = describe_index(self._index).removeprefix("(").removesuffix(")")
        return f"at({describe_tensor(self._t)})[{index}]"

    def get(self, *, mode: Mode | None = None, fill_value: float | None = None) -> torch.Tensor:
        """Return the elements. Equals ``t[index]``, a view wherever that is one.

        Args:
            mode: see :func:`at`.
            fill_value: what ``"fill"`` reads out of bounds. As in JAX: NaN for floating dtypes, the
                smallest number for signed integers, the largest for unsigned, True for bool.
        """
        # Up to 2.13, t[i] with a tensor i of one integer does not compile in one graph.
        scalar = torch.compiler.is_compiling() and any(map(is_integer_scalar, _items(self._index)))
        if mode in {None, "promise_in_bounds"} and not scalar:
            return self._t[self._index]
        return taken(self._t, self._index, mode, fill_value)

    def set(self, value: Value, *, mode: Mode | None = None) -> torch.Tensor:
        """Return a copy with ``value`` at the index.

        Equals ``sliced_assign(t, index, value)`` for a value of ``t``'s dtype. Where the index
        names an element twice, torch chooses which value is stored.
        """
        if mode is None:
            return sliced_assign(self._t, self._index, _value(value, self._t))
        return combined(self._t, self._index, _value(value, self._t), "set", mode)

    def add(self, value: Value, *, mode: Mode | None = None) -> torch.Tensor:
        """Return a copy with ``value`` added at the index, as often as the index names it.

        Equals ``out = t.clone(); out[index] += value; return out`` where the index
        names no element twice, and ``t.index_put(index, value, accumulate=True)``.
        """
        return combined(self._t, self._index, _value(value, self._t), "add", mode)

    def subtract(self, value: Value, *, mode: Mode | None = None) -> torch.Tensor:
        """Return a copy less ``value`` at the index, as often as the index names it."""
        return combined(self._t, self._index, _value(value, self._t), "subtract", mode)

    def multiply(self, value: Value, *, mode: Mode | None = None) -> torch.Tensor:
        """Return a copy multiplied by ``value`` at the index, as often as the index names it."""
        return combined(self._t, self._index, _value(value, self._t), "multiply", mode)

    mul = multiply

    def divide(self, value: Value, *, mode: Mode | None = None) -> torch.Tensor:
        """Return a copy divided by ``value`` at the index, as often as the index names it.

        The divisors of an element are multiplied first, which can overflow or underflow.

        Raises:
            TypeError: if ``t`` holds integers, which a quotient is not.
        """
        return combined(self._t, self._index, _value(value, self._t), "divide", mode)

    def power(self, value: Value, *, mode: Mode | None = None) -> torch.Tensor:
        """Return a copy raised to ``value`` at the index, as often as the index names it.

        The exponents of an element are multiplied first, in ``t``'s dtype. Integers take
        negative exponents, as in ``torch.pow`` of two tensors.
        """
        return combined(self._t, self._index, _value(value, self._t), "power", mode)

    def min(self, value: Value, *, mode: Mode | None = None) -> torch.Tensor:
        """Return a copy in which ``value`` stands at the index wherever it is smaller.

        Where both are equal, the gradient is split evenly, as ``torch.minimum`` does.
        """
        return combined(self._t, self._index, _value(value, self._t), "min", mode)

    def max(self, value: Value, *, mode: Mode | None = None) -> torch.Tensor:
        """Return a copy in which ``value`` stands at the index wherever it is larger.

        Where both are equal, the gradient is split evenly, as ``torch.maximum`` does.
        """
        return combined(self._t, self._index, _value(value, self._t), "max", mode)

    def apply(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        *,
        mode: Mode | None = None,
        unique_indices: bool = False,
    ) -> torch.Tensor:
        """Return a copy with ``function`` applied at the index, as often as the index names it.

        Args:
            function: takes a tensor of elements and returns one of that shape, element by element.
            mode: see :func:`at`.
            unique_indices: promises that the index names no element twice. Counting how often it
                does needs the values of the index, so under ``torch.compile`` and ``torch.func``
                an index with tensors or lists needs the promise.

        Raises:
            NotImplementedError: where that promise is needed and not given.
        """
        arrays = [x for x in _items(self._index) if isinstance(x, (torch.Tensor, list))]
        if unique_indices or not arrays:
            selected = self.get(mode=mode, fill_value=1)
            if all(map(is_integer_scalar, arrays)):  # a view, which the function may write
                selected = selected.clone()
            return self.set(function(selected), mode=mode)
        if torch.compiler.is_compiling() or inside_transform():
            raise NotImplementedError(
                "at().apply: how often this index names an element is not known while compiling "
                "or in torch.func; if it names none twice, write "
                "at(t)[index].apply(function, unique_indices=True)"
            )
        return _applied(self._t, self._index, function, mode)


def combined(
    t: torch.Tensor, index: Index, value: Value, operation: Operation, mode: Mode | None = None
) -> torch.Tensor:
    """Return a copy of ``t`` in which each selected element is combined with its value."""
    if operation == "divide" and not (t.is_floating_point() or t.is_complex()):
        raise TypeError(
            f"at().divide: t is {t.dtype} and a quotient is not; write "
            "at(t.double())[index].divide(value), or at(t)[index].set(t[index] // value) to round"
        )
    try:
        values = _as_tensor(value, t)
        lenient = _is_lenient(mode)
        if not lenient and operation == "set":
            return sliced_assign(t, index, values)
        if not lenient and is_basic(index):  # names no element twice
            return sliced_assign(t, index, _ON_VIEWS[operation](t[index], values))
        where = positions(t, index, mode)
        while values.dim() > where.dim() and values.shape[0] == 1:  # as an assignment does
            values = values.squeeze(0)
        flat, where, values = t.reshape(-1), where.reshape(-1), values.expand(where.shape)
        values = values.reshape(-1)
        if lenient:  # one place more, for what is dropped
            flat = torch.cat((flat, flat.new_ones(1)))
        result = _scattered(flat, where, values, operation)
        result = result[: t.numel()].reshape(t.shape)
        if t.is_contiguous() or has_own_dispatch(t) or inside_transform():
            return result
        return torch.empty_like(t).copy_(result)  # t's memory format
    except Exception as error:
        name_the_call(error, f"at().{operation}", t, index, value)
        raise


def _scattered(
    flat: torch.Tensor, where: torch.Tensor, values: torch.Tensor, operation: Operation
) -> torch.Tensor:
    """Combine in one dimension, where each element is named by its position."""
    if operation == "set":
        return flat.index_put((where,), values)
    if operation in {"add", "subtract"}:
        # index_put accumulates in one kernel; scatter_reduce has no difference.
        values = -values if operation == "subtract" else values
        return flat.index_put((where,), values, accumulate=True)
    reduction = _REDUCTIONS[operation]
    if operation not in {"divide", "power"}:
        return flat.scatter_reduce(0, where, values, reduction)
    # x / a / b = x / (a b) and (x ** a) ** b = x ** (a b), as JAX computes them too.
    together = torch.ones_like(flat).scatter_reduce(0, where, values, reduction)
    # Leave the others out: a complex infinity / 1 has a NaN, and the gradient of x ** 1 for its
    # exponent is NaN where x is negative.
    touched = torch.zeros_like(flat, dtype=torch.bool).index_fill(0, where, 1)
    if operation == "divide":
        return torch.where(touched, flat / together, flat)
    return torch.where(touched, torch.where(touched, flat, 1) ** together, flat)


def taken(
    t: torch.Tensor, index: Index, mode: Mode | None, fill_value: float | None
) -> torch.Tensor:
    """Return the elements at an index that may be out of bounds, or is a tensor of one integer."""
    try:
        where = positions(t, index, mode)
        flat = t.reshape(-1)
        if _is_lenient(mode):
            fill = _fill(t.dtype) if fill_value is None else fill_value
            flat = torch.cat((flat, torch.full((1,), fill, dtype=t.dtype, device=t.device)))
        return flat[where.reshape(-1)].reshape(where.shape)
    except Exception as error:
        name_the_call(error, "at().get", t, index, fill_value)
        raise


keep_whole_in_graph(combined, taken)


def _applied(
    t: torch.Tensor, index: Index, function: Callable[..., torch.Tensor], mode: Mode | None
) -> torch.Tensor:
    """Apply a function to each selected element, and again where it is named again."""
    try:
        where = positions(t, index, mode).reshape(-1)
        places, counts = where[where < t.numel()].unique(return_counts=True)
        values = t.reshape(-1)[places]
        # An element that is named three times becomes function(function(function(x))).
        for turn in range(int(counts.max()) if counts.numel() else 0):
            again = counts > turn
            values = values.index_put((again,), function(values[again]).to(t.dtype))
        result = t.reshape(-1).index_put((places,), values).reshape(t.shape)
        return result if t.is_contiguous() else torch.empty_like(t).copy_(result)
    except Exception as error:
        name_the_call(error, "at().apply", t, index, function)
        raise


def _is_lenient(mode: Mode | None) -> bool:
    if mode not in {None, "promise_in_bounds", "clip", "drop", "fill"}:
        raise ValueError(f'mode is {mode!r}; expected "clip", "drop", "fill" or None')
    return mode in {"clip", "drop", "fill"}


def _fill(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min if limits.min < 0 else limits.max


def _without_array(item: Any) -> Any:
    if isinstance(item, np.ndarray):
        rows = torch.as_tensor(item)
        # A tensor of uint8 would be a mask, and the other unsigned dtypes are refused.
        return rows.to(torch.int64) if rows.dtype in _UNSIGNED else rows
    return item


def _value(value: Any, t: torch.Tensor) -> Any:
    if isinstance(value, (np.ndarray, np.generic, list, tuple)):
        return torch.as_tensor(value, dtype=t.dtype, device=t.device)
    # An assignment converts a tensor only where the index selects a view.
    if isinstance(value, torch.Tensor) and value.dtype != t.dtype:
        return value.to(t.dtype)
    return value


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _as_tensor(value: Any, t: torch.Tensor) -> torch.Tensor:
    """Convert a value as an assignment does, to ``t``'s dtype; a lone number may move."""
    if isinstance(value, torch.Tensor):
        return value.to(t.device, t.dtype) if value.dim() == 0 else value.to(t.dtype)
    return torch.full((), value, dtype=t.dtype, device=t.device)


# ---- where the elements of t[index] stand in t.reshape(-1) ----


def positions(t: torch.Tensor, index: Any, mode: Mode | None) -> torch.Tensor:
    """Return where the elements of ``t[index]`` stand in ``t.reshape(-1)``, in its shape.

    Each dimension's coordinates are an expanded ``arange``, which takes no memory
    until torch picks the selected ones out of it.
    """
    if _is_lenient(mode):
        return _positions_in_bounds(t, index, clip=mode == "clip")
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


def _positions_in_bounds(t: torch.Tensor, index: Any, *, clip: bool) -> torch.Tensor:
    """Return what :func:`positions` does for an index whose integers may be out of bounds.

    With ``clip`` they are moved to the nearest element. Without, the position of an element that
    isn't there is ``t.numel()``: each indexed dimension is read as if it had one row more, and
    what lands there is out of bounds.
    """
    parts = parts_of(tuple(map(_as_rows, _items(index))), t.dim())
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


def _as_rows(item: Any) -> Any:
    """Turn a list into a tensor; one that some versions of torch read as a tuple is refused."""
    if not isinstance(item, list):
        return item
    if all(isinstance(each, bool) or is_integer(each) for each in item):
        return torch.tensor(item, dtype=None if item else torch.int64)
    raise TypeError(f"expected a list of integers, got {describe_index(item)}: write a tensor")


def _names_rows(part: Part) -> bool:
    """Whether an item of an index names rows by number, so that it can be out of bounds."""
    if isinstance(part.item, torch.Tensor):
        return part.item.dtype not in {torch.bool, torch.uint8}
    return is_integer(part.item)
