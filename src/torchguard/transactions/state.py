"""What a training step can change: read before the step, put back if it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard._torch.optimizers import call_unseen, copy_all, versions_of
from torchguard.rollback.snapshot import capture
from torchguard.transactions.containers import (
    Containers,
    OptimizerSnapshot,
    StateContainers,
    restore_container,
    same_objects,
)
from torchguard.transactions.copies import (
    Copies,
    different,
    restore_versions,
    state_tensors,
    undos_of,
)
from torchguard.transactions.random_state import RandomState
from torchguard.transactions.survey import Survey

__all__ = ["TrainingSnapshot", "TrainingState"]


class TrainingState:
    """Everything a transaction answers for; :meth:`capture` reads it."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        others: Sequence[Any],
        also: Sequence[Any],
    ) -> None:
        self.modules = tuple(modules)
        self.optimizers = tuple(optimizers)
        self.others = tuple(others)
        """Scalers and schedulers."""
        self.also = tuple(also)
        self._survey: Survey | None = None
        self._state: dict[int, StateContainers] = {}

    def survey(self) -> Survey:
        """Return the modules and tensors as they are now."""
        optimized = [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        if self._survey is None or not self._survey.is_current(optimized):
            copied = [each for each in self.also if isinstance(each, nn.Module)]
            self._survey = Survey(self.modules, copied, optimized)
        return self._survey

    def state_of(self, optimizer: Optimizer) -> StateContainers:
        """Return the containers of an optimizer's state; the last copies if nothing changed."""
        last = self._state.get(id(optimizer))
        if last is None or not last.are_current(optimizer):
            last = self._state[id(optimizer)] = StateContainers(optimizer)
        return last

    def capture(self, *, parameters: bool = False) -> TrainingSnapshot:
        """Read everything; with ``parameters``, those and the optimizers' state are copied too."""
        survey = self.survey()
        buffers = call_unseen(_concatenated, survey.flat_buffers)
        # A vector of another length is seen here and not in is_current(): the sum of the lengths
        # costs nothing, and to ask 106 buffers 7 microseconds.
        if [each.numel() for each in buffers] != survey.totals:
            self._survey = None
            survey = self.survey()
            buffers = call_unseen(_concatenated, survey.flat_buffers)
        return TrainingSnapshot(self, survey, buffers, parameters=parameters)


class TrainingSnapshot:
    """The training as it was when this was made."""

    def __init__(
        self,
        training: TrainingState,
        survey: Survey,
        buffers: list[Tensor],
        *,
        parameters: bool,
    ) -> None:
        self._survey = survey
        # Copied in each block: to compare them with the last copies takes twice as long.
        self._attributes = list(map(dict.copy, survey.attributes))
        self._hooks = survey.hook_copies()
        self._optimizers = [
            OptimizerSnapshot(each, training.state_of(each)) for each in training.optimizers
        ]
        self._others = Containers(map(vars, training.others))
        self.versions = versions_of(survey.parameters)
        self._gradients = [each.grad for each in survey.all_parameters]
        self._requires_grad = [each.requires_grad for each in survey.all_parameters]
        present = [each for each in self._gradients if each is not None]
        self._gradient_copies = Copies(present) if present else None
        self._buffer_versions = versions_of(survey.buffers)
        self._buffers = buffers
        self._odd = [capture(each, data=True) for each in survey.odd_buffers]
        self._odd += [capture(each, data=parameters) for each in survey.odd_parameters]
        self._also = undos_of(training.also)
        self._training = training
        self._copies: Copies | None = None
        if parameters:
            self.copy_parameters()
        self._random = RandomState.capture()

    def copy_parameters(self) -> None:
        """Copy the parameters and the tensors of the optimizers' state, unless that was done."""
        if self._copies is None:
            optimizers = self._training.optimizers
            written = [each for optimizer in optimizers for each in state_tensors(optimizer)]
            every = {id(each): each for each in (*self._survey.parameters, *written)}
            self._copies = Copies(list(every.values()))

    def restore(self) -> None:
        """Put everything back. May be called again and again."""
        for undo in self.undos():
            undo()

    def changed(self) -> dict[str, int]:
        """Count what is not as it was, by kind.

        Of parameters and gradients as far as version counters tell.
        """
        gradients = sum(
            parameter.grad is not before
            for parameter, before in zip(self._survey.all_parameters, self._gradients, strict=True)
        )
        if self._gradient_copies is not None:
            gradients += self._gradient_copies.written()
        survey = self._survey
        return {
            "parameters": different(versions_of(survey.parameters), self.versions),
            "gradients": gradients,
            # batch_norm writes its statistics without moving their version counters.
            "buffers": call_unseen(_count_different, survey, self._buffers),
            "RNG states": self._random.changed(),
        }

    def undos(self) -> Iterator[Callable[[], None]]:
        """Yield what puts back each kind of state, in the order in which that has to happen."""
        # Modules first: which tensor a name leads to has to be right before one is written.
        yield self._restore_modules
        for optimizer in self._optimizers:
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

    def state_of(self, optimizer: Optimizer) -> StateContainers:
        """Return the containers of an optimizer's state."""
        return next(each.state for each in self._optimizers if each.optimizer is optimizer)

    def restore_scaling(self, optimizer: Optimizer) -> None:
        """Take away what ``scaler.step()`` hands to a fused optimizer and deletes at its end.

        A scale that stays is multiplied with the next one.
        """
        before = next(e.attributes for e in self._optimizers if e.optimizer is optimizer)
        for name in ("grad_scale", "found_inf"):
            if name in before:
                vars(optimizer)[name] = before[name]
            else:
                vars(optimizer).pop(name, None)

    def restore_buffers_where(self, skipped: Tensor) -> None:
        """Put buffers back if ``skipped`` is True; contiguous ones without asking the device."""
        call_unseen(_split_where, self._survey, self._buffers, skipped)
        restore_versions(self._survey.buffers, self._buffer_versions)
        if self._odd and bool(skipped):
            for saved in self._odd:
                saved.restore()

    def written(self) -> bool:
        """Whether parameters that were not copied were written, as far as versions tell."""
        survey = self._survey
        now = versions_of(survey.parameters)
        return self._copies is None and any(
            before != after and id(parameter) not in survey.copied
            for parameter, before, after in zip(survey.parameters, self.versions, now, strict=True)
        )

    def _restore_modules(self) -> None:
        survey = self._survey
        for members, before in zip(survey.structure, survey.member_copies, strict=True):
            if not same_objects(list(members.values()), list(before.values())):
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
        survey = self._survey
        for snapshot, before in zip(
            survey.metadata, (*self.versions, *self._buffer_versions), strict=True
        ):
            snapshot.restore(before)

    def _restore_gradients(self) -> None:
        for parameter, gradient in zip(self._survey.all_parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        if self._gradient_copies is not None:
            self._gradient_copies.restore()

    def _restore_buffers(self) -> None:
        call_unseen(_split, self._survey, self._buffers)
        for saved in self._odd:
            saved.restore()

    def _restore_flags(self) -> None:
        for parameter, before in zip(self._survey.all_parameters, self._requires_grad, strict=True):
            if parameter.requires_grad != before:
                parameter.requires_grad_(before)

    def _restore_versions(self) -> None:
        restore_versions(self._survey.buffers, self._buffer_versions)
        restore_versions(self._survey.parameters, self.versions)


def _concatenated(flat: list[list[Tensor]]) -> list[Tensor]:
    """Copy all buffers of a kind by one call of torch, a third of the time of a call for each."""
    return [torch.cat(tensors) for tensors in flat]


def _split(survey: Survey, copies: list[Tensor]) -> None:
    for tensors, lengths, source in zip(survey.flat_buffers, survey.lengths, copies, strict=True):
        copy_all(tensors, list(source.split(lengths)))


def _count_different(survey: Survey, copies: list[Tensor]) -> int:
    """Return how many buffers have other bits than their copies; a NaN equals itself."""
    return sum(
        not torch.equal(tensor.view(torch.uint8), copied.view(torch.uint8))
        for tensors, lengths, source in zip(
            survey.flat_buffers, survey.lengths, copies, strict=True
        )
        for tensor, copied in zip(tensors, source.split(lengths), strict=True)
    )


def _split_where(survey: Survey, copies: list[Tensor], skipped: Tensor) -> None:
    for tensors, lengths, source in zip(survey.flat_buffers, survey.lengths, copies, strict=True):
        now = torch.cat(tensors)
        condition = skipped.to(source.device, non_blocking=True)
        torch.where(condition, source, now, out=now)
        copy_all(tensors, list(now.split(lengths)))
