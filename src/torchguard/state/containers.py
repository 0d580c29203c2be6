"""Snapshots of dicts, lists, deques, sets, tuples and objects."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from torchguard.state.process import GENERATORS, access_of
from torchguard.state.tensors import Snapshot, capture
from torchguard.state.walk import ATOMS, walk


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
