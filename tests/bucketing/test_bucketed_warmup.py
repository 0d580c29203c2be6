"""warmup(): the largest first, what does not fit is left out, and what is measured is a cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchguard import Buckets, WarmupReport, bucketed, no_recompile
from torchguard.errors import RecompileError

EAGER: Any = {"compile": {"backend": "eager"}}


class TestWhatDoesNotFit:
    @staticmethod
    def hungry(x: torch.Tensor, most: int) -> torch.Tensor:
        """A function for which the allocator has no memory from some size on."""
        room = torch.empty((1 if x.shape[1] <= most else 1 << 48, 1))
        return x * 2 + 0 * room.shape[1]

    def test_is_left_out_with_one_warning(self) -> None:
        """The others are compiled, and their calls compile nothing."""
        wrapped = bucketed(
            self.hungry, dims={"x": {1: "t"}}, buckets=[4, 8, 16, 32],
            check_padding="never", outputs={1: "t"}, **EAGER,
        )  # fmt: skip
        with pytest.warns(UserWarning, match=r"left out 2 of 4 buckets.*t = 32; t = 16 \(") as seen:
            report = wrapped.warmup(torch.ones(2, 5), 8)
        assert len(seen) == 1
        assert list(report.left_out) == [(32,), (16,)]
        assert sorted(report.seconds) == [(4,), (8,)]
        with no_recompile():
            assert wrapped(torch.ones(2, 7), 8).shape == (2, 7)
        with pytest.raises(RuntimeError, match="allocate"):
            wrapped(torch.ones(2, 20), 8)

    def test_nothing_that_fits_is_the_error_itself(self) -> None:
        wrapped = bucketed(self.hungry, dims={"x": {1: "t"}}, buckets=[4, 8], **EAGER)
        with pytest.raises(RuntimeError, match="allocate"):
            wrapped.warmup(torch.ones(2, 5), 1)

    def test_another_error_is_none_of_memory(self) -> None:
        def wrong(x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(3, 3)

        wrapped = bucketed(wrong, dims={"x": {1: "t"}}, buckets=[4, 8], **EAGER)
        with pytest.raises(Exception, match=r"mat1 and mat2|size"):
            wrapped.warmup(torch.ones(2, 3))


class TestWhatIsMeasured:
    def test_is_what_each_bucket_takes(self) -> None:
        sizes = []

        def function(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def backend(graph: Any, inputs: Any) -> Any:
            def run(*given: Any) -> Any:
                sizes.append(given[0].shape[1])
                return graph.forward(*given)

            return run

        wrapped = bucketed(
            function, dims={"x": {1: "t"}}, buckets=[4, 8], compile={"backend": backend}
        )
        report = wrapped.warmup(torch.ones(2, 5))
        assert sizes == [8, 8, 8, 4, 4, 4]  # the largest first: once to compile, twice timed
        assert all(seconds > 0 for seconds in report.seconds.values())
        assert 0 < report.compile_seconds <= wrapped.stats().compile_seconds
        assert wrapped.stats().calls == 0
        assert Buckets.fit([3, 5, 7], 2, cost=report).sizes[-1] >= 7
        again = wrapped.warmup(torch.ones(2, 5))  # compiled already: only timed
        assert len(sizes) == 10
        assert again.seconds.keys() == report.seconds.keys()

    def test_gradients_and_random_numbers_stay_as_they_are(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout())
        wrapped = bucketed(
            model, dims={"input": {0: "t"}}, buckets=[4, 8], check_padding="never", **EAGER
        )
        state = torch.get_rng_state()
        wrapped.warmup(torch.ones(2, 3))
        assert torch.equal(torch.get_rng_state(), state)
        assert all(each.grad is None for each in model.parameters())

    def test_pairs_are_measured_too(self) -> None:
        pairs = Buckets.fit_pairs([(8, 2), (2, 8)], 2)
        wrapped = bucketed(lambda x: x * 2, dims={"x": {0: "b", 1: "t"}}, buckets=pairs, **EAGER)
        report = wrapped.warmup(torch.ones(2, 2))
        assert sorted(report.seconds) == [(2, 8), (8, 2)]
        assert len(Buckets.fit_pairs([(8, 2), (2, 8)], 2, cost=report)) == 2

    @given(
        seconds=st.dictionaries(st.integers(1, 50), st.floats(0.01, 9), min_size=1, max_size=5),
        size=st.integers(1, 80),
    )
    def test_is_a_positive_cost_and_that_of_a_bucket_there(
        self, seconds: dict[int, float], size: int
    ) -> None:
        report = WarmupReport(("t",), {(n,): each for n, each in seconds.items()}, 1.0, {})
        assert report(size) > 0
        for bucket, each in seconds.items():
            assert report(bucket) == pytest.approx(each)
        assert Buckets.fit([size, 80], 2, cost=report).sizes[-1] >= 80

    @given(
        seconds=st.dictionaries(
            st.tuples(st.integers(1, 9), st.integers(1, 9)), st.floats(0.01, 9), min_size=1
        ),
        a=st.integers(1, 12),
        b=st.integers(1, 12),
    )
    def test_of_two_sizes_never_falls(
        self, seconds: dict[tuple[int, int], float], a: int, b: int
    ) -> None:
        report = WarmupReport(("b", "t"), seconds, 1.0, {})
        assert 0 < report(a, b) <= report(a + 1, b) * (1 + 1e-12)
        assert report(a, b) <= report(a, b + 1) * (1 + 1e-12)

    def test_two_points_make_a_line(self) -> None:
        report = WarmupReport(("t",), {(10,): 2.0, (20,): 3.0}, 1.0, {})
        assert [report(n) for n in (5, 10, 15, 20, 30)] == pytest.approx([1.5, 2, 2.5, 3, 4.5])

    def test_nothing_measured_is_no_cost(self) -> None:
        with pytest.raises(ValueError, match="timed in 0 buckets"):
            WarmupReport(("t",), {}, 0.0, {})(8)
        with pytest.raises(ValueError, match=r"says nothing of \(8,\)"):
            WarmupReport(("b", "t"), {(2, 8): 1.0}, 0.0, {})(8)


def test_no_recompile_quotes_the_guard_alone() -> None:
    """Not the line of source behind it, nor its stack; torch 2.6 does not say which guard."""

    def function(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * 2 * scale

    wrapped = bucketed(function, dims={"x": {1: "t"}}, buckets=[8], **EAGER)
    wrapped.warmup(torch.ones(2, 5), 1.0)
    with no_recompile(), pytest.raises(RecompileError, match=r"again(, because scale == 1.0)?$"):
        wrapped(torch.ones(2, 5), 2.0)
    with no_recompile(), pytest.raises(RecompileError, match=r"x is \(3, 8\) after padding"):
        wrapped(torch.ones(3, 5), 1.0)
    with (
        no_recompile(),
        pytest.raises(RecompileError, match=r"again(, because tensor .x. dtype.*)?$"),
    ):
        wrapped(torch.ones(2, 5, dtype=torch.float64), 1.0)
