"""Dicts, lists and sets that a step changes: what they held, put back into the same objects."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard._torch.optimizers import same_one_by_one, same_tensors
from torchguard.rollback.snapshot import Snapshot, capture

__all__ = [
    "Containers",
    "OptimizerSnapshot",
    "StateContainers",
    "comparison_of",
    "restore_container",
    "same_objects",
]


class Containers:
    """Shallow copies of the dicts and lists that objects hold, and copies of the tensors in them.

    Goes into dicts, lists, tuples and sets, and into what holds state of its own inside a
    scheduler (another scheduler), but not into modules and optimizers.
    """

    def __init__(self, roots: Iterable[Any], *, skip: Iterable[Any] = ()) -> None:
        self.copies: list[tuple[Any, Any]] = []
        self.tensors: list[Snapshot] = []
        seen = set(map(id, skip))
        waiting = deque(roots)
        while waiting:
            node = waiting.popleft()
            if type(node) in _ATOMS or id(node) in seen:
                continue
            seen.add(id(node))
            waiting.extend(self._children(node))

    def _children(self, node: Any) -> Iterable[Any]:
        if isinstance(node, Tensor):
            self.tensors.append(capture(node, data=True))
        elif isinstance(node, dict):
            self.copies.append((node, dict(node)))
            return node.values()
        elif isinstance(node, (list, deque)):
            self.copies.append((node, list(node)))
            return node
        elif isinstance(node, set):
            self.copies.append((node, set(node)))
        elif isinstance(node, tuple):
            return node
        elif _has_state(node):
            return (vars(node),)
        return ()

    def restore(self) -> None:
        """Put every container and every tensor back; what is unchanged is not touched."""
        for container, before in self.copies:
            restore_container(container, before)
        for saved in self.tensors:
            saved.restore()


_ATOMS = {int, float, bool, str, bytes, type(None), complex}


def _has_state(node: Any) -> bool:
    return (
        not isinstance(node, (nn.Module, Optimizer, type))
        and hasattr(node, "state_dict")
        and hasattr(node, "load_state_dict")
        and hasattr(node, "__dict__")
    )


def restore_container(container: Any, before: Any) -> None:
    """Let a dict, list, deque or set hold what it held, in the order in which it held it."""
    if isinstance(container, dict):
        if same_objects(list(container.values()), list(before.values())) and list(
            container
        ) == list(before):
            return
        # Emptied and filled: the order of a dict is that of insertion, and hooks run in it.
        container.clear()
        container.update(before)
    elif isinstance(container, set):
        if container != before:
            container.clear()
            container.update(before)
    elif not same_objects(list(container), before):
        container.clear()
        container.extend(before)


def same_objects(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def comparison_of(values: Iterable[Any]) -> Callable[[Any, Any], bool]:
    """Return how to find out whether dicts hold the very same values: quickly if it can be."""
    kinds: set[Any] = set(map(type, values))
    compared_by_identity = all(
        kind is type(None) or issubclass(kind, Tensor) or kind.__eq__ is object.__eq__
        for kind in kinds
    )
    return same_tensors if compared_by_identity else same_one_by_one


class StateContainers:
    """The dicts of an optimizer's state, each with a shallow copy."""

    def __init__(self, optimizer: Optimizer) -> None:
        state = optimizer.state
        self._entries = list(state.values())
        self._entry_copies = list(map(dict.copy, self._entries))
        # Optimizers that are not torch's may count steps in a number of Python, and two equal ones
        # may be two objects; tensors are never compared by their elements.
        self._same_values = comparison_of(chain.from_iterable(map(dict.values, self._entry_copies)))
        self.copies: list[tuple[Any, Any]] = [(state, dict(state))]
        self.copies += zip(self._entries, self._entry_copies, strict=True)

    def are_current(self, optimizer: Optimizer) -> bool:
        """Whether the dicts hold the very same tensors and numbers."""
        return (
            optimizer.state is self.copies[0][0]
            and same_objects(list(optimizer.state.values()), self._entries)
            and self._same_values(self._entries, self._entry_copies)
        )


class OptimizerSnapshot:
    """An optimizer's attributes, options and the keys of its state, without the moments."""

    def __init__(self, optimizer: Optimizer, state: StateContainers) -> None:
        self.optimizer = optimizer
        self.attributes = dict(vars(optimizer))
        self.state = state
        groups = optimizer.param_groups
        self._containers: list[tuple[Any, Any]] = [(groups, groups.copy())]
        options: list[Any] = []
        for group in groups:
            parameters = group["params"]
            self._containers += [(group, group.copy()), (parameters, parameters.copy())]
            options += [each for each in group.values() if type(each) not in _ATOMS]
        self._options = Containers(options, skip=[group["params"] for group in groups])

    def restore(self) -> None:
        """Put them back."""
        restore_container(vars(self.optimizer), self.attributes)
        for container, before in (*self._containers, *self.state.copies):
            restore_container(container, before)
        self._options.restore()
