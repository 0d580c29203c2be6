"""What a training step can change: read before the step, put back if it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard._torch import without_torch_function
from torchguard._torch.optimizers import (
    MODULE_HOOKS,
    call_unseen,
    concatenated,
    copy_all,
    hooks_registered,
    members_of,
    not_saved,
    remove_hooks_since,
    same_tensors,
    versions_of,
)
from torchguard.state.random import RNGState
from torchguard.state.tensors import Snapshot, capture
from torchguard.transactions.copies import (
    Containers,
    Copies,
    OptimizerSnapshot,
    comparison_of,
    different,
    is_plain,
    parted,
    restore_container,
    restore_versions,
    state_tensors,
    undos_of,
)


@dataclass(eq=False)
class TrainingState:
    """Everything a transaction answers for; :meth:`capture` reads it."""

    modules: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    others: tuple[Any, ...]
    """Scalers and schedulers."""

    also: tuple[Any, ...]
    _survey: _Survey | None = field(default=None, init=False)

    def groups(self) -> list[list[Tensor]]:
        """Return the lists of parameters that the optimizers have now."""
        return [group["params"] for each in self.optimizers for group in each.param_groups]

    def capture(self, *, parameters: bool = False) -> TrainingSnapshot:
        """Read everything; with ``parameters``, those and the optimizers' state are copied too."""
        # Else a TorchFunctionMode, such as that of a default device, sees each attribute read.
        with without_torch_function():
            survey = self._survey
            if survey is None or not survey.is_current(self.groups()):
                survey = self._survey = _Survey(self)
            buffers = concatenated(survey.flat_buffers)
            # A vector of another length is seen here: the sum of the lengths costs nothing, and
            # to ask 106 buffers 7 microseconds.
            if [each.numel() for each in buffers] != survey.totals:
                survey = self._survey = _Survey(self)
                buffers = concatenated(survey.flat_buffers)
            return TrainingSnapshot(self, survey, buffers, parameters=parameters)


class _Survey:
    """The modules and tensors of a training; rebuilt when a module has gained or lost one."""

    def __init__(self, training: TrainingState) -> None:
        copied = [each for each in training.also if isinstance(each, nn.Module)]
        self._holders = list(
            {id(m): m for root in (*training.modules, *copied) for m in root.modules()}.values()
        )
        # TorchScript keeps the members of its modules in C++, in no dict.
        self.modules = [m for m in self._holders if not isinstance(m, torch.jit.ScriptModule)]
        self.kinds = [type(each) for each in self.modules]
        self.attributes: list[dict[str, Any]] = [each.__dict__ for each in self.modules]
        # What the modules hold: parameters, buffers and children. Most of these dicts are empty.
        structure = [members for each in self.modules for members in members_of(each)]
        names = [not_saved(each) for each in self.modules]
        self.members: list[tuple[Any, Any]] = [(each, each.copy()) for each in structure]
        self.members += [(each, each.copy()) for each in names]
        self._filled = [each for each in structure if each]
        self._names = [(each, each.copy()) for each in names if each]
        self._empty = [each for each in (*structure, *names) if not each]
        self._filled_copies = list(map(dict.copy, self._filled))
        self._same_members = comparison_of(self.modules)
        self.hooks = [
            attributes[name]
            for attributes in self.attributes
            for name in MODULE_HOOKS
            if name in attributes
        ]
        self._hook_copies: list[dict[int, Any]] = []
        self._with_hooks: list[tuple[dict[int, Any], int]] = []
        self._hooks_registered = -1
        self._groups = list(map(list, training.groups()))
        self.copied = {id(each) for module in copied for each in module.parameters()}
        self._sort_tensors()

    def _sort_tensors(self) -> None:
        """Sort out which tensors are copied in bulk, and which one by one."""
        own = [each for module in self._holders for each in module.parameters(recurse=False)]
        held = [each for module in self._holders for each in module.buffers(recurse=False)]
        self.parameters, self.other_parameters = parted(
            [*own, *chain.from_iterable(self._groups)], is_plain
        )
        self.all_parameters = [*self.parameters, *self.other_parameters]
        self.buffers, self.other_buffers = parted(
            held, lambda b: is_plain(b) and b.is_contiguous() and b.numel() > 0
        )
        self._tensors = [*self.parameters, *self.buffers]
        self.metadata = [capture(each, autograd=True) for each in self._tensors]
        # x.data = y, which model.to() does, leaves the tensor the same object and does not move
        # its version counter, so the addresses are compared.
        # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
        self._pointers = list(map(Tensor.data_ptr, self._tensors))
        # The same memory may be seen in another way: x.data = x.data.t(). A scalar has one
        # element, and the length of a buffer of one dim is seen when it is copied.
        self._shaped = [each for each in self._tensors if each.dim() > 1]
        self._layouts = _layouts(self._shaped)
        self._vectors = [each for each in self.parameters if each.dim() == 1]
        self._lengths = list(map(Tensor.numel, self._vectors))
        by_kind: dict[Any, list[Tensor]] = {}
        for buffer in self.buffers:
            by_kind.setdefault((buffer.device, buffer.dtype), []).append(
                buffer if buffer.dim() == 1 else buffer.detach().view(-1)
            )
        self.flat_buffers = list(by_kind.values())
        self.lengths = [list(map(Tensor.numel, tensors)) for tensors in self.flat_buffers]
        self.totals = list(map(sum, self.lengths))

    def is_current(self, groups: list[list[Tensor]]) -> bool:
        """Whether modules and optimizers hold the same tensors, and the tensors the same memory."""
        return (
            self._same_members(self._filled, self._filled_copies)
            and not any(self._empty)
            and all(names == before for names, before in self._names)
            and same_tensors(groups, self._groups)
            and list(map(Tensor.data_ptr, self._tensors)) == self._pointers
            and _layouts(self._shaped) == self._layouts
            and list(map(Tensor.numel, self._vectors)) == self._lengths
        )

    def hook_copies(self) -> list[dict[int, Any]]:
        """Return copies of the dicts of hooks, the last ones if no hook came or went."""
        # One that comes moves torch's counter of hooks, one that goes leaves a dict shorter.
        registered = hooks_registered()
        if registered != self._hooks_registered or any(
            len(hooks) != length for hooks, length in self._with_hooks
        ):
            self._hooks_registered = registered
            self._hook_copies = [dict(each) for each in self.hooks]
            self._with_hooks = [(each, len(each)) for each in self.hooks if each]
        return self._hook_copies

    def split(self, copies: list[Tensor]) -> Iterator[tuple[list[Tensor], Sequence[Tensor]]]:
        """Yield the buffers of each kind, with what a copy of all of them holds for each."""
        for tensors, lengths, copied in zip(self.flat_buffers, self.lengths, copies, strict=True):
            yield tensors, copied.split(lengths)


def _layouts(tensors: list[Tensor]) -> list[tuple[torch.Size, tuple[int, ...]]]:
    return [(tensor.shape, tensor.stride()) for tensor in tensors]


@dataclass(eq=False)
class BufferCopies:
    """The buffers as they were, to put back without asking the device whether."""

    survey: _Survey
    copies: list[Tensor]
    odd: list[Snapshot]
    """Of buffers that are not copied in bulk."""

    def restore_where(self, skipped: Tensor) -> None:
        """Put buffers back if ``skipped`` is True; contiguous ones without asking the device."""
        survey = self.survey
        with without_torch_function():
            lengths = [list(map(Tensor.numel, each)) for each in survey.flat_buffers]
            is_current = lengths == survey.lengths and survey.is_current(survey._groups)
        if not is_current:  # a buffer was assigned anew or resized: the host has to put it back
            if not bool(skipped):
                return
            for members, before in survey.members:
                restore_container(members, before)
            for saved in survey.metadata[len(survey.parameters) :]:
                saved.restore()
        versions = versions_of(survey.buffers)
        call_unseen(self._split_where, skipped)
        restore_versions(survey.buffers, versions)
        if self.odd and bool(skipped):
            for saved in self.odd:
                saved.restore()

    def _split_where(self, skipped: Tensor) -> None:
        now = concatenated(self.survey.flat_buffers)
        for each, before in zip(now, self.copies, strict=True):
            condition = skipped.to(each.device, non_blocking=True)
            torch.where(condition, before, each, out=each)
        for tensors, kept in self.survey.split(now):
            copy_all(tensors, list(kept))


class TrainingSnapshot:
    """The training as it was when this was made."""

    def __init__(
        self,
        training: TrainingState,
        survey: _Survey,
        buffers: list[Tensor],
        *,
        parameters: bool,
    ) -> None:
        self._training = training
        self._survey = survey
        # Copied in each block: to compare them with the last copies takes twice as long.
        self._attributes = list(map(dict.copy, survey.attributes))
        self._hooks = survey.hook_copies()
        self._hooks_registered = hooks_registered()
        self.optimizers = {id(each): OptimizerSnapshot(each) for each in training.optimizers}
        self._others = Containers(map(vars, training.others))
        self._versions = versions_of(survey.parameters)
        self._requires_grad = [each.requires_grad for each in survey.all_parameters]
        self._gradients = [each.grad for each in survey.all_parameters]
        present = [each for each in self._gradients if each is not None]
        self.has_gradients = bool(present)
        self._gradient_copies = Copies(present) if present else None
        self._buffer_versions = versions_of(survey.buffers)
        odd = [capture(each, data=True) for each in survey.other_buffers]
        self.buffers = BufferCopies(survey, buffers, odd)
        self._odd = odd + [capture(each, data=parameters) for each in survey.other_parameters]
        self._also = undos_of(training.also)
        self._copies: Copies | None = None
        if parameters:
            self.copy_parameters()
        self._random = RNGState.capture()

    def copy_parameters(self) -> None:
        """Copy the parameters and the tensors of the optimizers' state, unless that was done."""
        if self._copies is None:
            written = [t for each in self._training.optimizers for t in state_tensors(each)]
            self._copies = Copies([*self._survey.parameters, *written])

    def restore(self) -> None:
        """Put everything back. May be called again and again."""
        for undo in self.undos():
            undo()

    def changed(self) -> dict[str, int]:
        """Count what is not as it was, by kind; most of it by version counters."""
        survey = self._survey
        gradients = sum(
            parameter.grad is not before
            for parameter, before in zip(survey.all_parameters, self._gradients, strict=True)
        )
        if self._gradient_copies is not None:
            gradients += self._gradient_copies.written()
        return {
            "parameters": different(versions_of(survey.parameters), self._versions),
            "gradients": gradients,
            # batch_norm writes its statistics without moving their version counters.
            "buffers": call_unseen(self._count_buffers),
            "RNG states": sum(self._random.changed()),
        }

    def _count_buffers(self) -> int:
        """Return how many buffers have other bits than their copies; a NaN equals itself."""
        return sum(
            not torch.equal(tensor.view(torch.uint8), copied.view(torch.uint8))
            for pairs in self._survey.split(self.buffers.copies)
            for tensor, copied in zip(*pairs, strict=True)
        )

    def written(self) -> bool:
        """Whether parameters that were not copied were written, by their version counters."""
        survey = self._survey
        now = versions_of(survey.parameters)
        return self._copies is None and any(
            before != after and id(parameter) not in survey.copied
            for parameter, before, after in zip(survey.parameters, self._versions, now, strict=True)
        )

    def undos(self) -> Iterator[Callable[[], Any]]:
        """Yield what puts back each kind of state, in the order in which that has to happen."""
        # Modules first: which tensor a name leads to has to be right before one is written.
        yield self._restore_modules
        for optimizer in self.optimizers.values():
            yield optimizer.restore
        yield self._others.restore
        # Shapes and memory before elements: a copy goes into memory of the old size.
        yield self._restore_metadata
        yield self._restore_gradients
        yield self._restore_buffers
        if self._copies is not None:
            yield self._copies.restore
        yield from self._also
        # After the elements: a leaf that requires a gradient refuses to be written in place, and
        # each write has moved a counter.
        yield self._restore_flags
        yield self._restore_versions
        yield self._random.restore
        # Autocast keeps its cast of a weight by the weight, whatever its version.
        # https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/autocast_mode.cpp
        yield torch.clear_autocast_cache

    def _restore_modules(self) -> None:
        survey = self._survey
        for members, before in survey.members:
            restore_container(members, before)
        for module, kind, before in zip(
            survey.modules, survey.kinds, self._attributes, strict=True
        ):
            if type(module) is not kind:  # parametrize and lazy modules become another class
                module.__class__ = kind
            restore_container(module.__dict__, before)
        for hooks, registered in zip(survey.hooks, self._hooks, strict=True):
            restore_container(hooks, registered)

    def _restore_metadata(self) -> None:
        versions = (*self._versions, *self._buffer_versions)
        for snapshot, before in zip(self._survey.metadata, versions, strict=True):
            snapshot.restore(before)

    def _restore_gradients(self) -> None:
        for parameter, gradient in zip(self._survey.all_parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        if self._gradient_copies is not None:
            self._gradient_copies.restore()

    def _restore_buffers(self) -> None:
        for tensors, kept in self._survey.split(self.buffers.copies):
            call_unseen(copy_all, tensors, list(kept))
        for saved in self._odd:
            saved.restore()

    def _restore_flags(self) -> None:
        for parameter, before in zip(self._survey.all_parameters, self._requires_grad, strict=True):
            remove_hooks_since(self._hooks_registered, parameter)
            if parameter.requires_grad != before:
                parameter.requires_grad_(before)

    def _restore_versions(self) -> None:
        restore_versions(self._survey.buffers, self._buffer_versions)
        restore_versions(self._survey.parameters, self._versions)
