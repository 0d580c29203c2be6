"""Copies of tensors' elements, and of what only its owner can put back."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard import _pytree
from torchguard._torch import has_own_dispatch, set_version
from torchguard._torch.optimizers import call_unseen, copy_all, versions_of
from torchguard.rollback.snapshot import capture

__all__ = [
    "Copies",
    "different",
    "is_plain",
    "others",
    "restore_versions",
    "state_tensors",
    "undos_of",
]


class Copies:
    """Copies of tensors' elements, made in bulk: on their device, or on the host if it is full."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.plain = [tensor for tensor in tensors if is_plain(tensor)]
        self.versions = versions_of(self.plain)
        self.copies = call_unseen(_copied, self.plain)
        self.others = [capture(each, data=True) for each in others(tensors, self.plain)]

    def restore(self) -> None:
        """Write the elements back into the same tensors, version counters included."""
        call_unseen(copy_all, self.plain, self.copies)
        restore_versions(self.plain, self.versions)
        for saved in self.others:
            saved.restore()

    def written(self) -> int:
        """Return how many of the tensors were written since, as far as version counters tell."""
        return different(versions_of(self.plain), self.versions)

    def __len__(self) -> int:
        return len(self.plain) + len(self.others)


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    try:
        copies = [torch.empty_like(tensor) for tensor in tensors]
    # On a device that holds the parameters, their gradients and two moments, there may be no room.
    except torch.OutOfMemoryError:
        return [tensor.to("cpu", copy=True) for tensor in tensors]
    copy_all(copies, tensors)
    return copies


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
    """Put version counters back, so that autograd hears nothing of writes that were undone."""
    for tensor, before, now in zip(tensors, versions, versions_of(list(tensors)), strict=True):
        if before is not None and before != now:
            set_version(tensor, before)


def others(tensors: list[Tensor], some: list[Tensor]) -> list[Tensor]:
    """Return the tensors that are not among some of them."""
    ids = set(map(id, some))
    return [each for each in tensors if id(each) not in ids]


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors in an optimizer's state, also those in lists and dicts of it."""
    found: dict[int, Tensor] = {}
    waiting: list[Any] = list(optimizer.state.values())
    while waiting:
        node = waiting.pop()
        if isinstance(node, Tensor):
            found[id(node)] = node
        elif isinstance(node, dict):
            waiting.extend(node.values())
        elif isinstance(node, (list, tuple)):
            waiting.extend(node)
    return list(found.values())


def undos_of(items: Sequence[Any], *, buffers: bool = False) -> list[Callable[[], None]]:
    """Copy what nobody but the user knows, and return what puts each back.

    Of modules the parameters; with ``buffers`` those too, which a snapshot copies with the others.
    """
    tensors = [each for each in items if isinstance(each, Tensor)]
    tensors += [p for each in items if isinstance(each, nn.Module) for p in each.parameters()]
    if buffers:
        tensors += [b for each in items if isinstance(each, nn.Module) for b in each.buffers()]
    undos: list[Callable[[], None]] = [Copies(tensors).restore] if tensors else []
    for each in items:
        if isinstance(each, torch.Generator):
            undos.append(_setter(each.set_state, each.get_state()))
        elif not isinstance(each, (Tensor, nn.Module)):
            undos.append(
                _setter(each.load_state_dict, call_unseen(_copied_tree, each.state_dict()))
            )
    return undos


def _setter(function: Callable[[Any], Any], value: Any) -> Callable[[], None]:
    def set_back() -> None:
        function(value)

    return set_back


def _copied_tree(tree: Any) -> Any:
    leaves, _ = _pytree.flatten(tree)
    copies = [
        leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
        for leaf in leaves
    ]
    return _pytree.unflatten(copies, tree)
