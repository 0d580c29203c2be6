"""Optimizers: options, attributes, the keys of their state and the tensors in it."""

from __future__ import annotations

import weakref
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard.state.containers import ATOMS, Containers, same_objects, walk
from torchguard.state.modules import comparison_of

_STATELESS = (nn.Module, Optimizer, type, FunctionType, MethodType, ModuleType)


def has_attributes(node: Any) -> bool:
    """Whether an object is one of a library or the user, with attributes of its own."""
    return not isinstance(node, _STATELESS) and hasattr(node, "__dict__")


def has_state(node: Any) -> bool:
    """Whether the state dict of a scheduler has what this holds, as LambdaLR's has of a callable.

    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/lr_scheduler.py#L352
    """
    return has_attributes(node) and (
        callable(node) or (hasattr(node, "state_dict") and hasattr(node, "load_state_dict"))
    )


class OptimizerSnapshot:
    """A snapshot of an optimizer's attributes, options and the keys and numbers of its state.

    The tensors in its state are not copied: see :func:`state_tensors`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.state = _state_of(optimizer)
        groups = optimizer.param_groups
        parameters = [group["params"] for group in groups]
        options = [each for group in groups for each in group.values() if type(each) not in ATOMS]
        # Among the attributes may be a logger: objects of another package are left alone.
        package = type(optimizer).__module__.partition(".")[0]
        self._containers = Containers(
            [vars(optimizer), *options],
            skip=[optimizer.state, groups, *parameters],
            into=lambda node: (
                has_state(node)
                or (type(node).__module__.partition(".")[0] == package and has_attributes(node))
            ),
        )
        self.attributes: dict[str, Any] = self._containers.copies[0][1]
        held = (groups, *groups, *parameters)
        self._containers.copies += [(each, each.copy()) for each in held]

    def restore(self) -> None:
        """Restore them in place."""
        self._containers.restore()
        self.state.restore()


class _StateContainers(Containers):
    """A snapshot of the dicts of an optimizer's state, and of the containers in them.

    PyTorch's optimizers keep a dict of tensors and numbers for each parameter. Others keep a tensor
    there, a number under a name, or lists and objects in the dict.
    """

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
            [each for each in inside if type(each) not in ATOMS and not isinstance(each, Tensor)],
            skip=self._entries,
            into=has_attributes,  # state_dict() copies it, whatever its class
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


_last_state: weakref.WeakKeyDictionary[Optimizer, _StateContainers] = weakref.WeakKeyDictionary()


def _state_of(optimizer: Optimizer) -> _StateContainers:
    """Return a snapshot of an optimizer's state; the last one if nothing was replaced."""
    last = _last_state.get(optimizer)
    if last is None or not last.are_current(optimizer):
        last = _last_state[optimizer] = _StateContainers(optimizer)
    return last


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors in an optimizer's state, also those in lists and dicts of it."""
    return [each for each in walk(optimizer.state.values()) if isinstance(each, Tensor)]
