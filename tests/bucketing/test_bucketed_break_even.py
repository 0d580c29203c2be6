"""When compiling breaks even: what engine="auto" decides, on a clock of its own."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

break_even = importlib.import_module("torchguard.bucketing.decorator.break_even")


class Function:
    """A function that takes known seconds: one choice for each bucket, and a clock."""

    def __init__(self, costs: dict[int, dict[str, float]], compiling: dict[str, float]) -> None:
        self.costs, self.compiling = costs, compiling
        self.compile_costs = break_even.CompileCosts(compiling["ranges"])
        self.whole = break_even.SharedGraph(None)
        self.choices = {
            bucket: break_even.AutoChoice((bucket,), self.whole, self.compile_costs)
            for bucket in costs
        }
        self.compiled: set[Any] = set()
        self.seconds = 0.0
        self.how: list[tuple[int, str]] = []

    def call(self, bucket: int) -> str:
        choice = self.choices[bucket]
        how: str = choice.next()
        graph = {"static": ("static", bucket), "ranges": "ranges"}.get(how)
        first = graph is not None and graph not in self.compiled
        self.compiled.add(graph)
        seconds = self.costs[bucket][how] + (self.compiling[how] if first else 0)
        self.seconds += seconds
        if not choice.settled:
            choice.add(how, seconds, compiled=first)
            choice.judge()
        self.how.append((bucket, how))
        return how

    def best(self) -> float:
        """Return the seconds of the best in hindsight: each bucket may take what is best for it."""
        counts = Counter(bucket for bucket, _ in self.how)
        found = []
        for ranges in (False, True):
            total = self.compiling["ranges"] if ranges else 0.0
            for bucket, count in counts.items():
                costs = self.costs[bucket]
                ways = [count * costs["eager"], self.compiling["static"] + count * costs["static"]]
                total += min([*ways, count * costs["ranges"]] if ranges else ways)
            found.append(total)
        return min(found)


def _stream() -> st.SearchStrategy[Any]:
    eager = st.floats(0.01, 1.0)
    bucket = st.builds(
        lambda e, r, s: {"eager": e, "ranges": e * r, "static": e * r * s},
        eager,
        st.floats(0.05, 1.5),
        st.floats(0.5, 1.5),
    )
    buckets = st.lists(bucket, min_size=1, max_size=4)
    compiling = st.fixed_dictionaries({"ranges": st.floats(1, 20), "static": st.floats(1, 20)})
    weights = st.lists(st.integers(1, 9), min_size=4, max_size=4)
    return st.tuples(buckets, compiling, weights, st.integers(0, 1 << 30), st.integers(1, 1500))


class TestBreakEven:
    @given(_stream())
    @settings(max_examples=150, deadline=None)
    def test_costs_at_most_twice_the_best_in_hindsight(self, stream: Any) -> None:
        """For any costs, if a static graph is at most twice as fast as a symbolic one."""
        costs, compiling, weights, seed, calls = stream
        function = Function(dict(enumerate(costs)), compiling)
        numbers = random.Random(seed)  # noqa: S311
        order = numbers.choices(range(len(costs)), weights[: len(costs)], k=calls)
        dearest = max(max(each.values()) for each in costs)
        one_compile = max(compiling.values())
        for bucket in order:
            function.call(bucket)
            # Of each bucket a few calls are timed in each way before one is kept.
            trials = 2 * break_even._ENOUGH_WHERE_CLOSE * dearest
            known = 2 * function.best() + one_compile + len(costs) * trials
            assert function.seconds <= known

    def test_never_compiles_a_size_that_comes_once(self) -> None:
        costs = {bucket: {"eager": 9.0, "ranges": 1.0, "static": 1.0} for bucket in range(50)}
        function = Function(costs, {"ranges": 10.0, "static": 10.0})
        assert {function.call(bucket) for bucket in range(50)} == {"eager"}

    def test_compiles_once_eager_has_cost_what_compiling_does(self) -> None:
        function = Function(
            {0: {"eager": 1.0, "ranges": 0.5, "static": 0.5}}, {"ranges": 10.0, "static": 10.0}
        )
        hows = [function.call(0) for _ in range(12)]
        assert hows[:10] == ["eager"] * 10
        assert hows[10] == "ranges"

    @pytest.mark.parametrize("fastest", ["eager", "ranges", "static"])
    def test_keeps_the_fastest(self, fastest: str) -> None:
        costs = {"eager": 1.0, "ranges": 0.95, "static": 0.9, fastest: 0.5}
        function = Function({0: costs}, {"ranges": 10.0, "static": 10.0})
        hows = [function.call(0) for _ in range(400)]
        assert hows[-1] == fastest
        assert function.choices[0].settled

    def test_stops_compiling_static_graphs_that_save_nothing(self) -> None:
        costs = {bucket: {"eager": 1.0, "ranges": 0.5, "static": 0.6} for bucket in range(8)}
        function = Function(costs, {"ranges": 5.0, "static": 5.0})
        for turn in range(4000):
            function.call(turn % 8)
        static = {graph for graph in function.compiled if graph and graph[0] == "static"}
        assert len(static) <= 3
        assert {how for _, how in function.how[-8:]} == {"ranges"}

    def test_takes_the_graph_that_is_there_for_a_new_bucket(self) -> None:
        costs = {bucket: {"eager": 1.0, "ranges": 0.5, "static": 0.6} for bucket in range(2)}
        function = Function(costs, {"ranges": 5.0, "static": 50.0})
        for _ in range(40):
            function.call(0)
        assert function.call(1) == "ranges"
