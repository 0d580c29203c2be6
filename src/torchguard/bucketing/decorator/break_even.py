"""When compiling a bucket breaks even, and which graph is kept: what ``engine="auto"`` decides.

Eager costs its seconds in every call, compiling costs once. To compile as soon as the eager calls
have taken as long as compiling takes costs at most twice the optimum in hindsight, whatever calls
come: the rule for the "ski rental" problem.
https://en.wikipedia.org/wiki/Ski_rental_problem

Nothing here depends on torch: seconds come in, decisions come out.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

How: TypeAlias = Literal["eager", "ranges", "range", "static"]
"""``ranges``: one graph for all sizes of the ladder; ``range``: one for those of the bucket."""

_ENOUGH, _ENOUGH_WHERE_CLOSE = 8, 24
"""So many calls are timed in each of two ways before one is kept."""

_CLOSE = 0.1
_HOPELESS = 2.0
"""A way that takes so many times as long is given up after three calls."""

_PATIENCE = 32
"""So many calls of other buckets wait for the end of a trial before they begin one, too."""

_MOST_COMPILES = 4
"""A trial that compiles anew more often than this is given up."""

# A static graph instead of a symbolic one: half is the most that was ever seen.
_ASSUMED_SAVING = 0.5
_WORTH_IT = 0.02


class CompileCosts:
    """What compiling one function costs, and what it saves, measured on the buckets before."""

    def __init__(self, assumed: float) -> None:
        self.savings: defaultdict[How, list[float]] = defaultdict(list)
        """By what ran a bucket before, the share of its time that a static graph has saved."""
        self._assumed = assumed  # seconds, as long as nothing was compiled
        self._seconds: defaultdict[How, list[float]] = defaultdict(list)
        self._waited: int | None = None

    def of(self, how: How) -> float:
        """Return the seconds that compiling takes."""
        # What compiling in another way took is the best guess for one that was not tried yet.
        seconds = self._seconds[how] or [each for all_ in self._seconds.values() for each in all_]
        return statistics.median(seconds) if seconds else self._assumed

    def add(self, how: How, seconds: float, *, more: bool) -> None:
        """Note what compiling took; ``more`` for the backward of what was noted last."""
        noted = self._seconds[how]
        if more and noted:
            noted[-1] += seconds
        else:
            noted.append(seconds)

    def begin_trial(self) -> bool:
        """Begin to try a static graph, unless another bucket does: its answer may hold for all."""
        if self._waited is not None and self._waited < _PATIENCE:
            self._waited += 1
            return False
        self._waited = 0
        return True

    def end_trial(self) -> None:
        """Let the next bucket try."""
        self._waited = None


@dataclass
class SharedGraph:
    """A graph with symbolic sizes, and what the buckets that may run it have found out."""

    key: Any
    eager_seconds: float = 0.0
    """What its buckets have taken eager."""
    wanted: bool = False
    """Whether compiling it has broken even."""
    lead: int = 0
    """In how many buckets it was faster than eager, less those in which it was not."""
    recompiled: int = 0
    refused: str = ""


class _Timings:
    """What calls took, run in one way."""

    def __init__(self) -> None:
        self.count = 0
        self.forward: deque[float] = deque(maxlen=2 * _ENOUGH_WHERE_CLOSE)
        self.backward: deque[float] = deque(maxlen=2 * _ENOUGH_WHERE_CLOSE)

    def add(self, seconds: float, *, backward: bool) -> None:
        (self.backward if backward else self.forward).append(seconds)
        self.count += not backward

    @property
    def recent(self) -> int:
        return len(self.forward)

    @property
    def cost(self) -> float:
        """Seconds of a call, its backward included."""
        # The median: now and then a call is delayed by other work on the machine.
        return sum(statistics.median(each) for each in (self.forward, self.backward) if each)

    def forget_old(self) -> None:
        for times in (self.forward, self.backward):
            # Some are kept: this way was timed under the same load, and need not begin at nothing.
            while len(times) > _ENOUGH // 2:
                times.popleft()


@dataclass
class Choice:
    """What runs one bucket, and why: the first of an order that is not refused."""

    buckets: tuple[int, ...]
    order: tuple[How, ...]
    shared: dict[str, SharedGraph] = field(default_factory=dict)
    """The symbolic graphs among them."""
    why: str = ""
    settled: bool = True
    refused: dict[str, str] = field(default_factory=dict)

    def now(self) -> How:
        """Return what runs it, where no trial is on."""
        return next((each for each in self.order if self._may(each)), "eager")

    def next(self, *, may_compile: bool = True) -> How:  # noqa: ARG002 - AutoChoice asks
        """Return what runs the next call."""
        return self.now()

    def instead_of(self, refused: Collection[str]) -> How | None:
        """Return what runs a call that could not be run in these ways, None if nothing does."""
        return next((each for each in self.order if self._may(each) and each not in refused), None)

    def refuse(self, how: How, reason: str) -> None:
        """Never run it in this way again."""
        self.refused[how] = reason
        if how in self.shared:
            self.shared[how].refused = reason

    def judge(self) -> None:
        """Keep the faster way, once enough calls were timed."""

    def describe(self) -> str:
        """Return what runs it, and why."""
        how, parts = self.now(), []
        if how in self.shared:
            bounds = self.shared[how].key.bounds
            shown = ", ".join(f"{axis} from {low} to {high or 'any'}" for axis, low, high in bounds)
            parts.append(f"one graph for {shown}" if shown else "a graph of this size alone")
        parts += self._measured()
        if self.why:
            parts.append(self.why)
        of_shared = {name: each.refused for name, each in self.shared.items() if each.refused}
        refused = {**of_shared, **self.refused}
        parts += [f"{name} refused: {reason}" for name, reason in refused.items()]
        return f"{how} ({'; '.join(parts)})" if parts else how

    def _measured(self) -> list[str]:
        return []

    def _may(self, how: How) -> bool:
        return how not in self.refused and not (how in self.shared and self.shared[how].refused)


class AutoChoice(Choice):
    """Begins eager, compiles where that breaks even, and keeps what was faster."""

    def __init__(self, buckets: tuple[int, ...], whole: SharedGraph, costs: CompileCosts) -> None:
        super().__init__(buckets, ("ranges", "static", "eager"), {"ranges": whole}, settled=False)
        self.candidate: How | None = None
        """What is timed against what runs now."""
        self.timings: defaultdict[How, _Timings] = defaultdict(_Timings)
        self._how: How = "eager"
        self._whole = whole  # the graph for all sizes of the ladder
        self._costs = costs
        self._tried: set[How] = set()
        self._spent = 0.0
        """Seconds since the last decision."""
        self._compiled = 0

    # ---- what runs a call ----

    def now(self) -> How:
        """Return what runs it, where no trial is on."""
        return self._how

    def next(self, *, may_compile: bool = True) -> How:
        """Return what runs the next call."""
        if self.settled or not may_compile:
            return self._how
        if self.candidate is None:
            self._consider()
        if self.candidate is None:
            return self._how
        # By turns, so that both meet the same data and the same load.
        ahead = self.timings[self.candidate].recent > self.timings[self._how].recent
        return self._how if ahead else self.candidate

    def add(
        self, how: How, seconds: float, *, compiled: bool, backward: bool = False,
        warmed: bool = False,
    ) -> None:  # fmt: skip
        """Note the seconds of a forward or a backward, of the caller's own unless ``warmed``."""
        if compiled:
            self._costs.add(how, seconds, more=backward)
            self._compiled += not backward
            return
        self.timings[how].add(seconds, backward=backward)
        if warmed:
            return
        if how == self._how:
            self._spent += seconds
        if how == "eager" and not self._whole.wanted:
            self._whole.eager_seconds += seconds

    def refuse(self, how: How, reason: str) -> None:
        """Never run it in this way again."""
        super().refuse(how, reason)
        if self.candidate == how:
            self.candidate = None
            self._costs.end_trial()
        if self._how == how:
            self._how, self.settled = "eager", False

    def instead_of(self, refused: Collection[str]) -> How | None:
        """Return what runs a call that could not be run in these ways, None if nothing does."""
        if self._how not in refused:
            return self._how
        return None if "eager" in refused else "eager"

    # ---- what is decided ----

    def _consider(self) -> None:
        """Compile if what compiling would have saved so far has reached what it costs."""
        if self._may("ranges") and "ranges" not in self._tried and self._how == "eager":
            calls = self.timings["eager"].count
            if self._whole.wanted and self._whole.lead > 0 and calls < _ENOUGH:
                self._how = "ranges"  # the graph is there, and faster in other buckets
                self._tried.add("ranges")
                self._spent = 0.0
            # At the most it would have saved all of the time. Never for a size that comes once.
            elif calls and (
                self._whole.wanted or self._whole.eager_seconds >= self._costs.of("ranges")
            ):
                self._whole.wanted = True
                self._try("ranges")
            return
        if not self._may("static") or "static" in self._tried:
            self.settled = True
            return
        # Ranges that are slower than eager leave little hope for padding.
        assumed = 1.0 if self._how == "eager" and "ranges" not in self._tried else _ASSUMED_SAVING
        savings = self._costs.savings[self._how]
        share = statistics.fmean(savings) if savings else assumed
        if share < _WORTH_IT and len(savings) > 1:
            self.why = "static graphs of other buckets were not faster"
            self.settled = True
            return
        saved = share * self._spent
        came_before = self.timings[self._how].count > 0
        if came_before and saved >= self._costs.of("static") and self._costs.begin_trial():
            self._try("static")

    def _try(self, how: How) -> None:
        self.candidate = how
        self._compiled = 0
        self._tried.add(how)
        for timings in self.timings.values():
            timings.forget_old()

    def judge(self) -> None:
        """Keep the faster way, once enough calls were timed."""
        how = self.candidate
        if how is None or self.settled:
            return
        new, old = self.timings[how], self.timings[self._how]
        if self._compiled > _MOST_COMPILES:
            self.refuse(how, f"it was compiled {self._compiled} times in {new.count} calls")
            return
        fewest = min(new.recent, old.recent)
        hopeless = new.recent > 2 and old.recent and new.cost > _HOPELESS * old.cost  # noqa: PLR2004
        if fewest < _ENOUGH and not hopeless:
            return
        share = 1 - new.cost / old.cost
        if fewest < _ENOUGH_WHERE_CLOSE and abs(share) < _CLOSE:
            return
        if how == "static":
            self._costs.end_trial()
            self._costs.savings[self._how].append(max(share, 0.0))
            self.settled = True
        else:
            self._whole.lead += 1 if share > 0 else -1
        if share > 0:
            self._how = how
        self.candidate = None
        # Counted anew: what was spent so far has paid for this trial.
        self._spent = 0.0

    def settle_on_fastest(self) -> None:
        """Keep what took least of what was timed."""
        timed = [how for how in self.order if how not in self.refused and how in self.timings]
        self._how = min(timed, key=lambda how: self.timings[how].cost)
        self._whole.wanted = True
        self._whole.lead += (self._how == "ranges") - (self._how == "eager")
        self._tried.update(timed)
        self.candidate, self.settled = None, True

    def _measured(self) -> list[str]:
        parts = []
        costs = {how: each.cost for how, each in self.timings.items() if each.recent}
        if len(costs) > 1 or (costs and self.settled):
            parts.append(", ".join(f"{how} {1e3 * cost:.3g} ms" for how, cost in costs.items()))
        if self.candidate is not None:
            parts.append(f"timing {self.candidate} against it")
        elif not self.settled:
            waits = self._may("ranges") and "ranges" not in self._tried
            kind: How = "ranges" if self._how == "eager" and waits else "static"
            spent = self._whole.eager_seconds if kind == "ranges" else self._spent
            cost = self._costs.of(kind)
            parts.append(f"{spent:.2g} s so far, compiling {kind} takes about {cost:.2g} s")
        return parts
