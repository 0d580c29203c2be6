"""Dicts, lists, deques, sets, tuples and objects: the tensors in them, and snapshots of them."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchguard import _pytree
from torchguard._pytree import ATOMS
from torchguard.state.process import GENERATORS, Access, access_of, generators_among
from torchguard.state.tensors import Snapshot, capture


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """Return the (key, child) pairs of a container; None if ``node`` is not a container.

    Containers are mappings, lists, deques, tuples, sets and data classes. For modules and
    optimizers see :func:`tensors_in`.
    """
    if isinstance(node, (set, frozenset, deque)):
        return list(enumerate(node))
    return _pytree.children(node)


def walk(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield everything inside containers, breadth first, each object once; no numbers and strings.

    A container that contains itself is walked once.
    """
    seen: set[int] = set()
    waiting = deque(roots)
    while waiting:
        node = waiting.popleft()
        if type(node) in ATOMS or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, Tensor):
            continue
        inside = children(node)
        if inside is not None:
            waiting.extend(child for _, child in inside)


_MOST = 1000
"""A container of more items is taken for data, in which no generators are looked for."""


def generators_in(values: Iterable[Any]) -> list[Access]:
    """Return how to read and set the generators among values and in containers of these."""
    values = [each for each in values if type(each) not in ATOMS]
    opened = [each for each in values if isinstance(each, _BUILT_IN) and _may_hold_objects(each)]
    return generators_among((*values, *walk(opened)))


_BUILT_IN = (dict, list, tuple, set, frozenset, deque)


def _may_hold_objects(container: Any) -> bool:
    """Whether a container is small, and not all that is in it are numbers and strings."""
    if not 0 < len(container) <= _MOST:
        return False
    values = container.values() if isinstance(container, dict) else container
    return not ATOMS.issuperset(map(type, values))


# ---- tensors by path ----


def require_container(obj: object, name: str) -> None:
    """Raise a ``TypeError`` if :func:`tensors_in` looks for no tensors in ``obj``."""
    known = isinstance(obj, (Tensor, nn.Module, torch.optim.Optimizer))
    if not known and children(obj) is None:
        raise TypeError(
            f"{name} is of type {type(obj).__name__}, expected a tensor, a module, an optimizer, "
            "or a dict, list, tuple or data class of these"
        )


def tensors_in(obj: Any, path: str, seen: dict[int, object]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor inside ``obj`` and its gradient, with the path that leads to it."""
    if isinstance(obj, Tensor):
        yield path, obj
        if obj.is_leaf and obj.grad is not None:
            yield f"{path}.grad", obj.grad
        return
    if type(obj) in ATOMS or id(obj) in seen:
        return
    seen[id(obj)] = obj  # held: some are made here, and the id of one that is gone is used again
    for step, child in _steps(obj):
        yield from tensors_in(child, path + step, seen)


def _steps(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the children of a module, an optimizer or a container, by how Python reaches them."""
    if isinstance(obj, nn.Module):
        for name, tensor in (*obj.named_parameters(), *obj.named_buffers()):
            yield _step(name), tensor
    elif isinstance(obj, torch.optim.Optimizer):
        for index, group in enumerate(obj.param_groups):
            yield f".param_groups[{index}]", group
        yield ".state", dict(enumerate(obj.state.values()))
    else:
        # Named tuples, and data classes that are no mappings.
        names = getattr(obj, "_fields", ()) if isinstance(obj, tuple) else ()
        by_name = not isinstance(obj, _BY_KEY)
        for key, child in children(obj) or ():
            name = names[key] if names else key
            yield f".{name}" if names or by_name else f"[{key!r}]", child


_BY_KEY = (Mapping, list, tuple, set, frozenset, deque)


def _step(name: str) -> str:
    """Write a parameter's name, ``1.running_var``, as Python would reach it from the module."""
    parts = name.split(".")
    return "".join(
        f".{part}" if part.isidentifier() else f"[{part if part.isdecimal() else repr(part)}]"
        for part in parts
    )


# ---- snapshots ----


class Containers:
    """A snapshot of containers: shallow copies of them, copies of the tensors and arrays in them.

    Goes into dicts, lists, deques, tuples and sets, whatever contains itself once, and not into
    modules and optimizers.

    Args:
        roots: where to begin.
        skip: objects to leave alone, with all that is in them.
        into: says of an object whether to go into its attributes.
        data: whether to copy the elements of tensors.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        *,
        skip: Iterable[Any] = (),
        into: Callable[[Any], bool] = lambda _: False,
        data: bool = True,
    ) -> None:
        self._into, self._data = into, data
        self.copies: list[tuple[Any, Any]] = []
        """Containers and objects with a state, each with what :func:`restore_container` takes."""

        self.tensors: list[Snapshot] = []
        seen = set(map(id, skip))
        waiting = deque(roots)
        while waiting:
            node = waiting.popleft()
            if type(node) not in ATOMS and id(node) not in seen:
                seen.add(id(node))
                waiting.extend(self._take(node))

    def _take(self, node: Any) -> Iterable[Any]:
        """Copy one object; return the objects inside of it."""
        if isinstance(node, Tensor):
            self.tensors.append(capture(node, data=self._data))
        elif isinstance(node, dict):
            stored = _stored(node)
            self.copies.append((node, stored))
            return stored.values()
        elif isinstance(node, (list, deque)):
            self.copies.append((node, list(node)))
            return node
        elif isinstance(node, set):
            self.copies.append((node, set(node)))
            return node
        elif isinstance(node, np.ndarray) and node.flags.writeable:
            self.copies.append((node, node.copy()))
        elif isinstance(node, GENERATORS):
            self.copies.append((node, access_of(node)[0]()))
        elif isinstance(node, tuple):
            return node
        elif self._into(node):
            return (vars(node),)
        return ()

    def restore(self) -> None:
        """Restore every container and every tensor."""
        for container, before in self.copies:
            restore_container(container, before)
        for saved in self.tensors:
            saved.restore()


def restore_container(container: Any, before: Any) -> None:
    """Let a dict, list, deque or set hold what it held; touch only what is different."""
    if isinstance(container, dict):
        _restore_dict(container, before)
    elif isinstance(container, set):
        if container != before:
            container.clear()
            container.update(before)
    elif isinstance(container, np.ndarray):
        container[...] = before
    elif isinstance(container, GENERATORS):
        access_of(container)[1](before)
    elif not same_objects(list(container), before):
        container.clear()
        container.extend(before)


def _restore_dict(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Restore a dict one entry at a time: another thread may be reading the rest."""
    kind, found = _kind(now), _stored(now)
    for key in found.keys() - before.keys():
        kind.__delitem__(now, key)
    for key, value in before.items():
        if key not in found or found[key] is not value:
            now[key] = value  # noqa: PERF403 - a ModelOutput of transformers sets its attribute too
    if not same_objects(list(kind.__iter__(now)), list(before)):  # hooks run in this order
        for key in before:
            kind.__setitem__(now, key, kind.pop(now, key))


def _stored(node: dict[Any, Any]) -> dict[Any, Any]:
    """Return what a dict holds, not what its class makes of it: some make an object when asked."""
    if type(node) is dict:
        return node.copy()
    return {key: dict.__getitem__(node, key) for key in _kind(node).__iter__(node)}


def _kind(node: dict[Any, Any]) -> type[dict[Any, Any]]:
    return OrderedDict if isinstance(node, OrderedDict) else dict


def same_objects(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def copy_of_tree(tree: Any) -> Any:
    """Copy a tree of tensors, numbers and containers: ``state_dict()`` may return the live ones.

    Tensors are detached; a tree that contains itself is copied once.
    """
    inside = list(walk([tree]))
    copies: dict[int, Any] = {
        id(each): each.detach().clone() for each in inside if isinstance(each, Tensor)
    }
    for each in reversed(inside):  # what is inside of another one before that
        if isinstance(each, MappingProxyType):  # Python copies none
            copies[id(each)] = copy.deepcopy(dict(each), copies)
    return copy.deepcopy(tree, copies)
