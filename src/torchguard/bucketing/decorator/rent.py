"""Rent before you buy: when a bucket is worth compiling, and which graph is kept.

Running eager is the rent, compiling is the price. Whoever buys once the rent has reached the
price pays no more than twice what is best in hindsight, whatever comes: the "ski rental" rule.
https://en.wikipedia.org/wiki/Ski_rental_problem

Nothing here knows of torch: seconds come in, decisions come out.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["Choice", "How", "Prices", "Range"]

How: TypeAlias = Literal["eager", "ranges", "range", "static"]
"""``ranges``: one graph for all sizes of the ladder; ``range``: one for those of the bucket."""

_ENOUGH, _ENOUGH_WHERE_CLOSE = 8, 24
"""So many calls are timed in each of two ways before one is kept."""

_CLOSE = 0.1
_HOPELESS = 2.0
"""A way that takes so many times as long is given up after three calls."""

_PATIENCE = 32
"""So many calls of other buckets wait for what a trial finds, before they begin one, too."""

_COMPILED_OFTEN = 4
"""A trial that compiles anew more often than this is given up."""

# A static graph instead of a symbolic one: half is the most that was ever seen.
_ASSUMED_SHARE = 0.5
_WORTH_IT = 0.02


class Prices:
    """What compiling one function costs, and what it gains, measured on the buckets before.

    Args:
        assumed: seconds, as long as nothing was compiled.
    """

    def __init__(self, assumed: float) -> None:
        self._assumed = assumed
        self._paid: dict[str, list[float]] = {}
        self._gained: dict[str, list[float]] = {}
        self._waited: int | None = None

    def may_try(self) -> bool:
        """Whether no other bucket is trying a static graph, whose answer may hold for all."""
        if self._waited is not None and self._waited < _PATIENCE:
            self._waited += 1
            return False
        self._waited = 0
        return True

    def tries_no_more(self) -> None:
        """Note that a trial is over."""
        self._waited = None

    def of(self, how: How) -> float:
        """Return the seconds that compiling takes."""
        # What compiling in another way took is the best guess for one that was not tried yet.
        paid = self._paid.get(how) or [each for all_ in self._paid.values() for each in all_]
        return statistics.median(paid) if paid else self._assumed

    def note(self, how: How, seconds: float, *, more: bool) -> None:
        """Note what was paid; ``more`` for the backward of what was noted last."""
        paid = self._paid.setdefault(how, [])
        if more and paid:
            paid[-1] += seconds
        else:
            paid.append(seconds)

    def share(self, before: How, assumed: float) -> float:
        """Return which share of the time a static graph has saved where ``before`` ran."""
        gained = self._gained.get(before)
        return statistics.fmean(gained) if gained else assumed

    def gained(self, before: How, share: float) -> None:
        """Note what a static graph has saved, 0 where it was slower."""
        self._gained.setdefault(before, []).append(max(share, 0.0))

    def tried(self, before: How) -> int:
        """Return in how many buckets that was measured."""
        return len(self._gained.get(before, ()))


@dataclass
class Range:
    """Sizes that one graph is for, and what its buckets have to say about it."""

    key: Any
    rent: float = 0.0
    """Seconds that its buckets have run eager."""
    bought: bool = False
    won: int = 0
    lost: int = 0
    compiled_anew: int = 0
    refused: str = ""


class _Meter:
    """What calls took, run in one way."""

    def __init__(self) -> None:
        self.count = 0
        self._forward: deque[float] = deque(maxlen=2 * _ENOUGH_WHERE_CLOSE)
        self._backward: deque[float] = deque(maxlen=2 * _ENOUGH_WHERE_CLOSE)

    def add(self, seconds: float, *, backward: bool) -> None:
        (self._backward if backward else self._forward).append(seconds)
        self.count += not backward

    @property
    def recent(self) -> int:
        return len(self._forward)

    @property
    def cost(self) -> float:
        """Seconds of a call, its backward included."""
        # The median: now and then a call waits for something that is none of its own.
        return sum(statistics.median(each) for each in (self._forward, self._backward) if each)

    def forget_old(self) -> None:
        for times in (self._forward, self._backward):
            # Some are kept: this way was timed under the same load, and need not begin at nothing.
            while len(times) > _ENOUGH // 2:
                times.popleft()


@dataclass
class Choice:
    """What runs one bucket, and why."""

    buckets: tuple[int, ...]
    order: tuple[How, ...]
    """What may run it; the first, unless calls are to decide."""
    how: How
    settled: bool = True
    why: str = ""
    ranges: dict[str, Range] = field(default_factory=dict)
    prices: Prices | None = None
    """Where calls decide."""
    refused: dict[str, str] = field(default_factory=dict)
    candidate: How | None = None
    """What is timed against :attr:`how`."""
    _meters: dict[str, _Meter] = field(default_factory=dict)
    _tried: set[str] = field(default_factory=set)
    _spent: float = 0.0
    """Seconds since nothing was decided."""
    _compiled: int = 0

    @classmethod
    def by_rent(cls, buckets: tuple[int, ...], whole: Range, prices: Prices) -> Choice:
        """Begin eager, and compile when it pays."""
        order: tuple[How, ...] = ("ranges", "static", "eager")
        return cls(buckets, order, "eager", False, "", {"ranges": whole}, prices)

    # ---- what runs a call ----

    def now(self) -> How:
        """Return what runs it, where no trial is on."""
        if self.prices is None:  # another bucket may have found that its graph can't be had
            self.how = next((each for each in self.order if self._may(each)), "eager")
        return self.how

    def turn(self, *, may_compile: bool = True) -> How:
        """Return what runs the next call."""
        if self.settled or not may_compile:
            return self.now()
        if self.candidate is None:
            self._consider()
        if self.candidate is None:
            return self.how
        # By turns, so that both meet the same data and the same load.
        ahead = self._meter(self.candidate).recent > self._meter(self.how).recent
        return self.how if ahead else self.candidate

    def took(
        self, how: How, seconds: float, *, compiled: bool, backward: bool = False,
        warmed: bool = False,
    ) -> None:  # fmt: skip
        """Note what a call took.

        Args:
            how: what ran it.
            seconds: of its forward.
            compiled: whether it compiled first.
            backward: whether the seconds are of its backward.
            warmed: whether it was none of the caller's.
        """
        assert self.prices is not None
        if compiled:
            self.prices.note(how, seconds, more=backward)
            self._compiled += not backward
            return
        self._meter(how).add(seconds, backward=backward)
        if warmed:
            return
        if how == self.how:
            self._spent += seconds
        whole = self.ranges["ranges"]
        if how == "eager" and not whole.bought:
            whole.rent += seconds

    def refuse(self, how: How, reason: str) -> None:
        """Never run it in this way again."""
        self.refused[how] = reason
        if how in self.ranges:
            self.ranges[how].refused = reason
        if self.candidate == how:
            self.candidate = None
            if self.prices is not None:
                self.prices.tries_no_more()
        if self.how == how:
            self.how = "eager"
            self.settled = self.prices is None
        self.now()

    def instead_of(self, refused: Collection[str]) -> How | None:
        """Return what runs a call that could not be run in these ways, None if nothing does."""
        if self.prices is not None and self.how not in refused:
            return self.how
        if self.prices is not None:
            return None if "eager" in refused else "eager"
        return next((each for each in self.order if self._may(each) and each not in refused), None)

    # ---- what is decided ----

    def _may(self, how: How) -> bool:
        range_ = self.ranges.get(how)
        return how not in self.refused and not (range_ is not None and range_.refused)

    def _meter(self, how: How) -> _Meter:
        return self._meters.setdefault(how, _Meter())

    def _consider(self) -> None:
        """Compile if what compiling would have saved so far has reached what it costs."""
        assert self.prices is not None
        whole = self.ranges["ranges"]
        if self._may("ranges") and "ranges" not in self._tried and self.how == "eager":
            calls = self._meter("eager").count
            if whole.bought and whole.won > whole.lost and calls < _ENOUGH:
                self.how = "ranges"  # the graph is there, and faster in other buckets
                self._tried.add("ranges")
                self._spent = 0.0
            # At the most it would have saved all of the time. Never for a size that comes once.
            elif calls and (whole.bought or whole.rent >= self.prices.of("ranges")):
                whole.bought = True
                self._try("ranges")
            return
        if not self._may("static") or "static" in self._tried:
            self.settled = True
            return
        # Ranges that are slower than eager leave little hope for padding.
        assumed = 1.0 if self.how == "eager" and "ranges" not in self._tried else _ASSUMED_SHARE
        share = self.prices.share(self.how, assumed)
        if share < _WORTH_IT and self.prices.tried(self.how) > 1:
            self.why = "static graphs of other buckets were not faster"
            self.settled = True
            return
        saved = share * self._spent
        came_before = self._meter(self.how).count > 0
        if came_before and saved >= self.prices.of("static") and self.prices.may_try():
            self._try("static")

    def _try(self, how: How) -> None:
        self.candidate = how
        self._compiled = 0
        self._tried.add(how)
        for meter in self._meters.values():
            meter.forget_old()

    def judge(self) -> None:
        """Keep the faster way, once enough calls were timed."""
        how = self.candidate
        if how is None or self.settled:
            return
        new, old = self._meter(how), self._meter(self.how)
        if self._compiled > _COMPILED_OFTEN:
            self.refuse(how, f"it was compiled {self._compiled} times in {new.count} calls")
            return
        fewest = min(new.recent, old.recent)
        hopeless = new.recent > 2 and old.recent and new.cost > _HOPELESS * old.cost  # noqa: PLR2004
        if fewest < _ENOUGH and not hopeless:
            return
        share = 1 - new.cost / old.cost
        if fewest < _ENOUGH_WHERE_CLOSE and abs(share) < _CLOSE:
            return
        self._decide(how, share)

    def _decide(self, how: How, share: float) -> None:
        assert self.prices is not None
        if how == "static":
            self.prices.tries_no_more()
            self.prices.gained(self.how, share)
            self.settled = True
        elif share > 0:
            self.ranges[how].won += 1
        else:
            self.ranges[how].lost += 1
        if share > 0:
            self.how = how
        self.candidate = None
        # The rent begins anew: what was paid so far has bought this trial.
        self._spent = 0.0

    def settle_on_fastest(self) -> None:
        """Keep what took least of what was timed."""
        timed = [how for how in self.order if how not in self.refused and how in self._meters]
        self.how = min(timed, key=lambda how: self._meters[how].cost)
        for range_ in self.ranges.values():
            range_.bought = True
            range_.won += self.how == "ranges"
            range_.lost += self.how == "eager"
        self._tried.update(timed)
        self.candidate, self.settled = None, True

    def described(self) -> str:
        """Return what runs it, and why."""
        said = [f"{how} refused: {reason}" for how, reason in self._refusals().items()]
        if self.why:
            said.insert(0, self.why)
        costs = {how: each.cost for how, each in self._meters.items() if each.recent}
        if self.prices is not None and not self.settled and self.candidate is None:
            waits = self._may("ranges") and "ranges" not in self._tried
            kind: How = "ranges" if self.how == "eager" and waits else "static"
            rent = self.ranges["ranges"].rent if kind == "ranges" else self._spent
            price = self.prices.of(kind)
            said.insert(0, f"{rent:.2g} s so far, compiling {kind} takes about {price:.2g} s")
        elif self.candidate is not None:
            said.insert(0, f"timing {self.candidate} against it")
        if len(costs) > 1 or (costs and self.settled):
            said.insert(0, ", ".join(f"{how} {1e3 * cost:.3g} ms" for how, cost in costs.items()))
        if self.how in self.ranges:
            bounds = self.ranges[self.how].key.bounds
            shown = ", ".join(f"{axis} from {low} to {high or 'any'}" for axis, low, high in bounds)
            said.insert(0, f"one graph for {shown}" if shown else "a graph of this size alone")
        return f"{self.how} ({'; '.join(said)})" if said else self.how

    def _refusals(self) -> dict[str, str]:
        shared = {how: each.refused for how, each in self.ranges.items() if each.refused}
        return {**shared, **self.refused}
