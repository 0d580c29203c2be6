"""Copies of what a step changes: tensors' elements, what dicts, lists and sets hold, RNG states."""

from __future__ import annotations

import copy
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard import _pytree
from torchguard._torch import has_own_dispatch, set_version
from torchguard._torch.fused import FusedLists
from torchguard._torch.optimizers import (
    call_unseen,
    copy_all,
    same_one_by_one,
    same_tensors,
    versions_of,
)
from torchguard.state.tensors import Snapshot, capture

# --- elements --------------------------------------------------------------------------------


class Copies:
    """Copies of tensors' elements, made in bulk: on their device, or on the host if it is full."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.plain, others = parted(tensors, is_plain)
        self.others = [capture(each, data=True) for each in others]
        self.versions = versions_of(self.plain)
        self.copies = call_unseen(_copied, self.plain)

    def restore(self) -> None:
        """Write the elements back into the same tensors, version counters included."""
        call_unseen(copy_all, self.plain, self.copies)
        restore_versions(self.plain, self.versions)
        for saved in self.others:
            saved.restore()

    def written(self) -> int:
        """Return how many of the tensors were written since, by their version counters."""
        return different(versions_of(self.plain), self.versions)


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    try:
        copies = [torch.empty_like(tensor) for tensor in tensors]
    # On a device that holds the parameters, their gradients and two moments, there may be no room.
    except torch.OutOfMemoryError:
        return [tensor.to("cpu", copy=True) for tensor in tensors]
    copy_all(copies, tensors)
    return copies


def parted(
    tensors: Iterable[Tensor], condition: Callable[[Tensor], bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return those that fulfil a condition, and the others; each tensor once."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for tensor in {id(each): each for each in tensors}.values():
        parts[0 if condition(tensor) else 1].append(tensor)
    return parts


def is_plain(tensor: Tensor) -> bool:
    """Whether ``empty_like`` and ``copy_`` keep every bit of it, and it may be written in place."""
    return (
        tensor.layout is torch.strided
        and not has_own_dispatch(tensor)
        and not tensor.is_inference()
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        # An expanded tensor refuses to be written: several of its elements are one.
        and not any(
            step == 0 < size - 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )


def different(now: Sequence[Any], before: Sequence[Any]) -> int:
    """Return in how many places two lists differ."""
    return sum(map(operator.ne, now, before))


def restore_versions(tensors: Sequence[Tensor], versions: Sequence[int | None]) -> None:
    """Put version counters back, so that autograd does not see writes that were undone."""
    for tensor, before, now in zip(tensors, versions, versions_of(list(tensors)), strict=True):
        if before is not None and before != now:
            set_version(tensor, before)


# --- dicts, lists and sets -------------------------------------------------------------------


_ATOMS = {int, float, bool, str, bytes, type(None), complex}
_STATELESS = (nn.Module, Optimizer, type, FunctionType, MethodType, ModuleType)


def _has_attributes(node: Any) -> bool:
    return not isinstance(node, _STATELESS) and hasattr(node, "__dict__")


def _has_state(node: Any) -> bool:
    """Whether the state dict of a scheduler has what this holds, as LambdaLR's has of a callable.

    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/lr_scheduler.py#L352
    """
    return _has_attributes(node) and (
        callable(node) or (hasattr(node, "state_dict") and hasattr(node, "load_state_dict"))
    )


class Containers:
    """Shallow copies of the dicts and lists that objects hold, and copies of the tensors in them.

    Goes into dicts, lists, tuples and sets, not into modules and optimizers. ``into`` says of other
    objects whether to go into their attributes: by default into schedulers and schedules.
    """

    def __init__(
        self,
        roots: Iterable[Any],
        *,
        skip: Iterable[Any] = (),
        into: Callable[[Any], bool] = _has_state,
    ) -> None:
        self._into = into
        self.copies: list[tuple[Any, Any]] = []
        self.tensors: list[Snapshot] = []
        seen = set(map(id, skip))
        waiting = deque(roots)
        while waiting:
            node = waiting.popleft()
            if type(node) not in _ATOMS and id(node) not in seen:
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
            return node
        elif isinstance(node, np.ndarray) and node.flags.writeable:
            self.copies.append((node, node.copy()))
        elif isinstance(node, torch.Generator):
            self.copies.append((node, node.get_state()))
        elif isinstance(node, tuple):
            return node
        elif self._into(node):
            return (vars(node),)
        return ()

    def replaced(self) -> bool:
        """Whether a dict holds other objects than it did, as one does that counts steps."""
        return any(
            isinstance(container, dict)
            and not same_objects(list(container.values()), list(before.values()))
            for container, before in self.copies
        )

    def restore(self) -> None:
        """Put every container and every tensor back; what is unchanged is not touched."""
        for container, before in self.copies:
            restore_container(container, before)
        for saved in self.tensors:
            saved.restore()


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
    elif isinstance(container, np.ndarray):
        container[...] = before
    elif isinstance(container, torch.Generator):
        container.set_state(before)
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


# --- optimizers ------------------------------------------------------------------------------


class StateContainers(Containers):
    """The dicts of an optimizer's state, each with a shallow copy, and what else is in it.

    torch's optimizers keep a dict of tensors and numbers for each parameter. Others keep a tensor
    there, a number under a name, or lists and objects in the dict.
    """

    lists: FusedLists | None = None
    """The lists of a fused step, made from this state."""

    def __init__(self, optimizer: Optimizer) -> None:
        state = optimizer.state
        values = list(state.values())
        self._entries = [each for each in values if isinstance(each, dict)]
        self._entry_copies = list(map(dict.copy, self._entries))
        # Optimizers that are not torch's may count steps in a number of Python, and two equal ones
        # may be two objects; tensors are never compared by their elements.
        self._same_values = comparison_of(chain.from_iterable(map(dict.values, self._entry_copies)))
        inside = [*values, *chain.from_iterable(map(dict.values, self._entry_copies))]
        # Tensors are copied with the parameters, in bulk; a dict of the state below.
        super().__init__(
            [each for each in inside if type(each) not in _ATOMS and not isinstance(each, Tensor)],
            skip=self._entries,
            into=_has_attributes,  # what state_dict() copies is data, whatever its class
        )
        is_nested = self.copies or self.tensors
        self._is_plain = not is_nested and len(values) == len(self._entries)
        self._state = state
        self.copies.append((state, dict(state)))
        self.copies += zip(self._entries, self._entry_copies, strict=True)

    def are_current(self, optimizer: Optimizer) -> bool:
        """Whether the dicts hold the very same tensors and numbers."""
        return (
            self._is_plain
            and optimizer.state is self._state
            and same_objects(list(optimizer.state.values()), self._entries)
            and self._same_values(self._entries, self._entry_copies)
        )


_last_state: weakref.WeakKeyDictionary[Optimizer, StateContainers] = weakref.WeakKeyDictionary()
forget_states: Callable[[], None] = _last_state.clear


def state_of(optimizer: Optimizer) -> StateContainers:
    """Return the containers of an optimizer's state; the last copies if nothing was replaced."""
    last = _last_state.get(optimizer)
    if last is None or not last.are_current(optimizer):
        last = _last_state[optimizer] = StateContainers(optimizer)
    return last


class OptimizerSnapshot:
    """An optimizer's attributes, options and the keys of its state, without the moments."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.state = state_of(optimizer)
        groups = optimizer.param_groups
        parameters = [group["params"] for group in groups]
        options = [each for group in groups for each in group.values() if type(each) not in _ATOMS]
        # Among the attributes may be a logger: what is of another package stays as it is.
        package = type(optimizer).__module__.partition(".")[0]
        self._containers = Containers(
            [vars(optimizer), *options],
            skip=[optimizer.state, groups, *parameters],
            into=lambda node: (
                _has_state(node)
                or (type(node).__module__.partition(".")[0] == package and _has_attributes(node))
            ),
        )
        self.attributes: dict[str, Any] = self._containers.copies[0][1]
        held = (groups, *groups, *parameters)
        self._containers.copies += [(each, each.copy()) for each in held]

    def restore(self) -> None:
        """Put them back."""
        self._containers.restore()
        self.state.restore()


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors in an optimizer's state, also those in lists and dicts of it."""
    found: list[Tensor] = []
    waiting: list[Any] = list(optimizer.state.values())
    while waiting:
        node = waiting.pop()
        if isinstance(node, Tensor):
            found.append(node)
        elif isinstance(node, dict):
            waiting.extend(node.values())
        elif isinstance(node, (list, tuple, set, deque)):
            waiting.extend(node)
    return found


# --- what also= names ------------------------------------------------------------------------


def undos_of(items: Sequence[Any], *, buffers: bool = False) -> list[Callable[[], Any]]:
    """Copy what the user has named in ``also=``, and return what puts each back.

    Of modules the parameters; with ``buffers`` those too, which a snapshot copies with the others.
    """
    tensors: list[Tensor] = []
    undos: list[Callable[[], Any]] = []
    for each in items:
        if isinstance(each, Tensor):
            tensors.append(each)
        elif isinstance(each, nn.Module):
            tensors += [*each.parameters(), *(each.buffers() if buffers else ())]
        elif isinstance(each, torch.Generator):
            undos.append(partial(each.set_state, each.get_state()))
        else:
            state = call_unseen(_copied_tree, each.state_dict())
            undos.append(partial(each.load_state_dict, state))
    return [Copies(tensors).restore, *undos] if tensors else undos


def _copied_tree(tree: Any) -> Any:
    """Copy tensors, numbers and containers: ``state_dict()`` may return the live ones."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    inside = _pytree.children(tree)
    if inside is None:
        return copy.deepcopy(tree)
    copies = {key: _copied_tree(child) for key, child in inside}
    unchanged = all(copies[key] is child for key, child in inside)
    # Nothing can be put into one of these; a tuple of another kind may not be made from items.
    if isinstance(tree, tuple) and unchanged:
        return tree
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return copies
    try:
        return _pytree.with_children(tree, copies)
    except Exception:
        if not unchanged:
            raise
        return tree  # it refuses writes, so it stays as it is
