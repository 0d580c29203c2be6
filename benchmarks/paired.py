"""Steps of one program in several scopes, by turns, and the interval in which each ratio lies.

The scopes take turns within a round, and the order changes from round to round, so that what
comes and goes on the machine hits them alike. The first calls in a scope are not timed: entering
it made the interpreter forget what it knew of torch's attributes. A GPU's time is taken between
two CUDA events, recorded when the GPU had nothing left to do, and read when it is done: that is
the host's time where the host is slower, and the GPU's where the GPU is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from benchmarks.clocks import on_both_clocks
from benchmarks.harness import Scope
from benchmarks.program import Setting
from benchmarks.spread import Interval, Spread
from benchmarks.tables import Table

_WARM = 20  # calls, after which the interpreter has adapted again

Step = Callable[[], Any]


@dataclass(frozen=True)
class Variant:
    """A step, and the scope in which it runs."""

    name: str
    step: Step
    scope: Scope


def of_its_own(function: Any) -> Any:
    """Return a copy that Dynamo, which keeps its decisions with the code, compiles for itself."""
    code, defaults = function.__code__.replace(), function.__defaults__
    copy: Any = FunctionType(
        code, function.__globals__, function.__name__, defaults, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def seconds(step: Step, calls: int, device: str) -> float:
    """Return the seconds of one call, the mean of several."""

    def block() -> None:
        for _ in range(calls):
            step()

    if device == "cuda":
        return on_both_clocks(block)[1] / calls
    start = time.perf_counter()
    block()
    return (time.perf_counter() - start) / calls


def calls_for(step: Step, block_seconds: float, device: str) -> int:
    """Return how many calls take about that long, at least one."""
    seconds(step, 2, device)
    once = seconds(step, 2, device)
    return max(1, min(1000, round(block_seconds / once)))


def take_turns(
    variants: Sequence[Variant], rounds: int, calls: int, device: str, *, first: int = 0
) -> dict[str, list[float]]:
    """Return the seconds per call of each variant, one number per round.

    ``first`` is how many rounds there were before: the order goes on where it was.
    """
    found: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(first, first + rounds):
        for variant in _order(variants, number):
            with variant.scope():
                for _ in range(max(1, min(_WARM, calls // 2))):
                    variant.step()
                found[variant.name].append(seconds(variant.step, calls, device))
    return found


def _order(variants: Sequence[Variant], number: int) -> list[Variant]:
    """Return another order for each round; every variant stands in every place equally often."""
    first = (number // 2) % len(variants)
    order = [*variants[first:], *variants[:first]]
    return order if number % 2 == 0 else order[::-1]


def ratios(found: dict[str, list[float]], baseline: str) -> dict[str, Interval]:
    """Divide each variant's rounds by the baseline's, round by round."""
    bare = found[baseline]
    return {
        name: Interval.of([after / before for before, after in zip(bare, times, strict=True)])
        for name, times in found.items()
        if name != baseline
    }


def guarded_step(step: Step, guard: Scope, setting: Setting) -> dict[str, Any]:
    """Let a step take turns with itself in a guard's scope; ``control`` is nothing once more."""
    variants = [
        Variant("nothing", step, contextlib.nullcontext),
        Variant("control", step, contextlib.nullcontext),
        Variant("guard", step, guard),
    ]
    calls = calls_for(step, setting.block_seconds(0.05), "cpu")
    found = take_turns(variants, setting.rounds, calls, "cpu")
    ratio = ratios(found, "nothing")
    guarded, control = ratio["guard"], ratio["control"]
    same = guarded.holds_one or (guarded.low <= control.high and control.low <= guarded.high)
    return {
        "n": setting.rounds,
        "calls": calls,
        "nothing_ms": Spread.of([1e3 * seconds for seconds in found["nothing"]]),
        "ratio": guarded,
        "control": control,
        "verdict": "not distinguishable" if same else f"{guarded.median:.3g} times",
    }


def steps_table(guarded: str, part: str) -> Table:
    """Return how the steps of a part are shown; ``guarded`` is the heading of the guard's times."""
    interval = "{{{0}.median:.3f}}{1} [{{{0}.low:.3f}}, {{{0}.high:.3f}}]"
    columns = {
        "step": "{what}, {phase}",
        "plain": "{nothing_ms.median:.3g} ms",
        f"{guarded} [95 %]": interval.format("ratio", " times"),
        "plain, once more [95 %]": interval.format("control", ""),
        "verdict": "{verdict}",
    }
    return Table(columns, rows=part)
