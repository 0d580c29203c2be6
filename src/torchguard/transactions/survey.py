"""Which modules, tensors and hooks a training has; made anew where that has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._torch.optimizers import (
    FORWARD_HOOKS,
    hooks_registered,
    members_of,
    same_tensors,
)
from torchguard.rollback.snapshot import capture
from torchguard.transactions.containers import comparison_of
from torchguard.transactions.copies import is_plain, others

__all__ = ["Survey"]


class Survey:
    """The modules and tensors of a training; made anew when a module has gained or lost one."""

    def __init__(
        self, modules: Sequence[nn.Module], copied: list[nn.Module], optimized: list[Tensor]
    ) -> None:
        found = {id(each): each for root in (*modules, *copied) for each in root.modules()}
        self.copied = {id(each) for module in copied for each in module.parameters()}
        self.modules = list(found.values())
        self.structure = [members for each in self.modules for members in members_of(each)]
        self.filled = [each for each in self.structure if each]
        self.empty = [each for each in self.structure if not each]
        self.filled_copies = list(map(dict.copy, self.filled))
        self.member_copies = list(map(dict.copy, self.structure))
        self._same_members = comparison_of(self.modules)
        self.attributes: list[dict[str, Any]] = [each.__dict__ for each in self.modules]
        self.kinds = [type(each) for each in self.modules]
        self.hooks = [
            attributes[name]
            for attributes in self.attributes
            for name in FORWARD_HOOKS
            if name in attributes
        ]
        self.optimized = optimized
        self._sort_tensors()

    def _sort_tensors(self) -> None:
        """Sort out which tensors are copied in bulk, and which one by one."""
        own = [each for module in self.modules for each in module.parameters(recurse=False)]
        parameters = list({id(each): each for each in (*own, *self.optimized)}.values())
        self.parameters = [each for each in parameters if is_plain(each)]
        self.odd_parameters = others(parameters, self.parameters)
        self.all_parameters = [*self.parameters, *self.odd_parameters]
        held = [each for module in self.modules for each in module.buffers(recurse=False)]
        buffers = list({id(each): each for each in held}.values())
        self.buffers = [b for b in buffers if is_plain(b) and b.is_contiguous() and b.numel()]
        self.odd_buffers = others(buffers, self.buffers)
        self.tensors = [*self.parameters, *self.buffers]
        self.metadata = [capture(each, autograd=True) for each in self.tensors]
        # x.data = y, which model.to() does, leaves the tensor the same object and does not move
        # its version counter, so nothing but the address tells.
        # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
        self.pointers = _pointers(self.tensors)
        # The same memory may be seen in another way: x.data = x.data.t(). A scalar has one
        # element, and the length of a buffer of one dim is seen when it is copied.
        self.shaped = [each for each in self.tensors if each.dim() > 1]
        self.layouts = _layouts(self.shaped)
        self.vectors = [each for each in self.parameters if each.dim() == 1]
        self.sizes = _sizes(self.vectors)
        by_kind: dict[Any, list[Tensor]] = {}
        for buffer in self.buffers:
            kind = (buffer.device, buffer.dtype)
            by_kind.setdefault(kind, []).append(
                buffer if buffer.dim() == 1 else buffer.detach().view(-1)
            )
        self.flat_buffers = list(by_kind.values())
        self.lengths = [_sizes(tensors) for tensors in self.flat_buffers]
        self.totals = list(map(sum, self.lengths))
        self._hook_copies: list[dict[int, Any]] = []
        self._with_hooks: list[tuple[dict[int, Any], int]] = []
        self._hooks_registered = -1

    def is_current(self, optimized: list[Tensor]) -> bool:
        """Whether modules hold the same tensors, and the tensors the same memory."""
        return (
            self._same_members(self.filled, self.filled_copies)
            and not any(self.empty)
            and same_tensors(optimized, self.optimized)
            and _pointers(self.tensors) == self.pointers
            and _layouts(self.shaped) == self.layouts
            and _sizes(self.vectors) == self.sizes
        )

    def hook_copies(self) -> list[dict[int, Any]]:
        """Return copies of the dicts of hooks, the last ones if no hook came or went.

        One that comes moves torch's counter of hooks, one that goes leaves a dict shorter.
        """
        registered = hooks_registered()
        if registered != self._hooks_registered or any(
            len(hooks) != length for hooks, length in self._with_hooks
        ):
            self._hooks_registered = registered
            self._hook_copies = [dict(each) for each in self.hooks]
            self._with_hooks = [(each, len(each)) for each in self.hooks if each]
        return self._hook_copies


def _pointers(tensors: list[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _layouts(tensors: list[Tensor]) -> list[tuple[torch.Size, tuple[int, ...]]]:
    return [(tensor.shape, tensor.stride()) for tensor in tensors]


def _sizes(tensors: list[Tensor]) -> list[int]:
    return list(map(Tensor.numel, tensors))
