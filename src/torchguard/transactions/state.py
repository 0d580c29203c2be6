"""What a training step can change: read before the step, put back if it fails."""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard import _pytree
from torchguard._torch import has_own_dispatch, set_version
from torchguard._torch.optimizers import (
    FORWARD_HOOKS,
    call_unseen,
    copy_all,
    hooks_registered,
    members_of,
    same_one_by_one,
    same_tensors,
    versions_of,
)
from torchguard.rollback.snapshot import Snapshot, capture
from torchguard.transactions.random_state import RandomState

__all__ = [
    "Containers",
    "Copies",
    "StateContainers",
    "TrainingSnapshot",
    "TrainingState",
    "undos_of",
]


class Copies:
    """Copies of tensors' elements, made in bulk: on their device, or on the host if it is full."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.plain = [tensor for tensor in tensors if _is_plain(tensor)]
        self.versions = versions_of(self.plain)
        self.copies = call_unseen(_copied, self.plain)
        self.others = [capture(each, data=True) for each in _others(tensors, self.plain)]

    def restore(self) -> None:
        """Write the elements back into the same tensors, version counters included."""
        call_unseen(copy_all, self.plain, self.copies)
        restore_versions(self.plain, self.versions)
        for saved in self.others:
            saved.restore()

    def written(self) -> int:
        """Return how many of the tensors were written since, as far as version counters tell."""
        return _different(versions_of(self.plain), self.versions)

    def __len__(self) -> int:
        return len(self.plain) + len(self.others)


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    try:
        copies = [torch.empty_like(tensor) for tensor in tensors]
    except torch.OutOfMemoryError:
        return [tensor.to("cpu", copy=True) for tensor in tensors]
    copy_all(copies, tensors)
    return copies


def _is_plain(tensor: Tensor) -> bool:
    """Whether ``empty_like`` and ``copy_`` keep every bit of it, and it may be written in place."""
    return (
        tensor.layout is torch.strided
        and not has_own_dispatch(tensor)
        and not tensor.is_inference()
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not any(
            step == 0 < size - 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )


def _different(now: Sequence[Any], before: Sequence[Any]) -> int:
    return sum(map(operator.ne, now, before))


def restore_versions(tensors: Sequence[Tensor], versions: Sequence[int | None]) -> None:
    """Put version counters back, so that autograd hears nothing of writes that were undone."""
    for tensor, before, now in zip(tensors, versions, versions_of(list(tensors)), strict=True):
        if before is not None and before != now:
            set_version(tensor, before)


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


class _Survey:
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
        self._same_members = _comparison_of(self.modules)
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
        self.parameters = [each for each in parameters if _is_plain(each)]
        self.odd_parameters = _others(parameters, self.parameters)
        self.all_parameters = [*self.parameters, *self.odd_parameters]
        held = [each for module in self.modules for each in module.buffers(recurse=False)]
        buffers = list({id(each): each for each in held}.values())
        self.buffers = [b for b in buffers if _is_plain(b) and b.is_contiguous() and b.numel()]
        self.odd_buffers = _others(buffers, self.buffers)
        self.tensors = [*self.parameters, *self.buffers]
        self.metadata = [capture(each, autograd=True) for each in self.tensors]
        self.pointers = _pointers(self.tensors)
        # A scalar has one element; the length of a vector is seen when it is copied.
        self.shaped = [each for each in self.buffers if each.dim() > 1]
        self.sizes = _sizes(self.shaped)
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
            and _sizes(self.shaped) == self.sizes
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


def _others(tensors: list[Tensor], some: list[Tensor]) -> list[Tensor]:
    ids = set(map(id, some))
    return [each for each in tensors if id(each) not in ids]


def _comparison_of(values: Iterable[Any]) -> Callable[[Any, Any], bool]:
    """Return how to find out whether dicts hold the very same values: quickly if it can be."""
    kinds: set[Any] = set(map(type, values))
    compared_by_identity = all(
        kind is type(None) or issubclass(kind, Tensor) or kind.__eq__ is object.__eq__
        for kind in kinds
    )
    return same_tensors if compared_by_identity else same_one_by_one


def _pointers(tensors: list[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _sizes(tensors: list[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


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
        self._survey: _Survey | None = None
        self._state: dict[int, StateContainers] = {}

    def survey(self) -> _Survey:
        """Return the modules and tensors as they are now."""
        optimized = [
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        if self._survey is None or not self._survey.is_current(optimized):
            copied = [each for each in self.also if isinstance(each, nn.Module)]
            self._survey = _Survey(self.modules, copied, optimized)
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
        if [each.numel() for each in buffers] != survey.totals:  # a vector has another length
            self._survey = None
            survey = self.survey()
            buffers = call_unseen(_concatenated, survey.flat_buffers)
        return TrainingSnapshot(self, survey, buffers, parameters=parameters)


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
        self._survey = survey
        self._attributes = list(map(dict.copy, survey.attributes))
        self._hooks = survey.hook_copies()
        self._optimizers = [
            _OptimizerSnapshot(each, training.state_of(each)) for each in training.optimizers
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
            "parameters": _different(versions_of(survey.parameters), self.versions),
            "gradients": gradients,
            # batch_norm writes its statistics without moving their version counters.
            "buffers": call_unseen(_count_different, survey, self._buffers),
            "RNG states": self._random.changed(),
        }

    def undos(self) -> Iterator[Callable[[], None]]:
        """Yield what puts back each kind of state, in the order in which that has to happen."""
        yield self._restore_modules
        for optimizer in self._optimizers:
            yield optimizer.restore
        yield self._others.restore
        yield self._restore_metadata
        yield self._restore_gradients
        yield self._restore_buffers
        if self._copies is not None:
            yield self._copies.restore
        yield from self._also
        yield self._restore_flags
        yield self._restore_versions
        yield self._random.restore
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
            if type(module) is not kind:
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


def _split(survey: _Survey, copies: list[Tensor]) -> None:
    for tensors, lengths, source in zip(survey.flat_buffers, survey.lengths, copies, strict=True):
        copy_all(tensors, list(source.split(lengths)))


def _count_different(survey: _Survey, copies: list[Tensor]) -> int:
    """Return how many buffers have other bits than their copies; a NaN equals itself."""
    return sum(
        not torch.equal(tensor.view(torch.uint8), copied.view(torch.uint8))
        for tensors, lengths, source in zip(
            survey.flat_buffers, survey.lengths, copies, strict=True
        )
        for tensor, copied in zip(tensors, source.split(lengths), strict=True)
    )


class StateContainers:
    """The dicts of an optimizer's state, each with a shallow copy."""

    def __init__(self, optimizer: Optimizer) -> None:
        state = optimizer.state
        self._entries = list(state.values())
        self._entry_copies = list(map(dict.copy, self._entries))
        self._same_values = _comparison_of(
            chain.from_iterable(map(dict.values, self._entry_copies))
        )
        self.copies: list[tuple[Any, Any]] = [(state, dict(state))]
        self.copies += zip(self._entries, self._entry_copies, strict=True)

    def are_current(self, optimizer: Optimizer) -> bool:
        """Whether the dicts hold the very same tensors and numbers."""
        return (
            optimizer.state is self.copies[0][0]
            and same_objects(list(optimizer.state.values()), self._entries)
            and self._same_values(self._entries, self._entry_copies)
        )


def _split_where(survey: _Survey, copies: list[Tensor], skipped: Tensor) -> None:
    for tensors, lengths, source in zip(survey.flat_buffers, survey.lengths, copies, strict=True):
        now = torch.cat(tensors)
        condition = skipped.to(source.device, non_blocking=True)
        torch.where(condition, source, now, out=now)
        copy_all(tensors, list(now.split(lengths)))


class _OptimizerSnapshot:
    """An optimizer's attributes, options and the keys of its state, without the moments."""

    def __init__(self, optimizer: Optimizer, state: StateContainers) -> None:
        self.optimizer = optimizer
        self.attributes = dict(vars(optimizer))
        groups = optimizer.param_groups
        options = [v for group in groups for k, v in group.items() if k != "params"]
        self._options = Containers(options)
        self._containers = [
            (each, each.copy())
            for each in (groups, *groups, *(group["params"] for group in groups))
        ]
        self.state = state

    def restore(self) -> None:
        """Put them back."""
        restore_container(vars(self.optimizer), self.attributes)
        for container, before in (*self._containers, *self.state.copies):
            restore_container(container, before)
        self._options.restore()


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
