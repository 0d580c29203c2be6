"""Make each operator of a training step fail in turn, try the batch again, compare every bit.

A :class:`Case` is a training of a few hundred parameters. :func:`count` runs it once for every
operator that PyTorch dispatches in its step; that operator raises, once before and once after it
has run. The failed block is run again within a :class:`Way` (of cleaning up), and all that a
training consists of is compared with a run that never failed.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import _refresh_per_optimizer_state

import torchguard
from support.small_training import (
    FEATURES,
    Case,
    FailAt,
    InjectedError,
    State,
    Training,
    bits,
    covering,
    differences,
    every_case,
    identity_of,
    implementations,
    state_of,
)
from torchguard._torch import set_version

__all__ = [
    "FEATURES",
    "Case",
    "Count",
    "FailAt",
    "InjectedError",
    "Reference",
    "State",
    "Training",
    "Way",
    "bits",
    "composer",
    "count",
    "covering",
    "deep_copy",
    "differences",
    "every_case",
    "identity_of",
    "implementations",
    "nothing",
    "reference",
    "state_of",
    "transaction",
    "zero_grad",
]

# --- ways of cleaning up ---------------------------------------------------------------------

Way = Callable[[Training], AbstractContextManager[Any]]
"""Given a training, what each block of it is run within."""


def nothing(_: Training) -> AbstractContextManager[Any]:
    """Retry as it is: ``accelerate.find_executable_batch_size``, toma."""
    return nullcontext()


class _CleanUp:
    """A context manager, entered again and again, that calls a function if its block raises."""

    def __init__(self, clean_up: Callable[[], None]) -> None:
        self._clean_up = clean_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self._clean_up()


def zero_grad(training: Training) -> AbstractContextManager[Any]:
    """The usual advice: drop the gradients."""

    def clean_up() -> None:
        for optimizer in training.optimizers:
            optimizer.zero_grad()

    return _CleanUp(clean_up)


def composer(training: Training) -> AbstractContextManager[Any]:
    """Drop the gradients, and let the scaler forget what stage it is at."""

    def clean_up() -> None:
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        training.scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    return _CleanUp(clean_up)


class deep_copy:  # noqa: N801  one of the ways, and those are functions
    """The reference: copy everything on entry, put all of it back."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def __enter__(self) -> None:
        t = self._training
        self._gradients = [
            (p, p.grad, None if p.grad is None else p.grad.clone()) for p in t.model.parameters()
        ]
        self._tensors = [
            (tensor, tensor.detach().clone(), tensor._version) for tensor in _tensors_of(t)
        ]
        self._objects = [*t.optimizers, *t.schedulers, t.scaler]
        self._attributes = [_copied(each) for each in self._objects]
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        self._torch = torch.get_rng_state()
        on_gpu = t.case.device == "cuda"
        self._cuda = torch.cuda.get_rng_state() if on_gpu else None

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            return
        with torch.no_grad():
            for tensor, value, version in self._tensors:
                tensor.copy_(value)
                set_version(tensor, version)
            for parameter, gradient, values in self._gradients:
                parameter.grad = gradient
                if gradient is not None and values is not None:
                    gradient.copy_(values)
        for each, attributes in zip(self._objects, self._attributes, strict=True):
            _put_back(each, attributes)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002


def _tensors_of(training: Training) -> Iterator[torch.Tensor]:
    modules: list[nn.Module] = [training.model]
    if training.average is not None:
        modules.append(training.average)
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            yield from (each for each in state.values() if isinstance(each, torch.Tensor))
    for each in (training.scaler.__dict__.get(n) for n in ("_scale", "_growth_tracker")):
        if each is not None:
            yield each


def _copied(owner: Any) -> dict[str, Any]:
    """Copy an object's attributes; tensors and what is not data stay the same objects."""
    found = dict(vars(owner))
    if isinstance(owner, torch.optim.Optimizer):
        found["state"] = {p: dict(state) for p, state in owner.state.items()}
        found["param_groups"] = [dict(group) for group in owner.param_groups]
    elif isinstance(owner, torch.amp.GradScaler):
        stages = found.get("_per_optimizer_states", {})
        found["_per_optimizer_states"] = {key: copy.copy(entry) for key, entry in stages.items()}
    else:
        found = {key: copy.copy(v) if isinstance(v, list) else v for key, v in found.items()}
    return found


def _put_back(owner: Any, attributes: dict[str, Any]) -> None:
    for name in set(vars(owner)) - set(attributes):
        delattr(owner, name)
    for name, value in attributes.items():
        if name == "state" and isinstance(owner, torch.optim.Optimizer):
            owner.state.clear()
            owner.state.update(value)
        elif name == "param_groups":
            for group, before in zip(owner.param_groups, value, strict=True):
                group.clear()
                group.update(before)
        elif name == "_per_optimizer_states":
            owner._per_optimizer_states = defaultdict(_refresh_per_optimizer_state, value)
        else:
            setattr(owner, name, value)


def transaction(training: Training) -> AbstractContextManager[Any]:
    """``with step:``."""
    return torchguard.transaction(
        training.model,
        training.optimizers,
        training.scaler if training.case.amp else None,
        training.schedulers,
        also=() if training.average is None else (training.average,),
    )


# --- the proof -------------------------------------------------------------------------------


@dataclass
class Count:
    """How the fault points of a case, or of several, ended."""

    points: int = 0
    wrong: int = 0
    """The batch was tried again, no error, and something differs from the run without a fault."""

    stuck: int = 0
    """The batch was tried again, and raised once more."""

    not_restored: int = 0
    """Right after the failure something was not as before the block."""

    committed: int = 0
    """The step was done before the failure: it counts, and was not tried again."""

    examples: list[str] = field(default_factory=list)

    def __add__(self, other: Count) -> Count:
        numbers = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in dataclasses.fields(self)
        }
        return Count(**numbers)


@dataclass(frozen=True)
class Reference:
    """A run that never failed."""

    at_commit: State
    end: State
    operators: int


def reference(case: Case, way: Way = nothing) -> Reference:
    """Run a case without a fault, within a way of cleaning up, whose operators count too."""
    training = Training(case)
    guard = way(training)
    with FailAt() as counter:
        for block in training.blocks:
            with guard:
                block()
    end = state_of(training)
    training = Training(case)
    training.recording = True
    for block in training.blocks:
        block()
    assert training.at_commit is not None
    return Reference(training.at_commit, end, counter.seen)


def count(
    case: Case, way: Way, *, restores: bool = False, every: int = 1, offset: int = 0
) -> Count:
    """Fail at each operator, or at every so-many-th, before and after it; see how it ends.

    ``restores`` says that the way claims to leave everything as it was, which is then compared
    right after the failure too, with the objects and the memory it lies in.
    """
    plain, guarded = reference(case), reference(case, way)
    total = Count()
    if plain.end != guarded.end:
        total += Count(wrong=1, examples=[f"{case} without a fault: differs from plain code"])
    for at in range(offset % every, guarded.operators, every):
        for after in (False, True):
            total += _one_point(case, way, plain, FailAt(at, after=after), restores=restores)
    return total


def _one_point(case: Case, way: Way, plain: Reference, fault: FailAt, *, restores: bool) -> Count:
    training = Training(case)
    guard = way(training)
    result = Count(points=1)
    raised: list[InjectedError] = []
    for block in training.blocks:
        before = {**state_of(training), **identity_of(training)} if restores else {}
        try:
            with fault, guard:
                block()
        except InjectedError as error:
            raised.append(error)
            if getattr(guard, "committed", False):
                result.committed = 1
                continue
            if restores and (
                lost := differences(state_of(training) | identity_of(training), before)
            ):
                result.not_restored = 1
                result.examples.append(f"{case} {error}: not restored: {', '.join(lost)}")
            try:
                with guard:
                    block()
            except Exception as again:  # noqa: BLE001  whatever a broken state raises
                result.stuck = 1
                result.examples.append(f"{case} {error}: raised again: {again!r}")
                return result
    assert len(raised) == 1, f"{case}: the fault was swallowed, or there was none"
    expected = [plain.at_commit, plain.end] if result.committed else [plain.end]
    if lost := differences(state_of(training), *expected):
        result.wrong = 1
        result.examples.append(f"{case} {raised[0]}: differs: {', '.join(lost)}")
    elif result.committed:
        try:  # a scaler that was left between two stages refuses the next step
            with guard:
                training.whole_step()
        except Exception as again:  # noqa: BLE001  likewise
            result.stuck = 1
            result.examples.append(f"{case} {raised[0]}: the next step raised: {again!r}")
    return result
