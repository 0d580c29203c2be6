"""Measures two ways of doing the same thing against each other.

A round times a block of calls of the baseline and a block of the guarded
statement right after it, and the next round the other way round. A busy moment
of the machine hits both, so the ratio and the difference of a round are steadier
than the two times they are made of; their median over all rounds is what counts.
A block is timed in pieces and the fastest counts, because other programs on the
machine can only add time. The timer is ``torch.utils.benchmark.Timer``, which warms
up and synchronises a GPU.
"""

from __future__ import annotations

import contextlib
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.benchmark import Timer

from benchmarks.clocks import on_both_clocks
from benchmarks.program import Setting
from benchmarks.spread import Interval, Spread

__all__ = ["AddedTarget", "Comparison", "Row", "Scope", "Side", "Target", "measure", "shown"]

_ADAPTED_AFTER = 100
_PIECES = 5

Scope = Callable[[], contextlib.AbstractContextManager[Any]]

Pairs = Sequence[tuple[float, float]]
"""Nanoseconds of the baseline and of the guarded side, round by round."""


@dataclass(frozen=True)
class Side:
    """A statement, the names it uses, and the scope in which all of it runs."""

    statement: str
    names: Mapping[str, Any] = field(default_factory=dict)
    scope: Scope = contextlib.nullcontext
    """Entered once around a block of calls, so that entering is not timed."""


@dataclass(frozen=True)
class Target:
    """What was aimed at: a ratio of guarded to baseline that is not exceeded."""

    ratio: float

    def __str__(self) -> str:
        return f"at most {self.ratio:g} times"

    def verdict(self, row: Row) -> str:
        """Say whether the median reaches it, or by how much it does not."""
        if row.ratio.median <= self.ratio:
            return "reached"
        allowed = self.ratio * row.baseline_ns.median - row.baseline_ns.median
        return (
            f"missed: {row.ratio.median:.3g} times, "
            f"{row.added_ns.median - allowed:.0f} ns more than it allows"
        )

    def noise(self, pairs: Pairs) -> str:
        """Say so where the rounds can't tell a miss from the target; else nothing."""
        interval = Interval.of([after / before for before, after in pairs])
        if interval.low > self.ratio:
            return ""
        return f" (95 % interval {interval.low:.3g} to {interval.high:.3g}: the target lies in it)"


@dataclass(frozen=True)
class AddedTarget(Target):
    """What was aimed at: a time that is not exceeded on top of the baseline's."""

    ratio: float = 0.0
    microseconds: float = 0.0

    def __str__(self) -> str:
        return f"at most {self.microseconds:g} us more"

    def verdict(self, row: Row) -> str:
        """Say whether the median reaches it, or by how much it does not."""
        added = row.added_ns.median / 1e3
        if added <= self.microseconds:
            return "reached"
        return f"missed: {added:.3g} us more"

    def noise(self, pairs: Pairs) -> str:
        """Say so where the rounds can't tell a miss from the target; else nothing."""
        interval = Interval.of([(after - before) / 1e3 for before, after in pairs])
        if interval.low > self.microseconds:
            return ""
        return (
            f" (95 % interval {interval.low:.3g} to {interval.high:.3g} us: the target lies in it)"
        )


@dataclass(frozen=True)
class Comparison:
    """A row to be: the same work without a guard and with it."""

    id: str
    what: str
    baseline: Side
    guarded: Side
    calls: int = 1
    """How many calls of the operation one statement makes; times are per call."""

    making: Side | None = None
    """What both statements also do (make the tensor); timed in each round and taken off."""

    target: Target | None = None
    why: str = ""
    """Where the time goes, for a row that misses its target."""

    floor: int = 1
    """Fewest statements in a block."""


@dataclass(frozen=True)
class Row:
    """What was measured: times in nanoseconds per call; n rounds of ``block`` statements."""

    id: str
    what: str
    device: str
    baseline: str
    guarded: str
    n: int
    block: int
    baseline_ns: Spread
    guarded_ns: Spread
    added_ns: Spread
    ratio: Spread
    making_ns: Spread | None = None
    target: str | None = None
    verdict: str | None = None
    why: str | None = None
    host: dict[str, Spread] | None = None
    """On a GPU, what the host alone takes to call and not to wait: ``baseline_ns``,
    ``guarded_ns``, ``added_ns``. The other times are then of CUDA events."""


def measure(
    comparisons: Iterable[Comparison], setting: Setting, *, block_seconds: float
) -> list[Row]:
    """Measure every comparison, one after the other, and show each.

    Those that the stream knows already are left out, and the rest where time is up.
    """
    known = {row["id"] for row in setting.stream.known("rows")}
    rows = []
    for comparison in comparisons:
        if comparison.id in known:
            continue
        if setting.stream.time_is_up():
            break
        seconds = setting.block_seconds(block_seconds)
        rows.append(_measure(comparison, setting.device, setting.rounds, seconds))
        setting.stream.keep("rows", rows[-1])
        print(shown(rows[-1]))
    return rows


class _Timed:
    """One side, ready to be timed: a block runs inside its scope, warmed up there."""

    def __init__(self, side: Side, device: str) -> None:
        self._timer = Timer(side.statement, globals=dict(side.names))
        self._call = timeit.Timer(side.statement, globals=dict(side.names))
        self._scope = side.scope
        self._device = device
        self.host: list[float] = []
        """On a GPU, the host's seconds of every block so far."""

    def seconds(self, block: int) -> float:
        """Return the time of one statement."""
        if self._device == "cuda":
            return self._on_a_gpu(block)
        with self._scope():
            # The interpreter adapts to what it calls, and entering the scope has changed that.
            # Timer's own warm-up, a hundredth of the block, is too short for it to adapt again.
            if block > _ADAPTED_AFTER:
                self._timer.timeit(max(_ADAPTED_AFTER, block // 10))
            pieces = _PIECES if block >= _PIECES else 1
            return min(self._timer.timeit(block // pieces).median for _ in range(pieces))

    def _on_a_gpu(self, block: int) -> float:
        """Return the time between two events; the host's goes to ``host``."""
        with self._scope():
            self._call.timeit(max(1, min(_ADAPTED_AFTER, block)))
            pieces = _PIECES if block >= _PIECES else 1
            timed = [
                on_both_clocks(lambda: self._call.timeit(block // pieces)) for _ in range(pieces)
            ]
        calls = block // pieces
        self.host.append(min(host for host, _ in timed) / calls)
        return min(device for _, device in timed) / calls


def _measure(comparison: Comparison, device: str, rounds: int, block_seconds: float) -> Row:
    sides = [comparison.baseline, comparison.guarded]
    if comparison.making is not None:
        sides.append(comparison.making)
    timed = [_Timed(side, device) for side in sides]
    block = _block(timed[0], block_seconds, comparison.floor)
    seconds: list[list[float]] = [[] for _ in timed]
    for each in timed:
        each.host.clear()  # those that chose the block
    for number in range(rounds):
        order = range(len(timed)) if number % 2 == 0 else reversed(range(len(timed)))
        for position in order:
            seconds[position].append(timed[position].seconds(block))
    calls = comparison.calls
    making = [1e9 * value / calls for value in seconds[2]] if len(seconds) > 2 else [0.0] * rounds  # noqa: PLR2004
    baseline = [1e9 * value / calls - part for value, part in zip(seconds[0], making, strict=True)]
    guarded = [1e9 * value / calls - part for value, part in zip(seconds[1], making, strict=True)]
    pairs = list(zip(baseline, guarded, strict=True))
    row = Row(
        id=comparison.id,
        what=comparison.what,
        device=device,
        baseline=comparison.baseline.statement,
        guarded=comparison.guarded.statement,
        n=rounds,
        block=block,
        baseline_ns=Spread.of(baseline),
        guarded_ns=Spread.of(guarded),
        added_ns=Spread.of([after - before for before, after in pairs]),
        ratio=Spread.of([after / before for before, after in pairs]),
        making_ns=None if comparison.making is None else Spread.of(making),
        host=_host(timed, calls) if device == "cuda" else None,
    )
    if comparison.target is None:
        return row
    verdict = comparison.target.verdict(row)
    why = None
    if verdict != "reached":
        verdict += comparison.target.noise(pairs)
        why = comparison.why or None
    added = {"target": str(comparison.target), "verdict": verdict, "why": why}
    return Row(**(vars(row) | added))


def _host(timed: Sequence[_Timed], calls: int) -> dict[str, Spread]:
    """Summarise the host's times of both sides, in nanoseconds per call."""
    baseline, guarded = ([1e9 * value / calls for value in side.host] for side in timed[:2])
    return {
        "baseline_ns": Spread.of(baseline),
        "guarded_ns": Spread.of(guarded),
        "added_ns": Spread.of(
            [after - before for before, after in zip(baseline, guarded, strict=True)]
        ),
    }


def _block(timed: _Timed, block_seconds: float, floor: int) -> int:
    """Choose how many statements take about ``block_seconds``."""
    once = timed.seconds(floor)
    once = timed.seconds(max(floor, min(1000, int(block_seconds / 10 / once))))
    return max(floor, int(block_seconds / once))


def shown(row: Row) -> str:
    """Lay a row out for a terminal."""
    shown = (
        f"{row.id:34} {row.device:4} {_ns(row.baseline_ns.median):>9} -> "
        f"{_ns(row.guarded_ns.median):>9} {row.ratio.median:6.3f} times "
        f"[{row.ratio.q1:.3f}, {row.ratio.q3:.3f}]  {row.added_ns.median:+.0f} ns"
    )
    if row.target is not None:
        shown += f"\n{'':39} target: {row.target}: {row.verdict}"
    return shown


def _ns(nanoseconds: float) -> str:
    for limit, divisor, unit in ((1e3, 1.0, "ns"), (1e6, 1e3, "us"), (1e9, 1e6, "ms")):
        if abs(nanoseconds) < limit:
            return f"{nanoseconds / divisor:.3g} {unit}"
    return f"{nanoseconds / 1e9:.3g} s"
