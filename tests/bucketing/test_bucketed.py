"""bucketed(): what reaches the compiler is static; the overflow, statistics and warm-up."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.bucketed import LADDER, Counting, Net, double, same
from torchguard import Buckets, bucketed, no_recompile


class TestWhatReachesTheCompiler:
    @pytest.mark.parametrize("count", [1, 20, 64])
    def test_is_one_static_graph_per_bucket(self, count: int, backend: Counting) -> None:
        buckets = Buckets.multiples_of(4, 4 * count)
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=buckets, compile={"backend": backend}
        )
        for length in range(1, 4 * count + 1):
            x = torch.arange(length)
            assert torch.equal(wrapped(x), 2 * x)
        assert sorted(backend.graphs) == [[(size,)] for size in buckets]
        assert backend.calls == wrapped.stats().calls == 4 * count
        assert wrapped.stats().graphs == count

    def test_would_be_symbolic_without_it(self) -> None:
        torch.compiler.reset()
        symbolic = []

        def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            symbolic.append(any(isinstance(value, torch.SymInt) for value in inputs))
            return graph.forward

        compiled = torch.compile(lambda x: x * 2, backend=note)
        for bucket in LADDER:
            compiled(torch.ones(bucket))
        assert any(symbolic)

    def test_is_static_around_what_is_compiled_already(self, backend: Counting) -> None:
        compiled = torch.compile(double, backend=backend)
        wrapped = bucketed(compiled, dims={"x": {0: "t"}}, buckets=Buckets.multiples_of(4, 80))
        for length in range(1, 81):
            wrapped(torch.ones(length))
        assert len(backend.graphs) == 20

    def test_two_wrappers_of_one_function_share_no_limit(self, backend: Counting) -> None:
        for _ in range(3):
            wrapped = bucketed(
                double,
                dims={"x": {0: "t"}},
                buckets=Buckets.multiples_of(4, 24),
                compile={"backend": backend},
            )
            for length in range(1, 25):
                wrapped(torch.ones(length))
        assert len(backend.graphs) == 18
        assert backend.calls == 72

    def test_is_static_behind_a_graph_break(self, backend: Counting) -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        def outer(x: torch.Tensor) -> torch.Tensor:
            return inner(x) + 1

        wrapped = bucketed(
            outer,
            dims={"x": {0: "t"}},
            buckets=Buckets.multiples_of(4, 48),
            compile={"backend": backend},
        )
        for length in range(1, 49):
            assert torch.equal(wrapped(torch.ones(length)), torch.full((length,), 5.0))
        calls = backend.calls
        wrapped(torch.ones(48))
        per_call = backend.calls - calls
        assert per_call >= 2
        assert calls == 48 * per_call

    def test_is_static_where_another_dim_changes(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {1: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        for batch in range(2, 14):  # more than the limit of 8
            wrapped(torch.ones(batch, 3))
        assert backend.calls == len(backend.graphs) == 12

    def test_is_static_behind_a_graph_break_in_another_mode_too(self, backend: Counting) -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        wrapped = bucketed(
            lambda x: inner(x) + 1,
            dims=({0: "t"},),
            buckets=Buckets.multiples_of(4, 48),
            compile={"backend": backend},
        )
        lengths = range(4, 49, 4)
        for length in lengths:
            wrapped(torch.ones(length))
        calls = backend.calls
        with torch.no_grad():  # all buckets share the code of inner, and with it the limit of 8
            for length in lengths:
                wrapped(torch.ones(length))
        assert backend.calls == 2 * calls

    @pytest.mark.parametrize(
        "others", [list(range(20)), [torch.ones(size + 2) for size in range(20)]]
    )
    def test_never_runs_uncompiled_when_something_else_differs(
        self, others: list[Any], backend: Counting
    ) -> None:
        def scale(x: torch.Tensor, other: Any) -> torch.Tensor:
            return x * (other if isinstance(other, int) else other.sum())

        wrapped = bucketed(
            scale, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        x = torch.randn(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for other in others:
                torch.testing.assert_close(wrapped(x, other), scale(x, other))
        said = [str(each.message) for each in caught if each.filename == __file__]
        assert len(said) == 1
        assert "compiled 9 times for t: 3 -> 4 in x, because other differs" in said[0]
        assert backend.calls == len(backend.graphs) == wrapped.stats().graphs == 20

    def test_dynamic_compilation_is_refused(self) -> None:
        with pytest.raises(ValueError, match="dynamic"):
            bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"dynamic": True})
        compiled = torch.compile(double, dynamic=True, backend="eager")
        with pytest.raises(ValueError, match="dynamic=True"):
            bucketed(compiled, dims={"x": {0: "t"}}, buckets=LADDER)

    def test_compiling_twice_is_refused(self) -> None:
        with pytest.raises(ValueError, match="compiled already"):
            bucketed(
                torch.compile(double, backend="eager"),
                dims={"x": {0: "t"}},
                buckets=LADDER,
                compile=True,
            )

    def test_goes_through_torch_compile_as_it_is_when_a_bucket_compiles(
        self, backend: Counting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``install("verified")`` may come after the decorator."""
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        compile_, seen = torch.compile, []

        def replaced(function: Any, **options: Any) -> Any:
            seen.append(options)
            return compile_(function, **options)

        monkeypatch.setattr(torch, "compile", replaced)
        wrapped(torch.ones(3))
        assert seen == [{"backend": backend, "dynamic": False}]

    def test_a_call_inside_a_compiled_function_breaks_its_graph(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )

        @torch.compile(backend="eager", dynamic=False)
        def outer(x: torch.Tensor) -> Any:
            return wrapped(x + 1) + 1

        assert torch.equal(outer(torch.ones(3)), torch.full((3,), 5.0))
        assert backend.graphs == [[(4,)]]


class TestOverflow:
    def test_is_an_error_that_names_axis_size_and_argument(self) -> None:
        wrapped = bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER)
        with pytest.raises(ValueError, match="axis 't' is 17 in x, but the largest bucket is 16"):
            wrapped(torch.ones(17))

    @pytest.mark.parametrize("overflow", ["eager", "grow", "dynamic"])
    def test_or_runs_all_the_same(self, overflow: Any) -> None:
        torch.compiler.reset()
        graphs = []

        def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        wrapped = bucketed(
            double,
            dims={"x": {0: "t"}},
            buckets=LADDER,
            overflow=overflow,
            compile={"backend": note},
        )
        for length in (17, 20, 31, 3):
            x = torch.arange(length)
            assert torch.equal(wrapped(x), 2 * x)
        assert len(graphs) == {"eager": 1, "grow": 2, "dynamic": 2}[overflow]
        stats = wrapped.stats()
        assert stats.overflowed == (0 if overflow == "grow" else 3)
        assert stats.hits == ({(4,): 1, (32,): 3} if overflow == "grow" else {(4,): 1})

    @pytest.mark.parametrize("overflow", ["eager", "grow", "dynamic"])
    def test_makes_the_masks_and_lengths_that_the_function_insists_on(self, overflow: Any) -> None:
        def total(x: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return (x * m).sum(1) / n

        wrapped = bucketed(
            total,
            dims={"x": {1: "t"}},
            buckets=LADDER,
            mask="m",
            lengths="n",
            overflow=overflow,
            compile={"backend": "eager"},
        )
        for length in (5, 20, 21):
            x = torch.randn(2, length)
            torch.testing.assert_close(wrapped(x), x.mean(1))


class TestStatistics:
    def test_count_calls_waste_and_graphs(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        for length in (3, 4, 5):
            wrapped(torch.ones(length))
        stats = wrapped.stats()
        assert (stats.calls, stats.hits, stats.graphs) == (3, {(4,): 2, (8,): 1}, 2)
        assert stats.waste == pytest.approx(16 / 12 - 1)
        assert stats.compile_seconds > 0
        exported = json.loads(json.dumps(stats.as_dict()))
        assert exported["hits"] == {"4": 2, "8": 1}
        assert "3 calls, waste 33.3 %, 2 graphs" in str(stats)

    def test_warmup_compiles_every_bucket_and_changes_nothing(self, backend: Counting) -> None:
        net = Net()
        wrapped: Any = bucketed(
            net, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        random_state = torch.get_rng_state()
        wrapped.warmup(torch.ones(2, 3))
        assert len(backend.graphs) == 3
        assert torch.equal(torch.get_rng_state(), random_state)
        assert float(net.steps) == 0
        assert all(p.grad is None for p in net.parameters())
        assert wrapped.stats().calls == 0
        with no_recompile():
            for length in range(1, 17):
                wrapped(torch.ones(length, 3))
        assert len(backend.graphs) == 3

    def test_warmup_compiles_for_training_what_has_run_without_gradients(
        self, backend: Counting
    ) -> None:
        linear = nn.Linear(3, 3)
        wrapped: Any = bucketed(
            linear, dims={"input": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        with torch.no_grad():
            for length in LADDER:
                wrapped(torch.ones(length, 3))
        wrapped.warmup(torch.ones(2, 3))
        with no_recompile():
            for length in range(1, 17):
                wrapped(torch.ones(length, 3)).sum().backward()

    @pytest.mark.parametrize("how", ["attribute", "partial", "list"])
    def test_warmup_leaves_buffers_wherever_the_module_is(self, how: str) -> None:
        norm = nn.BatchNorm1d(3)

        class Trainer:
            def __init__(self) -> None:
                self.model = norm

            @bucketed(dims={"x": {0: "b"}}, buckets=LADDER, compile={"backend": "eager"})
            def loss(self, x: torch.Tensor) -> Any:
                return self.model(x)

        options: dict[str, Any] = {"buckets": LADDER, "compile": {"backend": "eager"}}
        models = [norm]
        wrapped = {
            "attribute": Trainer().loss,
            "partial": bucketed(
                functools.partial(lambda m, x: 1 * m(x), norm), dims={"x": {0: "b"}}, **options
            ),
            "list": bucketed(lambda x: 1 * models[0](x), dims={"x": {0: "b"}}, **options),
        }[how]
        before = {name: value.clone() for name, value in norm.state_dict().items()}
        with pytest.warns(UserWarning, match="native_batch_norm.*a call with such padding will"):
            wrapped.warmup(x=torch.randn(3, 3))
        same(dict(norm.state_dict()), before)

    def test_what_was_seen_fits_buckets(self) -> None:
        wrapped = bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER)
        for length in (2, 3, 5, 5, 10):
            wrapped(torch.ones(length))
        stats = wrapped.stats()
        assert stats.seen == {2: 1, 3: 1, 5: 2, 10: 1}
        assert Buckets.fit(stats.seen, 2).sizes == (5, 10)
        assert json.loads(json.dumps(stats.as_dict()))["seen"] == [[2, 1], [3, 1], [5, 2], [10, 1]]

    def test_a_plan_is_saved_and_read(self, tmp_path: Path) -> None:
        wrapped = bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER, overflow="grow")
        wrapped(torch.ones(20))
        path = tmp_path / "plan.json"
        wrapped.save_plan(path)
        again = bucketed(double, dims={"x": {0: "t"}}, plan=path)
        again(torch.ones(20))
        assert again.stats().hits == {(32,): 1}
        with pytest.raises(ValueError, match="both given"):
            bucketed(double, dims={"x": {0: "t"}}, plan=path, buckets=LADDER)
        path.write_text("{}")
        with pytest.raises(ValueError, match="is not a buckets file"):
            bucketed(double, dims={"x": {0: "t"}}, plan=path)

    def test_auto_starts_coarse_fits_once_and_freezes(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets="auto", compile={"backend": backend}
        )
        generator = torch.Generator().manual_seed(0)

        def call() -> None:
            length = int(torch.randint(40, 100, (), generator=generator))
            wrapped(torch.ones(length))

        for _ in range(31):
            call()
        assert set(wrapped.stats().hits) == {(64,), (128,)}
        for _ in range(100):
            call()
        caller: Any = wrapped._caller
        frozen = caller.spec.ladders["t"].buckets
        assert len(frozen) > 2
        for _ in range(100):
            call()
        assert caller.spec.ladders["t"].buckets == frozen
        assert frozen.waste(wrapped.stats().seen) < 0.2
        assert Buckets([64, 128]).waste(range(40, 100)) > 0.4  # the ladder it began with
        assert len(backend.graphs) <= len(frozen) + 1
