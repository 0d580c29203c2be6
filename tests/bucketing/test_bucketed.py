"""bucketed(): what reaches the compiler is static; statistics, and warmup()."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from support.bucketed import LADDER, Counting, Net, double, in_time, wrap
from torchguard import Buckets, PaddingLeakError
from torchguard.errors import TorchGuardWarning


class TestWhatReachesTheCompiler:
    @pytest.mark.parametrize("already", [False, True], ids=["compile=", "compiled already"])
    @pytest.mark.parametrize("count", [1, 10])
    def test_is_one_static_graph_per_bucket(
        self, count: int, already: bool, backend: Counting
    ) -> None:
        """More than the recompile limit, which two wrappers of one function do not share."""
        buckets = Buckets(range(4, 4 * count + 1, 4))
        for turn in (1, 2):
            if already:
                wrapped = wrap(torch.compile(double, backend=backend), buckets=buckets)
            else:
                wrapped = wrap(double, buckets=buckets, compile={"backend": backend})
            for length in range(1, 4 * count + 1):
                x = torch.arange(length)
                assert torch.equal(wrapped(x), 2 * x)
            assert sorted(backend.graphs) == sorted(turn * [[(size,)] for size in buckets])
            assert backend.calls == turn * wrapped.stats().calls == turn * 4 * count
            assert wrapped.stats().graphs == count

    def test_is_static_behind_a_graph_break_in_every_mode(self, backend: Counting) -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        lengths = range(4, 41, 4)
        wrapped = wrap(lambda x: inner(x) + 1, buckets=lengths, compile={"backend": backend})
        for length in lengths:
            assert torch.equal(wrapped(torch.ones(length)), torch.full((length,), 5.0))
        calls = backend.calls
        assert calls >= 2 * len(lengths)
        with torch.no_grad():  # all buckets share the code of inner, and with it the limit of 8
            for length in lengths:
                wrapped(torch.ones(length))
        assert backend.calls == 2 * calls

    def test_never_runs_uncompiled_when_something_else_differs(self, backend: Counting) -> None:
        others: list[Any] = [*range(10), *(torch.ones(size) for size in range(2, 12))]

        def scale(x: torch.Tensor, other: Any) -> torch.Tensor:
            return x * (other if isinstance(other, int) else other.sum())

        wrapped = wrap(scale, compile={"backend": backend})
        x = torch.randn(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for other in others:
                torch.testing.assert_close(wrapped(x, other), scale(x, other))
        said = [str(each.message) for each in caught if each.filename == __file__]
        assert len(said) == 1
        assert "compiled 9 times for t: 3 -> 4 in x, because other differs" in said[0]
        assert backend.calls == len(backend.graphs) == wrapped.stats().graphs == 20

    @pytest.mark.parametrize(
        ("before", "compile_", "message"),
        [
            (None, {"dynamic": True}, "makes static sizes symbolic: leave it out"),
            ({"dynamic": True}, None, "dynamic=True, which makes static sizes symbolic"),
            ({}, True, "compiled already"),
        ],
    )
    def test_dynamic_compilation_and_compiling_twice_are_refused(
        self, before: Any, compile_: Any, message: str
    ) -> None:
        compiled = double if before is None else torch.compile(double, backend="eager", **before)
        with pytest.raises(ValueError, match=message):
            wrap(compiled, compile=compile_)

    def test_goes_through_torch_compile_as_it_is_when_a_bucket_compiles(
        self, backend: Counting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``install("verified")`` may come after the decorator."""
        wrapped = wrap(double, compile={"backend": backend})
        compile_, seen = torch.compile, []

        def replaced(function: Any, **options: Any) -> Any:
            seen.append(options)
            return compile_(function, **options)

        monkeypatch.setattr(torch, "compile", replaced)
        wrapped(torch.ones(3))
        assert seen == [{"backend": backend, "dynamic": False}]


class TestStatistics:
    def test_count_calls_waste_and_graphs(self, backend: Counting) -> None:
        wrapped = wrap(double, compile={"backend": backend})
        for length in (3, 4, 5, 3):
            wrapped(torch.ones(length))
        stats = wrapped.stats()
        assert (stats.calls, stats.hits, stats.graphs) == (4, {(4,): 3, (8,): 1}, 2)
        assert stats.waste == pytest.approx(20 / 15 - 1)
        assert stats.compile_seconds > 0
        assert stats.seen == {3: 2, 4: 1, 5: 1}
        assert Buckets.fit(stats.seen, 2).sizes == (3, 5)
        exported = json.loads(json.dumps(stats.as_dict()))
        assert exported["hits"] == {"4": 3, "8": 1}
        assert exported["seen"] == [[3, 2], [4, 1], [5, 1]]
        assert "4 calls, waste 33.3 %, 2 graphs" in str(stats)

    def test_warmup_compiles_every_bucket_and_changes_nothing(self, backend: Counting) -> None:
        net = Net()
        wrapped = in_time(net, buckets=LADDER, compile={"backend": backend})
        random_state = torch.get_rng_state()
        # A part of it has its strides, for which a graph would be compiled alone.
        wrapped.warmup(torch.ones(2, 10, 3))
        assert len(backend.graphs) == 3
        assert torch.equal(torch.get_rng_state(), random_state)
        assert float(net.steps) == 0
        assert all(p.grad is None for p in net.parameters())
        assert wrapped.stats().calls == 0
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in range(1, 17):
                wrapped(torch.ones(2, length, 3))
        assert len(backend.graphs) == 3

    def test_warmup_compiles_for_training_what_has_run_without_gradients(
        self, backend: Counting
    ) -> None:
        wrapped = wrap(nn.Linear(3, 3), compile={"backend": backend})
        with torch.no_grad():
            for length in LADDER:
                wrapped(torch.ones(length, 3))
        wrapped.warmup(torch.ones(2, 3))
        with torch.compiler.set_stance("fail_on_recompile"):
            for length in range(1, 17):
                wrapped(torch.ones(length, 3)).sum().backward()

    def test_without_buckets_they_are_powers_of_two_as_they_are_needed(
        self, backend: Counting
    ) -> None:
        wrapped = wrap(double, buckets=None, compile={"backend": backend})
        for length in (40, 100, 64, 3, 1, 70):
            x = torch.arange(length)
            assert torch.equal(wrapped(x), 2 * x)
        assert wrapped.stats().hits == {(1,): 1, (4,): 1, (64,): 2, (128,): 2}
        assert len(backend.graphs) == 4
        with pytest.raises(ValueError, match="no buckets are given for 't', and no call has made"):
            wrap(double, buckets=None).warmup(torch.ones(3))


class TestWhatIsProven:
    @staticmethod
    def counted(function: Any, **options: Any) -> tuple[Any, list[tuple[int, ...]]]:
        """Return a bucketed function, and the shape of each of its eager runs."""
        shapes: list[tuple[int, ...]] = []

        def noting(x: torch.Tensor) -> Any:
            shapes.append(tuple(x.shape))
            return function(x)

        options = {"buckets": [4, 8, 16], "compile": False, **options}
        return in_time(noting, **options), shapes

    @pytest.mark.parametrize("example", [3, 7, 16])
    def test_no_call_is_checked_after_it(self, example: int) -> None:
        wrapped, runs = self.counted(lambda x: x.cumsum(1))
        wrapped.warmup(torch.randn(2, example))
        assert wrapped.stats().proven == ((4,), (8,), (16,))
        assert "padding is proven for 4, 8, 16" in str(wrapped.stats())
        for length in range(2, 17):
            runs.clear()
            x = torch.randn(2, length)
            torch.testing.assert_close(wrapped(x), x.cumsum(1))
            assert len(runs) == 1, length

    def test_a_function_that_takes_no_short_input_is_proven_with_longer_ones(self) -> None:
        wrapped, runs = self.counted(
            lambda x: torch.nn.functional.conv1d(x[:, None], torch.ones(1, 1, 5)), buckets=[8, 32]
        )
        wrapped.warmup(torch.randn(2, 12))
        assert wrapped.stats().proven == ((8,), (32,))
        runs.clear()
        assert wrapped(torch.randn(2, 13)).shape == (2, 1, 9)
        assert len(runs) == 1

    def test_sizes_of_outputs_are_derived_where_nothing_is_checked(self) -> None:
        wrapped, runs = self.counted(lambda x: x[:, ::2], check_padding="never")
        wrapped.warmup(torch.randn(2, 5))
        runs.clear()
        assert wrapped(torch.randn(2, 7)).shape == (2, 4)
        assert len(runs) == 1
        assert wrapped.stats().proven == ()

    def test_an_error_is_raised_and_a_leak_is_a_warning_and_an_exact_fit_runs(self) -> None:
        fails = in_time(lambda x: x + torch.ones(2, 99), compile={"backend": "eager"})
        with pytest.raises(RuntimeError, match="99"):
            fails.warmup(torch.randn(2, 5))
        wrapped, _ = self.counted(lambda x: x.mean(1))
        with pytest.warns(TorchGuardWarning, match=r"padding changes .* Found by warmup\(\)"):
            wrapped.warmup(torch.randn(2, 5))
        x = torch.randn(2, 8)
        torch.testing.assert_close(wrapped(x), x.mean(1))
        with pytest.raises(PaddingLeakError):
            wrapped(torch.randn(2, 7))

    def test_a_mask_of_the_callers_is_cut_where_each_row_has_something_real(self) -> None:
        def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            # Where all is masked, each weight is 1 / length.
            return (torch.where(mask > 0, x, -1e9).softmax(1) * x).sum(1).mean()

        mask = torch.ones(2, 6)
        mask[1, :4] = 0
        dims = {"x": {1: "t"}, "mask": {1: "t"}}
        wrapped = in_time(attend, dims=dims, buckets=[8], mask="mask", compile=False)
        wrapped.warmup(torch.randn(2, 6), mask)
        assert wrapped.stats().proven == ((8,),)
