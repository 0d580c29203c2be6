"""What ``dims=`` declares: which dims of which tensors have a name, and how long each name is.

The form is that of ``dynamic_shapes`` of ``torch.export``, with ``{dim: name}`` for a tensor:
https://pytorch.org/docs/stable/export.html#expressing-dynamism
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from torchguard._pytree import KeyPath, child_of, keystr

Axes: TypeAlias = Sequence[tuple[int, str]]
"""The dims of a tensor that have a name: (dim, its name)."""


def leaves_of(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield what is declared for each tensor, ``{dim: name}`` in one piece, and its path."""
    is_sequence = isinstance(tree, Sequence) and not isinstance(tree, (str, bytes))
    if _of_a_tensor(tree) or not (isinstance(tree, Mapping) or is_sequence):
        yield path, tree
        return
    for key, inner in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves_of(inner, (*path, key))


def _of_a_tensor(tree: Any) -> bool:
    return isinstance(tree, Mapping) and bool(tree) and all(type(key) is int for key in tree)


def declared_dims(dims: Any, operation: str) -> dict[KeyPath, Axes]:
    """Return the named dims of each tensor that ``dims`` names, by its path."""
    declared: dict[KeyPath, Axes] = {}
    for path, each in leaves_of(dims):
        if each is None:
            continue
        named = each.items() if _of_a_tensor(each) else ()
        axes = tuple((dim, _name_of(axis)) for dim, axis in named)
        if not axes or not all(name for _, name in axes):
            raise TypeError(
                f"{operation}: {keystr('dims', path)} is {each!r}, expected {{dim: name}}, such "
                "as {1: 't'}"
            )
        declared[path] = axes
    return declared


def _name_of(axis: Any) -> str:
    """Return the name of an axis, a text or a ``torch.export.Dim``; empty if it has none."""
    name = axis if isinstance(axis, str) else getattr(axis, "__name__", None)
    return name if isinstance(name, str) else ""


def part_of(tree: Any, path: KeyPath, name: str, operation: str) -> Any:
    """Return a part of what is called ``name``; None where it, or a container of it, is None."""
    part = tree
    for count, key in enumerate(path, start=1):
        if part is None:
            return None
        if isinstance(part, torch.Tensor):
            raise TypeError(
                f"{operation}: dims has an entry for {keystr(name, path, tree)}, but "
                f"{keystr(name, path[: count - 1], tree)} is a tensor, expected {{dim: name}}"
            )
        try:
            part = child_of(part, key)
        except (KeyError, IndexError, TypeError):
            has = f"keys {list(part)}" if isinstance(part, Mapping) else type(part).__name__
            raise KeyError(
                f"{operation}: there is no {keystr(name, path[:count], tree)}; it has {has}"
            ) from None
    return part


def axes_in(tensor: torch.Tensor, axes: Axes, label: str, operation: str) -> Axes:
    """Return the named dims of a tensor, counted from its first."""
    count = tensor.dim()
    for dim, _ in axes:
        if not -count <= dim < count:
            raise IndexError(
                f"{operation}: {label} has shape {tuple(tensor.shape)}, but dims names its "
                f"dimension {dim}"
            )
    return tuple((dim % count, axis) for dim, axis in axes)


def lengths_by_axis(
    tensors: Iterable[tuple[str, Sequence[int], Axes]], operation: str
) -> dict[str, int]:
    """Return how long each axis is, of (label, shape, named dims) of tensors that agree."""
    found: dict[str, tuple[int, str]] = {}
    for label, shape, axes in tensors:
        for dim, axis in axes:
            before, other = found.setdefault(axis, (shape[dim], label))
            if before != shape[dim]:
                raise ValueError(
                    f"{operation}: axis {axis!r} is {before} in {other} and {shape[dim]} in {label}"
                )
    return {axis: length for axis, (length, _) in found.items()}


def declared_at(declared: Any, path: KeyPath) -> Any:
    """Return what a tree of options says of a leaf; what it says of a container is of all in it."""
    for key in path:
        if isinstance(declared, Mapping):
            declared = declared.get(key)
        elif isinstance(declared, (tuple, list)):
            declared = declared[key] if isinstance(key, int) and key < len(declared) else None
    return declared
