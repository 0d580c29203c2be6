"""Containers of tensors as a list of leaves and a treedef, and back.

What :mod:`torch.utils._pytree` does, for more kinds of node without registering them: every
mapping, every dataclass, every named tuple. A container is rebuilt from a copy of itself, so that
what it holds besides its items stays.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

KeyPath: TypeAlias = tuple[Any, ...]
"""The keys, indices and field names that lead to a leaf."""

TreeDef: TypeAlias = "tuple[Any, ...] | None"
"""``(type, (key, treedef), ...)`` of a container, None of a leaf. It holds no value of the tree,
so it can be compared, hashed and kept."""


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """Return the (key, child) pairs of a container; None for a leaf."""
    # A module may be a dataclass as well, and is one leaf.
    if isinstance(node, (torch.Tensor, torch.nn.Module)):
        return None
    # A ModelOutput of transformers is both a mapping and a dataclass; its items are the fields that
    # are not None: https://github.com/huggingface/transformers/blob/main/src/transformers/utils/generic.py
    if isinstance(node, Mapping):
        return list(node.items())
    # torch.Size is a tuple that torch makes itself, and that no tensor is in.
    if isinstance(node, (tuple, list)):
        return None if isinstance(node, torch.Size) else list(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [each.name for each in dataclasses.fields(node)]
        return [(name, getattr(node, name)) for name in names if hasattr(node, name)]
    return None


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """Return the leaves in order, and the structure; :func:`unflatten` is the way back.

    Example:
        >>> flatten({"ids": 1, "more": [2, 3]})[0]
        [1, 2, 3]
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def _inside(node: Any) -> Iterable[tuple[Any, Any]] | None:
    # The usual containers first: asking whether something is a Mapping takes longer than the rest.
    if type(node) is dict:
        return node.items()
    if type(node) is list or type(node) is tuple:
        return enumerate(node)
    return children(node)


def _flatten(node: Any, leaves: list[Any]) -> TreeDef:
    inside = _inside(node)
    if inside is None:
        leaves.append(node)
        return None
    treedef: list[Any] = [type(node)]
    for key, child in inside:
        if type(child) is torch.Tensor:
            leaves.append(child)
            treedef.append((key, None))
        else:
            treedef.append((key, _flatten(child, leaves)))
    return tuple(treedef)


def unflatten(leaves: Sequence[Any], like: Any) -> Any:
    """Return a tree as ``like`` is one, with these leaves.

    A container whose leaves are the ones it has is returned itself; any other is copied first,
    so ``like`` is never changed.

    Example:
        >>> unflatten([4, 5, 6], {"ids": 1, "more": [2, 3]})
        {'ids': 4, 'more': [5, 6]}
    """
    remaining = iter(leaves)
    tree = _unflatten(like, remaining)
    if next(remaining, remaining) is not remaining:
        raise ValueError(f"unflatten: {len(leaves)} leaves are too many for {type(like).__name__}")
    return tree


def _unflatten(node: Any, remaining: Iterator[Any]) -> Any:
    inside = _inside(node)
    if inside is None:
        return next(remaining)
    new = {}
    for key, child in inside:
        made = next(remaining) if type(child) is torch.Tensor else _unflatten(child, remaining)
        if made is not child:
            new[key] = made
    return with_children(node, new) if new else node


def with_children(node: Any, new: Mapping[Any, Any]) -> Any:
    """Return a copy of a container in which the children under these keys are replaced."""
    if type(node) is dict:
        return {**node, **new}
    if isinstance(node, tuple):
        items = [new.get(index, child) for index, child in enumerate(node)]
        if type(node) is tuple:
            return tuple(items)
        make = getattr(node, "_make", None)  # of a NamedTuple; torch.return_types take a list
        return type(node)(items) if make is None else make(items)
    if isinstance(node, Mapping) and not hasattr(type(node), "__setitem__"):
        kind: Any = type(node)  # such as MappingProxyType, which copy refuses
        return kind({**node, **new})
    copied = _copied(node)
    if isinstance(node, (Mapping, list)) or not dataclasses.is_dataclass(node):
        for key, child in new.items():
            copied[key] = child
    else:
        for name, child in new.items():
            object.__setattr__(copied, name, child)  # a frozen dataclass refuses its own
    return copied


def _copied(node: Any) -> Any:
    copied = copy.copy(node)
    if isinstance(node, Mapping) and not isinstance(node, dict):
        # A class of the user's own may keep its items in an attribute, which both share now.
        for name, value in getattr(node, "__dict__", {}).items():
            if isinstance(value, (dict, list)) and vars(copied).get(name) is value:
                vars(copied)[name] = copy.copy(value)
    return copied


def replace(tree: Any, new: Mapping[KeyPath, Any]) -> Any:
    """Return a copy of a tree with other parts at some paths; a part may be a container.

    Example:
        >>> replace({"ids": [1, 2], "more": 3}, {("ids",): 4})
        {'ids': 4, 'more': 3}
    """
    if () in new:
        return new[()]
    below: dict[Any, dict[KeyPath, Any]] = {}
    for (key, *path), part in new.items():
        below.setdefault(key, {})[tuple(path)] = part
    return with_children(
        tree, {key: replace(child_of(tree, key), inner) for key, inner in below.items()}
    )


def child_of(node: Any, key: Any) -> Any:
    """Return a part of a container, or ``node[key]`` of an object that is none of those known."""
    inside = children(node)
    return node[key] if inside is None else dict(inside)[key]


def key_paths(treedef: TreeDef) -> list[KeyPath]:
    """Return the path of each leaf, in the order of the leaves.

    Example:
        >>> key_paths(flatten({"ids": 1, "more": [2, 3]})[1])
        [('ids',), ('more', 0), ('more', 1)]
    """
    if treedef is None:
        return [()]
    _, *inside = treedef
    return [(key, *path) for key, child in inside for path in key_paths(child)]


def keystr(name: str, path: KeyPath, tree: Any = None) -> str:
    """Return a path as one would type it: ``batch['ids']``, ``output.logits``, ``output[0]``."""
    node = tree
    for key in path:
        attribute = isinstance(key, str) and key.isidentifier() and hasattr(node, key)
        name += f".{key}" if attribute and type(node) is not dict else f"[{key!r}]"
        node = dict(children(node) or ()).get(key)
    return name
