"""A training: its modules, its optimizers, and all that one step of it can change."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchguard._torch.eager import (
    MODULE_HOOKS,
    call_unseen,
    has_own_dispatch,
    hooks_registered,
    is_note_of_dynamo,
    members_of,
    not_saved,
    remove_hooks_since,
    same_one_by_one,
    same_tensors,
    versions_of,
    without_torch_function,
)
from torchguard.state.containers import (
    Containers,
    copy_of_tree,
    restore_container,
)
from torchguard.state.process import RNGState, same_state, wait_for
from torchguard.state.tensors import (
    Bulk,
    Elements,
    Gradients,
    Metadata,
    Snapshot,
    capture,
    fills_its_memory,
    is_plain,
    note_refused,
    parted,
    restore_versions,
)
from torchguard.state.walk import ATOMS, children, has_attributes, optimizers_in, tensors_among

# In C, as map() is: half of a loop's time.
_requires_grad, _is_leaf = map(operator.attrgetter, ("requires_grad", "is_leaf"))

# ---- all of a training ----


@dataclass(eq=False)
class TrainingState:
    """Everything a transaction answers for; :meth:`capture` takes a snapshot of it."""

    modules: tuple[nn.Module, ...]
    optimizers: tuple[Optimizer, ...]
    others: tuple[Any, ...]
    """Scalers and schedulers."""

    also: tuple[Any, ...]
    inside: dict[Optimizer, Optimizer] = field(init=False)
    """Optimizers that others hold, such as that of float32 copies, each with the one it is in."""

    _survey: _Survey | None = field(default=None, init=False)
    _kept: dict[Optimizer, OptimizerSnapshot] = field(default_factory=dict, init=False)
    """The last snapshot of each optimizer."""

    def __post_init__(self) -> None:
        self.inside = {
            each: outer
            for outer in self.optimizers
            for each in optimizers_in(outer)
            if each not in self.optimizers
        }

    def all_optimizers(self) -> tuple[Optimizer, ...]:
        """Return the optimizers, and those that they hold."""
        return (*self.optimizers, *self.inside)

    def groups(self) -> list[list[Tensor]]:
        """Return the lists of parameters that the optimizers have now."""
        return [group["params"] for each in self.all_optimizers() for group in each.param_groups]

    def masters(self) -> list[Tensor]:
        """Return the parameters that only optimizers in others have: float32 copies."""
        outer = [group["params"] for each in self.optimizers for group in each.param_groups]
        own = set(map(id, chain(*outer, *(module.parameters() for module in self.modules))))
        inner = [group["params"] for each in self.inside for group in each.param_groups]
        return [each for each in chain(*inner) if id(each) not in own]

    def shares_parameters(self, optimizer: Optimizer, *, modules: bool) -> bool:
        """Whether another optimizer has a parameter of these, or with ``modules`` of those."""
        own = {id(each) for group in self.groups() for each in group}
        if modules:
            own |= {id(p) for module in self.modules for p in module.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def changed_by_a_step(self) -> Iterator[Tensor]:
        """Yield what a step writes: the optimizers' parameters and state, buffers, ``also``."""
        yield from chain.from_iterable(self.groups())
        for optimizer in self.all_optimizers():
            yield from state_tensors(optimizer)
        for module in self.modules:
            yield from module.buffers()
        for each in self.also:
            if isinstance(each, nn.Module):
                yield from (*each.parameters(), *each.buffers())
            elif isinstance(each, Tensor):
                yield each

    def snapshot_of(self, optimizer: Optimizer) -> OptimizerSnapshot:
        """Return a snapshot of an optimizer; the last one if nothing was replaced."""
        last = self._kept.get(optimizer)
        if last is None or not last.is_current() or last.state is not state_of(optimizer):
            last = self._kept[optimizer] = OptimizerSnapshot(optimizer)
        return last

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
        tensors = [each for each in training.also if isinstance(each, Tensor)]
        holders = list(
            {id(m): m for root in (*training.modules, *copied) for m in root.modules()}.values()
        )
        self.modules = Modules(holders)
        self._groups = list(map(list, training.groups()))
        self.copied = set(map(id, chain(tensors, *(module.parameters() for module in copied))))
        own = [each for module in holders for each in module.parameters(recurse=False)]
        held = [each for module in holders for each in module.buffers(recurse=False)]
        self.parameters, self.other_parameters = parted(
            [*own, *tensors, *chain.from_iterable(self._groups)], is_plain
        )
        self.all_parameters = [*self.parameters, *self.other_parameters]
        # A wrapper subclass keeps the tensors that it is made of there.
        self.attributes = [vars(each) for each in self.all_parameters if not has_own_dispatch(each)]
        self.buffers, self.other_buffers = parted(held, fills_its_memory)
        self.metadata = Metadata([*self.parameters, *self.buffers])
        self.bulk = Bulk(self.buffers)
        self._flags = list(map(_requires_grad, self.parameters))
        # A leaf stays one unless its flag changes: autograd refuses to write it in place.
        self.are_leaves = all(map(_is_leaf, self.all_parameters)) and not self.other_parameters

    def is_current(self, groups: list[list[Tensor]]) -> bool:
        """Whether modules and optimizers hold the same tensors, and the tensors the same memory."""
        return (
            self.modules.is_current()
            and same_tensors(groups, self._groups)
            and self.metadata.is_current()
        )

    def flags(self) -> list[bool]:
        """Return the ``requires_grad`` of all parameters; that it is current covers those."""
        if self.other_parameters or not torch.is_grad_enabled():
            return list(map(_requires_grad, self.all_parameters))
        return self._flags


class BufferCopies:
    """The buffers of the modules: which they are, their metadata and their elements."""

    def __init__(self, survey: _Survey) -> None:
        self._survey = survey
        self._copies = survey.bulk.copy()
        self._odd = [capture(each, data=True) for each in survey.other_buffers]

    def restore(self, keep: Sequence[nn.Module] = ()) -> None:
        """Restore them after a step that was skipped. Autograd sees what forward has written.

        The buffers of some modules are kept as they are.
        """
        kept = [capture(b, data=True) for module in keep for b in module.buffers(recurse=False)]
        members_kept = set(map(id, chain.from_iterable(map(members_of, keep))))
        for members, before in self._survey.modules.members:
            if id(members) not in members_kept:
                restore_container(members, before)
        self._survey.metadata.restore(versions_of(self._survey.metadata.tensors))
        self.restore_elements()
        for saved in kept:
            saved.restore()

    def restore_elements(self) -> None:
        """Write the elements into the same tensors."""
        if self._copies:
            self._survey.bulk.restore(self._copies)
        for saved in self._odd:
            saved.restore()


class Hung:
    """What hangs on parameters: ``grad_sample`` of opacus, ``main_grad`` of Megatron."""

    def __init__(self, survey: _Survey) -> None:
        self._attributes = survey.attributes
        self._before = {id(each): dict(each) for each in survey.attributes if each}
        values = chain.from_iterable(map(dict.values, self._before.values()))
        known = (*survey.all_parameters, *survey.buffers, *survey.other_buffers)
        self._inside = Containers(values, skip=known) if self._before else None

    def restore(self) -> None:
        """Restore which attributes there are, and containers and tensors among them."""
        for now in self._attributes:
            before = self._before.get(id(now), {})
            if now or before:
                noted = {key: now[key] for key in now if is_note_of_dynamo(key)}
                restore_container(now, {**before, **noted})
        if self._inside is not None:
            self._inside.restore()


class TrainingSnapshot:
    """The state of a training at the time this was made."""

    def __init__(self, training: TrainingState, survey: _Survey, *, parameters: bool) -> None:
        self._training = training
        self._survey = survey
        self._modules = survey.modules.snapshot()
        optimizers = training.all_optimizers()
        self.optimizers = {id(each): training.snapshot_of(each) for each in optimizers}
        others = list(map(vars, training.others))
        self._others = Containers(others, into=has_state) if others else None
        self._versions = versions_of(survey.metadata.tensors)
        self._hooks_registered = hooks_registered()
        self._requires_grad = survey.flags()
        self._also = _undos_of(training.also)
        self._gradients = Gradients(survey.all_parameters, data=True, are_leaves=survey.are_leaves)
        self.has_gradients = bool(self._gradients.present)
        self._hung = Hung(survey)
        self.buffers = BufferCopies(survey)
        self._odd: list[Snapshot] = [
            capture(each, data=parameters) for each in survey.other_parameters
        ]
        self._copies: Elements | None = None
        if parameters:
            self.copy_parameters()
        self._random = RNGState.capture()

    def copy_parameters(self) -> None:
        """Copy the parameters and the tensors of the optimizers' state, unless that was done."""
        if self._copies is None:
            optimizers = self._training.all_optimizers()
            written = [t for each in optimizers for t in state_of(each).held]
            self._copies = Elements([*self._survey.parameters, *written])

    def has_written(self, optimizer: Optimizer) -> bool:
        """Whether a parameter of an optimizer was written, by its version counter or its copy."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters, copies = self._survey.parameters, self._copies
        versions = zip(parameters, self._versions, versions_of(parameters), strict=False)
        if any(before != now and id(each) in held for each, before, now in versions):
            return True
        # PyTorch's fused kernels move no counter.
        return copies is not None and not held.isdisjoint(copies.differing())

    def written(self) -> bool:
        """Whether parameters that were not copied were written, by their version counters."""
        now = versions_of(self._survey.parameters)
        return self._copies is None and any(
            before != after and id(parameter) not in self._survey.copied
            for parameter, before, after in zip(
                self._survey.parameters, self._versions, now, strict=False
            )
        )

    def wait(self) -> None:
        """Wait for the devices: a stream of the program's may use what is about to be restored."""
        wait_for(chain(self._survey.metadata.tensors, *self._training.groups()))

    def restore(self) -> None:
        """Restore everything; if a part fails, the others are restored all the same."""
        for undo in self._undos():
            try:
                undo()
            except Exception as error:  # noqa: BLE001  whatever it is
                note_refused("could not restore a part of the training", error)

    def _undos(self) -> Iterator[Callable[[], Any]]:
        """Yield what restores each kind of state, in the order in which that has to happen."""
        # Modules first: which tensor a name leads to has to be right before one is written.
        yield self._modules.restore
        for optimizer in self.optimizers.values():
            yield optimizer.restore
        if self._others is not None:
            yield self._others.restore
        # Shapes and memory before elements: a copy goes into memory of the old size.
        yield self._restore_metadata
        yield self._gradients.restore
        yield self._hung.restore
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
        self._survey.metadata.restore(self._versions)

    def _restore_flags(self) -> None:
        """Remove hooks that parameters have got, and restore ``requires_grad``."""
        for parameter in self._survey.all_parameters:
            remove_hooks_since(self._hooks_registered, parameter)
        for parameter, before in zip(self._survey.all_parameters, self._requires_grad, strict=True):
            if parameter.requires_grad != before:
                parameter.requires_grad_(before)

    def _restore_versions(self) -> None:
        restore_versions(self._survey.metadata.tensors, self._versions)


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


# ---- modules ----


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
        # Parameters, buffers and children.
        structure = [members for each in self.modules for members in members_of(each)]
        names = [not_saved(each) for each in self.modules]
        self._structure, self._structure_before = structure, list(map(dict.copy, structure))
        self._names, self._names_before = names, list(map(set.copy, names))
        self.members: list[tuple[Any, Any]] = [
            *zip(structure, self._structure_before, strict=True),
            *zip(names, self._names_before, strict=True),
        ]
        self._same_members = comparison_of(chain.from_iterable(map(dict.values, structure)))
        self.hooks = [(each, hooks) for each in self.modules for hooks in hooks_of(each)]
        self.hook_dicts = [hooks for _, hooks in self.hooks]  # most are empty

    def is_current(self) -> bool:
        """Whether the modules have the same parameters, buffers and children as when this began."""
        return (
            self._same_members(self._structure, self._structure_before)
            and self._names == self._names_before
        )

    def snapshot(self) -> ModulesSnapshot:
        """Take a snapshot of classes, attributes, members and hooks."""
        return ModulesSnapshot(self)


class ModulesSnapshot:
    """Modules as :meth:`Modules.snapshot` found them."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        # Copied each time: to compare them with the last copies takes twice as long.
        self._attributes = list(map(dict.copy, modules.attributes))
        self._hooks = {id(hooks): dict(hooks) for hooks in filter(None, modules.hook_dicts)}

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
        for module, hooks in saved.hooks:
            if id(module) not in became:  # it has taken away its hooks
                restore_container(hooks, self._hooks.get(id(hooks), {}))


def comparison_of(values: Iterable[Any]) -> Callable[[Any, Any], bool]:
    """Return how to find out whether dicts hold the very same values: quickly if it can be."""
    kinds: set[Any] = set(map(type, values))
    compared_by_identity = all(
        kind is type(None) or issubclass(kind, Tensor) or kind.__eq__ is object.__eq__
        for kind in kinds
    )
    return same_tensors if compared_by_identity else same_one_by_one


def optimizers_of(
    modules: Iterable[nn.Module], optimizers: Sequence[Optimizer]
) -> dict[nn.Module, set[Optimizer]]:
    """Return which optimizers train each module.

    One without such parameters, as BatchNorm(affine=False), goes with the module around it, and
    one in none with all of them.
    """
    held = {each: {id(p) for g in each.param_groups for p in g["params"]} for each in optimizers}
    found: dict[nn.Module, set[Optimizer]] = {}

    def visit(module: nn.Module, around: set[Optimizer]) -> None:
        own = set(map(id, module.parameters()))
        owners = {each for each in optimizers if not own.isdisjoint(held[each])} or around
        found[module] = found.get(module, set()) | owners
        for child in module.children():
            visit(child, owners)

    for module in modules:
        visit(module, set(optimizers))
    return found


# ---- optimizers ----


def has_state(node: Any) -> bool:
    """Whether the state dict of a scheduler has what this holds, as LambdaLR's has of a callable.

    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/lr_scheduler.py#L352
    """
    return has_attributes(node) and (
        callable(node) or (hasattr(node, "state_dict") and hasattr(node, "load_state_dict"))
    )


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether ``step()`` is written in PyTorch, in a subclass of the program's too."""
    # Of the class: a scheduler has wrapped that of an instance.
    step: Any = type(optimizer).step
    return str(getattr(step, "__module__", "")).startswith("torch.optim.")


_KEPT = {dict, OrderedDict, defaultdict}
"""Classes whose keys and values are what they show."""


class OptimizerSnapshot:
    """A snapshot of an optimizer's attributes, options and the keys and numbers of its state.

    The tensors in its state are not copied: see :func:`state_tensors`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.state = state_of(optimizer)
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
        containers = [each for each, _ in self._containers.copies]
        self._dicts = [each for each in containers if type(each) in _KEPT]
        self._lists = [each for each in containers if type(each) is list]
        copied = [*self._containers.tensors, *containers]
        self._can_be_kept = len(self._dicts) + len(self._lists) == len(copied)
        self._held = self._now_held()

    def _now_held(self) -> list[Any]:
        """Return the keys, values and items in the containers, and last how many are in each."""
        into = chain.from_iterable
        values = into(map(dict.values, self._dicts))
        lengths = tuple(map(len, chain(self._dicts, self._lists)))
        return [*into(self._dicts), *values, *into(self._lists), lengths]

    def is_current(self) -> bool:
        """Whether everything but the state is as it was; tensors and arrays are copied anew."""
        if not self._can_be_kept:
            return False
        now, before = self._now_held(), self._held
        return now[-1] == before[-1] and all(map(operator.is_, now[:-1], before))

    def restore(self) -> None:
        """Restore them in place."""
        self._containers.restore()
        self.state.restore()


class StateContainers(Containers):
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
        self._is_plain = len(values) == len(self._entries) and all(
            type(each) in ATOMS or isinstance(each, Tensor)
            for each in chain.from_iterable(map(dict.values, self._entry_copies))
        )
        self._state = state
        self.copies.append((state, dict(state)))
        self.copies += zip(self._entries, self._entry_copies, strict=True)

    @functools.cached_property
    def held(self) -> list[Tensor]:
        """The tensors in the state, also those in lists and dicts of it."""
        return tensors_among(self._state.values())

    def are_current(self, optimizer: Optimizer) -> bool:
        """Whether the dicts hold the very same tensors and numbers."""
        return (
            self._is_plain
            and optimizer.state is self._state
            and len(self._state) == len(self._entries)
            and all(map(operator.is_, self._state.values(), self._entries))
            and self._same_values(self._entries, self._entry_copies)
        )


_last_state: weakref.WeakKeyDictionary[Optimizer, StateContainers] = weakref.WeakKeyDictionary()


def state_of(optimizer: Optimizer) -> StateContainers:
    """Return a snapshot of an optimizer's state; the last one if nothing was replaced."""
    last = _last_state.get(optimizer)
    if last is None or not last.are_current(optimizer):
        last = _last_state[optimizer] = StateContainers(optimizer)
    return last


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors in an optimizer's state, also those in lists and dicts of it."""
    return tensors_among(optimizer.state.values())
