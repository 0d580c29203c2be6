"""Containers of tensors: look inside, and build the same kind again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

__all__ = ["Path", "flattened", "is_leaf", "parts", "rebuilt", "replaced", "spelled"]

Path: TypeAlias = tuple[Any, ...]
"""The keys, indexes and field names that lead to a part."""

_PLAIN = (int, float, complex, str, bytes, bool, torch.dtype, torch.device)


def parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the (key, part) pairs of a container, None for anything else."""
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    return None


def is_leaf(value: Any) -> bool:
    """Whether there is certainly no tensor inside that :func:`parts` does not show."""
    return value is None or isinstance(value, (torch.Tensor, torch.Size, *_PLAIN))


def rebuilt(value: Any, new: Mapping[Any, Any]) -> Any:
    """Return the same kind of container with some of its parts replaced."""
    if isinstance(value, tuple):
        items = [new.get(index, part) for index, part in enumerate(value)]
        if type(value) is tuple:
            return tuple(items)
        make = getattr(value, "_make", None)  # of a NamedTuple; torch.return_types take a list
        return type(value)(items) if make is None else make(items)
    copied = copy.copy(value)
    if isinstance(value, (Mapping, list)):
        for key, part in new.items():
            copied[key] = part
    else:
        for name, part in new.items():
            object.__setattr__(copied, name, part)  # a frozen dataclass refuses its own
    return copied


def replaced(value: Any, new: Mapping[Path, Any]) -> Any:
    """Replace the parts at these paths; the path () stands for the value itself."""
    if () in new:
        return new[()]
    inner: dict[Any, dict[Path, Any]] = {}
    for path, part in new.items():
        inner.setdefault(path[0], {})[path[1:]] = part
    children = dict(parts(value) or ())
    return rebuilt(value, {key: replaced(children[key], below) for key, below in inner.items()})


def flattened(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every part that is no container, with the path to it."""
    inside = parts(value)
    if inside is None:
        yield path, value
        return
    for key, part in inside:
        yield from flattened(part, (*path, key))


def spelled(name: str, path: Path, whole: Any = None) -> str:
    """Spell a part as one would type it: ``batch['ids']``, ``output.logits``, ``output[0]``."""
    for key in path:
        attribute = isinstance(key, str) and key.isidentifier() and hasattr(whole, key)
        name += f".{key}" if attribute and type(whole) is not dict else f"[{key!r}]"
        inside = dict(parts(whole) or ())
        whole = inside.get(key)
    return name
