"""What modules hold besides the elements of tensors: members, attributes, hooks, their class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._torch.eager import (
    MODULE_HOOKS,
    hooks_registered,
    members_of,
    not_saved,
    remove_hooks_since,
    same_one_by_one,
    same_tensors,
)
from torchguard.state.containers import ATOMS, children, restore_container


def hooks_of(module: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts in which a module holds its hooks."""
    attributes = vars(module)
    return [attributes[name] for name in MODULE_HOOKS if name in attributes]


def containers_of(module: nn.Module) -> list[Any]:
    """Return the attributes of a module that are containers and are not PyTorch's own."""
    own = set(map(id, (*members_of(module), not_saved(module), *hooks_of(module))))
    return [
        each
        for each in vars(module).values()
        if type(each) not in ATOMS and id(each) not in own and children(each) is not None
    ]


class Modules:
    """Modules of which snapshots are taken again and again: what has not changed is copied once.

    Children are not looked for: pass them too. What TorchScript keeps in C++ is left alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        self.kinds = [type(each) for each in self.modules]
        self.attributes: list[dict[str, Any]] = [vars(each) for each in self.modules]
        # Parameters, buffers and children. Most of these dicts are empty.
        structure = [members for each in self.modules for members in members_of(each)]
        names = [not_saved(each) for each in self.modules]
        self.members: list[tuple[Any, Any]] = [(each, each.copy()) for each in structure]
        self.members += [(each, each.copy()) for each in names]
        self._filled = [each for each in structure if each]
        self._names = [(each, each.copy()) for each in names if each]
        self._empty = [each for each in (*structure, *names) if not each]
        self._filled_copies = list(map(dict.copy, self._filled))
        self._same_members = comparison_of(
            chain.from_iterable(map(dict.values, self._filled_copies))
        )
        self.hooks = [(each, hooks) for each in self.modules for hooks in hooks_of(each)]
        self._hook_copies: list[dict[int, Any]] = []
        self._with_hooks: list[tuple[dict[int, Any], int]] = []
        self._hooks_registered = -1

    def is_current(self) -> bool:
        """Whether the modules have the same parameters, buffers and children as when this began."""
        return (
            self._same_members(self._filled, self._filled_copies)
            and not any(self._empty)
            and all(names == before for names, before in self._names)
        )

    def snapshot(self) -> ModulesSnapshot:
        """Take a snapshot of classes, attributes, members and hooks."""
        return ModulesSnapshot(self)

    def hook_copies(self) -> list[dict[int, Any]]:
        """Return copies of the dicts of hooks, the last ones if no hook came or went."""
        # One that comes moves torch's counter of hooks, one that goes leaves a dict shorter.
        registered = hooks_registered()
        if registered != self._hooks_registered or any(
            len(hooks) != length for hooks, length in self._with_hooks
        ):
            self._hooks_registered = registered
            self._hook_copies = [dict(hooks) for _, hooks in self.hooks]
            self._with_hooks = [(hooks, len(hooks)) for _, hooks in self.hooks if hooks]
        return self._hook_copies


class ModulesSnapshot:
    """Modules as :meth:`Modules.snapshot` found them."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        # Copied each time: to compare them with the last copies takes twice as long.
        self._attributes = list(map(dict.copy, modules.attributes))
        self._hooks = modules.hook_copies()
        self._hooks_registered = hooks_registered()

    def restore(self, *, lazy: bool = True) -> None:
        """Restore them in place; elements of tensors are not touched.

        Without ``lazy``, a lazy module that has become another one stays it.
        """
        saved = self._modules
        for members, before in saved.members:
            restore_container(members, before)
        became = set()
        for module, kind, before in zip(saved.modules, saved.kinds, self._attributes, strict=True):
            if type(module) is not kind:  # parametrize and lazy modules become another class
                if lazy:
                    module.__class__ = kind
                else:
                    became.add(id(module))
            restore_container(vars(module), before)
        for (module, hooks), registered in zip(saved.hooks, self._hooks, strict=True):
            if id(module) not in became:  # it has taken away its hooks
                restore_container(hooks, registered)

    def remove_hooks_of(self, tensors: Iterable[Tensor]) -> None:
        """Remove the hooks that tensors have got since the snapshot."""
        for tensor in tensors:
            remove_hooks_since(self._hooks_registered, tensor)


def comparison_of(values: Iterable[Any]) -> Callable[[Any, Any], bool]:
    """Return how to find out whether dicts hold the very same values: quickly if it can be."""
    kinds: set[Any] = set(map(type, values))
    compared_by_identity = all(
        kind is type(None) or issubclass(kind, Tensor) or kind.__eq__ is object.__eq__
        for kind in kinds
    )
    return same_tensors if compared_by_identity else same_one_by_one
