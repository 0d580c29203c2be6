"""What a training step can change: a snapshot before the step, restored if it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard._torch import without_torch_function
from torchguard._torch.eager import call_unseen, concatenated, copy_all, same_tensors, versions_of
from torchguard.state.containers import Containers, copy_of_tree, restore_container
from torchguard.state.modules import Modules
from torchguard.state.optimizers import OptimizerSnapshot, has_state, state_tensors
from torchguard.state.random import RNGState, same_state
from torchguard.state.tensors import (
    Elements,
    Gradients,
    Metadata,
    Snapshot,
    capture,
    is_plain,
    parted,
    restore_versions,
)


@dataclass(eq=False)
class TrainingState:
    """Everything a transaction answers for; :meth:`capture` takes a snapshot of it."""

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
        """Take a snapshot; with ``parameters``, of those and the optimizers' state too."""
        # Else a TorchFunctionMode, such as that of a default device, sees each attribute read.
        with without_torch_function():
            survey = self._survey
            if survey is None or not survey.is_current(self.groups()):
                survey = self._survey = _Survey(self)
            return TrainingSnapshot(self, survey, parameters=parameters)


class _Survey:
    """The modules and tensors of a training; made anew if a module has gained or lost one."""

    def __init__(self, training: TrainingState) -> None:
        copied = [each for each in training.also if isinstance(each, nn.Module)]
        holders = list(
            {id(m): m for root in (*training.modules, *copied) for m in root.modules()}.values()
        )
        self.modules = Modules(holders)
        self._groups = list(map(list, training.groups()))
        self.copied = {id(each) for module in copied for each in module.parameters()}
        own = [each for module in holders for each in module.parameters(recurse=False)]
        held = [each for module in holders for each in module.buffers(recurse=False)]
        self.parameters, self.other_parameters = parted(
            [*own, *chain.from_iterable(self._groups)], is_plain
        )
        self.all_parameters = [*self.parameters, *self.other_parameters]
        self.buffers, self.other_buffers = parted(
            held, lambda b: is_plain(b) and b.is_contiguous() and b.numel() > 0
        )
        self.metadata = Metadata([*self.parameters, *self.buffers])
        by_kind: dict[Any, list[Tensor]] = {}
        for buffer in self.buffers:
            by_kind.setdefault((buffer.device, buffer.dtype), []).append(
                buffer if buffer.dim() == 1 else buffer.detach().view(-1)
            )
        self.flat_buffers = list(by_kind.values())
        self._lengths = [list(map(Tensor.numel, tensors)) for tensors in self.flat_buffers]

    def is_current(self, groups: list[list[Tensor]]) -> bool:
        """Whether modules and optimizers hold the same tensors, and the tensors the same memory."""
        return (
            self.modules.is_current()
            and same_tensors(groups, self._groups)
            and self.metadata.is_current()
        )

    def split(self, copies: list[Tensor]) -> Iterator[tuple[list[Tensor], Sequence[Tensor]]]:
        """Yield the buffers of each kind, with what a copy of all of them holds for each."""
        for tensors, lengths, copied in zip(self.flat_buffers, self._lengths, copies, strict=True):
            yield tensors, copied.split(lengths)


class BufferCopies:
    """The buffers of the modules: which they are, their metadata and their elements."""

    def __init__(self, survey: _Survey) -> None:
        self._survey = survey
        self.versions = versions_of(survey.buffers)
        # One call for all of a kind; most modules have many buffers of few numbers.
        self._copies = concatenated(survey.flat_buffers)
        self._odd = [capture(each, data=True) for each in survey.other_buffers]

    def restore(self) -> None:
        """Restore them after a step that was skipped. Autograd sees what forward has written."""
        for members, before in self._survey.modules.members:
            restore_container(members, before)
        self._survey.metadata.restore(versions_of(self._survey.metadata.tensors))
        self.restore_elements()

    def restore_elements(self) -> None:
        """Write the elements into the same tensors."""
        for tensors, kept in self._survey.split(self._copies):
            call_unseen(copy_all, tensors, list(kept))
        for saved in self._odd:
            saved.restore()

    def changed(self) -> int:
        """Return how many buffers have other bits than their copies; a NaN equals itself."""
        # batch_norm writes its statistics without moving their version counters.
        return sum(
            not torch.equal(tensor.view(torch.uint8), copied.view(torch.uint8))
            for pairs in self._survey.split(self._copies)
            for tensor, copied in zip(*pairs, strict=True)
        )


class TrainingSnapshot:
    """The training as it was when this was made."""

    def __init__(self, training: TrainingState, survey: _Survey, *, parameters: bool) -> None:
        self._training = training
        self._survey = survey
        self._modules = survey.modules.snapshot()
        self.optimizers = {id(each): OptimizerSnapshot(each) for each in training.optimizers}
        self._others = Containers(map(vars, training.others), into=has_state)
        self._versions = versions_of(survey.parameters)
        self._requires_grad = [each.requires_grad for each in survey.all_parameters]
        self._gradients = Gradients(survey.all_parameters, data=True)
        self.has_gradients = bool(self._gradients.present)
        self.buffers = BufferCopies(survey)
        self._odd: list[Snapshot] = [
            capture(each, data=parameters) for each in survey.other_parameters
        ]
        self._also = _undos_of(training.also)
        self._copies: Elements | None = None
        if parameters:
            self.copy_parameters()
        self._random = RNGState.capture()

    def copy_parameters(self) -> None:
        """Copy the parameters and the tensors of the optimizers' state, unless that was done."""
        if self._copies is None:
            written = [t for each in self._training.optimizers for t in state_tensors(each)]
            self._copies = Elements([*self._survey.parameters, *written])

    def changed(self) -> dict[str, int]:
        """Count what is not as it was, by kind; most of it by version counters."""
        now = versions_of(self._survey.parameters)
        return {
            "parameters": sum(one != other for one, other in zip(now, self._versions, strict=True)),
            "gradients": self._gradients.written(),
            "buffers": call_unseen(self.buffers.changed),
            "RNG states": sum(self._random.changed()),
        }

    def parameters_moved(self) -> bool:
        """Whether a parameter was written, by its version counter."""
        return versions_of(self._survey.parameters) != self._versions

    def written(self) -> bool:
        """Whether parameters that were not copied were written, by their version counters."""
        now = versions_of(self._survey.parameters)
        return self._copies is None and any(
            before != after and id(parameter) not in self._survey.copied
            for parameter, before, after in zip(
                self._survey.parameters, self._versions, now, strict=True
            )
        )

    def restore(self, problems: list[str]) -> None:
        """Restore everything; append what could not be restored to ``problems``."""
        for undo in self._undos():
            attempt(undo, problems)

    def _undos(self) -> Iterator[Callable[[], Any]]:
        """Yield what restores each kind of state, in the order in which that has to happen."""
        # Modules first: which tensor a name leads to has to be right before one is written.
        yield self._modules.restore
        for optimizer in self.optimizers.values():
            yield optimizer.restore
        yield self._others.restore
        # Shapes and memory before elements: a copy goes into memory of the old size.
        yield self._restore_metadata
        yield self._gradients.restore
        yield self.buffers.restore_elements
        for saved in self._odd:
            yield saved.restore
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

    def _restore_metadata(self) -> None:
        self._survey.metadata.restore((*self._versions, *self.buffers.versions))

    def _restore_flags(self) -> None:
        self._modules.remove_hooks_of(self._survey.all_parameters)
        for parameter, before in zip(self._survey.all_parameters, self._requires_grad, strict=True):
            if parameter.requires_grad != before:
                parameter.requires_grad_(before)

    def _restore_versions(self) -> None:
        restore_versions(self._survey.buffers, self.buffers.versions)
        restore_versions(self._survey.parameters, self._versions)


def attempt(undo: Callable[[], Any], problems: list[str]) -> None:
    """Call ``undo()``, and collect what it raises: the rest has to be restored all the same."""
    try:
        undo()
    except Exception as error:  # noqa: BLE001  whatever it is
        problems.append(f"{type(error).__name__}: {error}")


def _undos_of(items: Sequence[Any]) -> list[Callable[[], Any]]:
    """Copy what the user has named in ``also=``, and return what restores each.

    Of modules the parameters; a snapshot copies their buffers with the others.
    """
    tensors: list[Tensor] = []
    undos: list[Callable[[], Any]] = []
    for each in items:
        if isinstance(each, Tensor):
            tensors.append(each)
        elif isinstance(each, nn.Module):
            tensors += each.parameters()
        elif isinstance(each, torch.Generator):
            undos.append(partial(each.set_state, each.get_state()))
        else:
            state = call_unseen(copy_of_tree, each.state_dict())
            undos.append(partial(_load_if_changed, each, state))
    return [Elements(tensors).restore, *undos] if tensors else undos


def _load_if_changed(item: Any, before: Any) -> None:
    """Load a state, unless the item has it: a sampler begins its next pass where it is loaded."""
    with contextlib.suppress(Exception):  # what can't be compared is loaded
        if call_unseen(same_state, item.state_dict(), before):
            return
    item.load_state_dict(before)
