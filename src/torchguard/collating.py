"""BucketCollator: batches leave the DataLoader's workers at their bucket's size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.data import default_collate

from torchguard.buckets import Buckets
from torchguard.padding import Fill, Side, pad_to_bucket

__all__ = ["BucketCollator"]

Dims: TypeAlias = Any
"""The batch's own structure with, for each tensor to pad, ``{dim: axis}`` in its place."""


class BucketCollator:
    """Collate as another function does, then pad the batch to its buckets.

    Equals ``collate_fn`` where every named dimension has a bucket's size already. Runs where
    the collate function runs, in the DataLoader's workers, and can be pickled if that can.

    Args:
        buckets: a ladder for every axis, or ``{axis: ladder}``.
        dims: which dimensions of which tensors to pad, in the batch's own structure:
            ``{"ids": {1: "t"}, "audio": {"wave": {2: "s"}}}``. An integer key is a dimension,
            the value names its axis; tensors that share an axis must be equally long.
            A batch that is a tuple or list takes a tuple or list, None for what to leave alone.
        fill: what the padding holds, in the same structure: ``{"labels": -100}``; 0 elsewhere.
            As ``value`` of :func:`torchguard.pad_to_bucket`.
        collate_fn: makes the batch; torch's own when left out.
        side: where the padding goes.
        length_key: put ``{axis: length before padding}`` into the batch, a mapping, under this.

    Raises:
        TypeError: ``dims`` does not name dimensions of tensors.
        ValueError: an axis without a ladder.

    Example:
        >>> import torch
        >>> from torchguard import BucketCollator, Buckets
        >>> collate = BucketCollator(Buckets([4, 8]), {"ids": {1: "t"}}, fill={"ids": -1})
        >>> collate([{"ids": torch.tensor([1, 2, 3])}, {"ids": torch.tensor([4, 5, 6])}])
        {'ids': tensor([[ 1,  2,  3, -1],
                [ 4,  5,  6, -1]])}
    """

    def __init__(
        self,
        buckets: Buckets | Mapping[str, Buckets],
        dims: Dims,
        *,
        fill: Any = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        side: Side = "right",
        length_key: str | None = None,
    ) -> None:
        axes = _axes(dims, "dims")
        if not axes:
            raise ValueError("BucketCollator: dims names no dimension to pad")
        if not isinstance(buckets, (Buckets, Mapping)):
            raise TypeError(
                f"BucketCollator: buckets is a {type(buckets).__name__}, expected Buckets or "
                "{axis: Buckets}"
            )
        self._buckets = dict.fromkeys(axes, buckets) if isinstance(buckets, Buckets) else buckets
        missing = sorted(axes - self._buckets.keys())
        if missing:
            raise ValueError(f"BucketCollator: no buckets for {', '.join(map(repr, missing))}")
        _check_fill(fill, dims, "fill")
        self._dims = dims
        self._fill = fill
        self._collate_fn = collate_fn
        self._side: Side = side
        self._length_key = length_key

    def __call__(self, samples: list[Any]) -> Any:
        """Collate ``samples`` and pad the batch.

        Raises:
            KeyError, TypeError: the batch does not have the structure of ``dims``.
            ValueError: no bucket is large enough, or one axis has two lengths.
        """
        seen: dict[str, tuple[int, str]] = {}
        batch = self._pad(self._collate_fn(samples), self._dims, self._fill, "batch", seen)
        if self._length_key is not None:
            if not isinstance(batch, Mapping):
                raise TypeError(
                    f"BucketCollator: length_key needs a batch that is a mapping, not a "
                    f"{type(batch).__name__}"
                )
            batch[self._length_key] = {axis: length for axis, (length, _) in seen.items()}  # type: ignore[index]
        return batch

    def _pad(
        self, batch: Any, dims: Dims, fill: Any, path: str, seen: dict[str, tuple[int, str]]
    ) -> Any:
        if dims is None:
            return batch
        if _is_leaf(dims):
            return self._pad_tensor(batch, dims, 0 if fill is None else fill, path, seen)
        items = dims.items() if isinstance(dims, Mapping) else enumerate(dims)
        padded = {}
        for key, inner in items:
            if inner is None:
                continue
            where = f"{path}[{key!r}]"
            try:
                part = batch[key]
            except (KeyError, IndexError, TypeError):
                has = f"keys {list(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
                raise KeyError(f"BucketCollator: there is no {where}; {path} has {has}") from None
            padded[key] = self._pad(part, inner, _part(fill, key), where, seen)
        return _replaced(batch, padded)

    def _pad_tensor(
        self,
        tensor: Any,
        dims: Mapping[int, str],
        fill: Fill,
        path: str,
        seen: dict[str, tuple[int, str]],
    ) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"BucketCollator: {path} is a {type(tensor).__name__}, expected a tensor; what "
                "collate_fn returns has to be a rectangle before it can be padded"
            )
        for dim, axis in dims.items():
            try:
                length = tensor.shape[dim]
            except IndexError:
                raise IndexError(
                    f"BucketCollator: {path} has shape {tuple(tensor.shape)}, but dims names "
                    f"dimension {dim}"
                ) from None
            before, other = seen.setdefault(axis, (length, path))
            if before != length:
                raise ValueError(
                    f"BucketCollator: axis {axis!r} is {before} in {other} and {length} in {path}"
                )
            padded = pad_to_bucket(tensor, dim, self._buckets[axis], value=fill, side=self._side)
            tensor = padded.tensor
        return tensor  # type: ignore[no-any-return]


def _is_leaf(dims: Any) -> bool:
    return isinstance(dims, Mapping) and bool(dims) and all(type(key) is int for key in dims)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _axes(dims: Dims, path: str) -> set[str]:
    if dims is None:
        return set()
    if _is_leaf(dims):
        for axis in dims.values():
            if not isinstance(axis, str):
                raise TypeError(
                    f"BucketCollator: {path} is {dims!r}, expected {{dimension: axis name}}"
                )
        return set(dims.values())
    if isinstance(dims, Mapping):
        items: Any = dims.items()
    elif _is_sequence(dims):
        items = enumerate(dims)
    else:
        raise TypeError(
            f"BucketCollator: {path} is {dims!r}, expected {{dimension: axis name}}, such as "
            "{1: 't'}"
        )
    return set().union(*(_axes(inner, f"{path}[{key!r}]") for key, inner in items))


def _check_fill(fill: Any, dims: Dims, path: str) -> None:
    """Refuse a fill for something that is not padded: it is a misspelt name."""
    if fill is None or _is_leaf(dims):
        return
    if isinstance(fill, Mapping):
        for key, inner in fill.items():
            if not isinstance(dims, Mapping) or dims.get(key) is None:
                raise ValueError(f"BucketCollator: {path}[{key!r}] is given, but not padded")
            _check_fill(inner, dims[key], f"{path}[{key!r}]")
    elif not _is_sequence(fill) and _is_sequence(dims):
        raise TypeError(f"BucketCollator: {path} is {fill!r}, expected the structure of dims")


def _part(fill: Any, key: Any) -> Any:
    if isinstance(fill, Mapping):
        return fill.get(key)
    return fill[key] if _is_sequence(fill) and key < len(fill) else None


def _replaced(batch: Any, padded: dict[Any, Any]) -> Any:
    """Return the same kind of container with some of its parts replaced."""
    if isinstance(batch, tuple):
        parts = [padded.get(index, part) for index, part in enumerate(batch)]
        return batch._make(parts) if hasattr(batch, "_make") else tuple(parts)
    copied = copy.copy(batch)  # a collate function may keep what it returned
    for key, part in padded.items():
        copied[key] = part
    return copied
