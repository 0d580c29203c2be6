"""Measures two ways of doing the same thing against each other.

A round times a block of calls of the baseline and a block of the guarded statement, and the next
round the other way round. A busy moment of the machine hits both, so the ratio and the difference
of a round are steadier than the two times; their median over all rounds is what counts. A block is
timed in pieces and the fastest counts, because other programs can only add time.
"""

from __future__ import annotations

import contextlib
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.benchmark import Timer

import torchguard
from benchmarks.clocks import on_both_clocks
from benchmarks.program import Setting
from benchmarks.spread import Interval, Spread

_ADAPTED_AFTER = 100
_PIECES = 5

Scope = Callable[[], contextlib.AbstractContextManager[Any]]


def installed(*guards: Any) -> Scope:
    """Return the scope of guards, which are installed also where torch has no need of them."""
    return partial(torchguard.install, *guards, only_if_needed=False)


Pairs = Sequence[tuple[float, float]]
"""Nanoseconds of the baseline and of the guarded side, round by round."""


@dataclass(frozen=True)
class Target:
    """What was aimed at: a ratio of guarded to baseline that is not exceeded."""

    most: float
    unit = "times"

    def __str__(self) -> str:
        return f"at most {self.most:g} {self.unit}"

    def of(self, before: float, after: float) -> float:
        """Return what a round has of it."""
        return after / before

    def verdict(self, pairs: Pairs) -> str:
        """Say whether the median reaches it, or what was measured, and whether that is noise."""
        found = [self.of(before, after) for before, after in pairs]
        median, interval = Spread.of(found).median, Interval.of(found)
        if median <= self.most:
            return "reached"
        missed = f"missed: {median:.3g} {self.unit}"
        if interval.low > self.most:
            return missed
        shown = f"95 % interval {interval.low:.3g} to {interval.high:.3g}"
        return f"{missed} ({shown}: the target lies in it)"


@dataclass(frozen=True)
class AddedTarget(Target):
    """What was aimed at: microseconds that are not exceeded on top of the baseline's time."""

    unit = "us more"

    def of(self, before: float, after: float) -> float:
        """Return what a round has of it."""
        return (after - before) / 1e3


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

    baseline_scope: Scope = contextlib.nullcontext
    calls: int = 1
    """How many calls of the operation one statement makes; times are per call."""

    making: str = ""
    """What both statements also do (make the tensor); timed in each round and taken off."""

    target: Target | None = None
    why: str = ""
    """Where the time goes, for a row that misses its target."""


def compared(pairs: Pairs, target: Target | None = None, why: str = "") -> dict[str, Any]:
    """Summarise the rounds of two sides: times in nanoseconds per call, and the target's verdict.

    A GPU's row has ``host`` besides: what the host alone takes to call and not to wait. The other
    times are then of CUDA events.
    """
    verdict = None if target is None else target.verdict(pairs)
    return {
        "n": len(pairs),
        "baseline_ns": Spread.of([before for before, _ in pairs]),
        "guarded_ns": Spread.of([after for _, after in pairs]),
        "added_ns": Spread.of([after - before for before, after in pairs]),
        "ratio": Spread.of([after / before for before, after in pairs]),
        "target": None if target is None else str(target),
        "verdict": verdict,
        "why": why if why and verdict not in {None, "reached"} else None,
    }


def measure(
    comparisons: Iterable[Comparison], setting: Setting, *, block_seconds: float
) -> list[dict[str, Any]]:
    """Measure every comparison, one after the other: a row for each."""
    seconds = setting.block_seconds(block_seconds)
    cases = (({"id": each.id}, partial(_measure, each, setting, seconds)) for each in comparisons)
    return setting.collect(cases)


class _Timed:
    """A statement, ready to be timed: a block runs inside its scope, warmed up there."""

    def __init__(self, statement: str, scope: Scope, names: Mapping[str, Any], device: str) -> None:
        self._timer = Timer(statement, globals=dict(names))
        self._call = timeit.Timer(statement, globals=dict(names))
        self._scope, self._device = scope, device

    def seconds(self, block: int) -> tuple[float, float]:
        """Return the time of one statement, and on a GPU the host's."""
        pieces = _PIECES if block >= _PIECES else 1
        calls = block // pieces
        with self._scope():
            if self._device == "cuda":
                self._call.timeit(max(1, min(_ADAPTED_AFTER, block)))
                timed = [on_both_clocks(lambda: self._call.timeit(calls)) for _ in range(pieces)]
                hosts, devices = zip(*timed, strict=True)
                return min(devices) / calls, min(hosts) / calls
            # The interpreter adapts to what it calls, and entering the scope has changed that.
            # Timer's own warm-up, a hundredth of the block, is too short for it to adapt again.
            if block > _ADAPTED_AFTER:
                self._timer.timeit(max(_ADAPTED_AFTER, block // 10))
            return min(self._timer.timeit(calls).median for _ in range(pieces)), 0.0


def _measure(comparison: Comparison, setting: Setting, block_seconds: float) -> dict[str, Any]:
    device, rounds = setting.device, setting.rounds
    sides = [
        (comparison.baseline, comparison.baseline_scope),
        (comparison.guarded, comparison.scope),
    ]
    if comparison.making:
        sides.append((comparison.making, contextlib.nullcontext))
    timed = [_Timed(*side, comparison.names, device) for side in sides]
    block = _block(timed[0], block_seconds)
    found: list[list[tuple[float, float]]] = [[] for _ in timed]
    for number in range(rounds):
        turns = [*zip(found, timed, strict=True)]
        for times, side in turns if number % 2 == 0 else turns[::-1]:
            times.append(side.seconds(block))
    calls = comparison.calls
    seconds, hosts = ([[1e9 * each[i] / calls for each in side] for side in found] for i in (0, 1))
    before, after, making = [*seconds, [0.0] * rounds][:3]
    pairs = [(a - part, b - part) for a, b, part in zip(before, after, making, strict=True)]
    row = {
        "what": comparison.what,
        "baseline": comparison.baseline,
        "guarded": comparison.guarded,
        "block": block,
        **compared(pairs, comparison.target, comparison.why),
    }
    if comparison.making:
        row["making_ns"] = Spread.of(making)
    if device == "cuda":
        host = compared(list(zip(hosts[0], hosts[1], strict=True)))
        row["host"] = {name: host[name] for name in ("baseline_ns", "guarded_ns", "added_ns")}
    return row


def _block(timed: _Timed, block_seconds: float) -> int:
    """Choose how many statements take about ``block_seconds``."""
    once = timed.seconds(1)[0]
    once = timed.seconds(max(1, min(1000, int(block_seconds / 10 / once))))[0]
    return max(1, int(block_seconds / once))
