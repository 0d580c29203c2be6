"""Measures two ways of doing the same thing against each other, with ``torch.utils.benchmark``.

A round times a block of calls of the baseline and a block of the guarded statement, and the next
round the other way round. A busy moment of the machine hits both, so the ratio and the difference
of a round are steadier than the two times: their median over all rounds is what counts.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.utils.benchmark import Timer

import torchguard
from benchmarks.program import Setting

# Calls after which the interpreter has adapted: entering a scope makes it forget what it knew.
# Timer's own warm-up, a hundredth of the block, is too short for that.
_ADAPTED_AFTER = 100
_PIECES = 5  # of a block; the fastest counts, because other programs can only add time

Scope = Callable[[], contextlib.AbstractContextManager[Any]]


def installed(*guards: Any) -> Scope:
    """Return the scope of guards, which are installed also where torch has no need of them."""
    return partial(torchguard.install, *guards, only_if_needed=False)


def of_its_own(function: Any) -> Any:
    """Return a copy that Dynamo, which keeps its decisions with the code, compiles for itself."""
    code, defaults = function.__code__.replace(), function.__defaults__
    copy: Any = FunctionType(
        code, function.__globals__, function.__name__, defaults, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@dataclass(frozen=True)
class Spread:
    """The median of all rounds and the quartiles around it."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise one number per round."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(*(float(f"{value:.5g}") for value in (median, q1, q3)))


@dataclass(frozen=True)
class Comparison:
    """A row to be: the same work without a guard and with it."""

    id: str
    what: str
    names: Mapping[str, Any]
    """Of both statements."""

    baseline: str
    guarded: str
    scope: Scope = contextlib.nullcontext
    """Entered once around a block of guarded calls, so that entering is not timed."""

    calls: int = 1
    """How many calls of the operation one statement makes; times are per call."""

    making: str = ""
    """What both statements also do (make the tensor); timed in each round and taken off."""


def measure(
    comparisons: Iterable[Comparison], setting: Setting, *, block_seconds: float, part: str = "rows"
) -> list[dict[str, Any]]:
    """Measure every comparison, one after the other: a row for each."""
    seconds = 2e-4 if setting.quick else block_seconds
    cases = (({"id": each.id}, partial(_measure, each, setting, seconds)) for each in comparisons)
    return setting.collect(cases, part)


class _Timed:
    """A statement, ready to be timed: a block runs inside its scope, warmed up there."""

    def __init__(self, statement: str, scope: Scope, names: Mapping[str, Any]) -> None:
        # On a GPU it waits for the device at both ends of a block.
        self._timer = Timer(statement, globals=dict(names))
        self._scope = scope

    def seconds(self, block: int) -> float:
        """Return the time of one statement."""
        pieces = _PIECES if block >= _PIECES else 1
        with self._scope():
            if block > _ADAPTED_AFTER:
                self._timer.timeit(max(_ADAPTED_AFTER, block // 10))
            return min(self._timer.timeit(block // pieces).median for _ in range(pieces))


def _measure(comparison: Comparison, setting: Setting, block_seconds: float) -> dict[str, Any]:
    sides = [
        (comparison.baseline, contextlib.nullcontext),
        (comparison.guarded, comparison.scope),
        *([(comparison.making, contextlib.nullcontext)] if comparison.making else []),
    ]
    timed = [_Timed(*side, comparison.names) for side in sides]
    once = timed[0].seconds(1)
    once = timed[0].seconds(max(1, min(1000, int(block_seconds / 10 / once))))
    block = max(1, int(block_seconds / once))
    found: list[list[float]] = [[] for _ in timed]
    for number in range(setting.rounds):
        turns = [*zip(found, timed, strict=True)]
        for times, side in turns if number % 2 == 0 else turns[::-1]:
            times.append(1e9 * side.seconds(block) / comparison.calls)
    before, after, making = [*found, [0.0] * setting.rounds][:3]
    pairs = [(a - part, b - part) for a, b, part in zip(before, after, making, strict=True)]
    return {
        "what": comparison.what,
        "baseline": comparison.baseline,
        "guarded": comparison.guarded,
        "n": setting.rounds,
        "baseline_ns": Spread.of([a for a, _ in pairs]),
        "guarded_ns": Spread.of([b for _, b in pairs]),
        "ratio": Spread.of([b / a for a, b in pairs]),
    }


def held_bytes(function: Callable[[], object], device: str) -> int:
    """Return how many bytes of tensors a call allocates on a device and does not free."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        kept = function()
        held = torch.cuda.memory_allocated() - before
    else:
        with torch.profiler.profile(profile_memory=True) as profile:
            kept = function()
        held = sum(each.self_cpu_memory_usage for each in profile.key_averages())
    del kept
    return held
