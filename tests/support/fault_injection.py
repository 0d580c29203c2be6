"""Make each operator of a training step fail in turn, try the batch again, compare every bit.

A :class:`Case` is a training of a few hundred parameters. :func:`count` runs it once for every
operator that PyTorch dispatches in its step; that operator raises, once before and once after it
has run. The failed block is run again within a :class:`Way` (of cleaning up), and all that a
training consists of is compared with a run that never failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torchguard
from support.small_training import (
    Case,
    FailAt,
    InjectedError,
    State,
    Training,
    differences,
    identity_of,
    state_of,
)

__all__ = ["Case"]

# --- ways of cleaning up ---------------------------------------------------------------------

Way = Callable[[Training], AbstractContextManager[Any]]
"""Given a training, what each block of it is run within."""


def nothing(_: Training) -> AbstractContextManager[Any]:
    """Retry as it is: ``accelerate.find_executable_batch_size``, toma."""
    return nullcontext()


class zero_grad:  # noqa: N801  one of the ways, and those are functions
    """The usual advice: drop the gradients."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        for optimizer in self.training.optimizers if error_type is not None else ():
            optimizer.zero_grad()


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

    unrecoverable: int = 0
    """The failure came inside of a fused step, which is not copied, and the error says so."""

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
        except torchguard.UnrecoverableStepError:
            result.unrecoverable = 1
            return result
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
