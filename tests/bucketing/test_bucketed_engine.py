"""bucketed(engine=): what runs a bucket, that the answer is the same, and when auto compiles."""

from __future__ import annotations

import copy
import importlib
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from support.child_process import output_of
from torchguard import Buckets, PaddingLeakError, RecompileError, bucketed, no_recompile

break_even = importlib.import_module("torchguard.bucketing.decorator.break_even")
engine = importlib.import_module("torchguard.bucketing.decorator.engine")
_torch = importlib.import_module("torchguard._torch")

LADDER = Buckets([4, 8, 16])
SIZES = (3, 5, 1, 16, 2, 9, 3, 8, 4, 12)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def by_name(backend: Any = "eager", **options: Any) -> dict[str, Any]:
    return {
        "dims": {"x": {0: "t"}},
        "buckets": LADDER,
        "engine": "ranges",
        "compile": {"backend": backend},
        **options,
    }


def what_runs(wrapped: Any) -> dict[int, str]:
    """Return by bucket the first word of what runs it."""
    return {sizes[0]: text.split()[0] for sizes, text in wrapped.stats().engines.items()}


def wrong_in_four_threads(wrapped: Any, calls: int) -> list[torch.Tensor]:
    """Double tensors of 1 to 16 elements; return those that came out wrong, or kept a mark."""
    wrong = []

    def work(seed: int) -> None:
        numbers = random.Random(seed)  # noqa: S311
        for _ in range(calls):
            x = torch.ones(numbers.randint(1, 16))
            if not torch.equal(wrapped(x), 2 * x) or vars(x):
                wrong.append(x)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


class TestRanges:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_compile_one_graph_for_the_ladder_and_one_for_size_1(self, backend: str) -> None:
        wrapped = bucketed(lambda x: (2 * x).cumsum(0), **by_name(backend))
        for size in SIZES:
            x = torch.randn(size, 3)
            torch.testing.assert_close(wrapped(x), (2 * x).cumsum(0))
        stats = wrapped.stats()
        assert (stats.graphs, stats.waste, stats.calls) == (2, 0.0, len(SIZES))
        assert stats.hits == {(4,): 5, (8,): 2, (16,): 3}
        assert what_runs(wrapped) == dict.fromkeys(LADDER, "ranges")

    def test_hand_the_function_the_tensor_itself_and_leave_no_mark_on_it(self) -> None:
        seen = []
        wrapped = bucketed(lambda x: x * 2, **by_name(backend=lambda graph, _: graph.forward))
        for size in SIZES:
            x = torch.randn(size, 3)
            before = dict(vars(x))
            wrapped(x)
            assert vars(x) == before
            seen.append(x)
        x = torch.randn(6, 3)
        torch._dynamo.mark_dynamic(x, 1, min=2, max=9)
        before = copy.deepcopy(vars(x))
        bucketed(lambda x: x * 3, **by_name())(x)
        assert vars(x) == before

    def test_take_marks_off_where_compiling_fails(self) -> None:
        wrapped = bucketed(lambda x: x.view(-1, 4) * 2, **by_name())
        x = torch.randn(8)
        wrapped(x)
        assert not vars(x)

    def test_leave_gradients_as_they_are(self) -> None:
        weight = torch.randn(3, 3, requires_grad=True)
        wrapped = bucketed(lambda x: torch.tanh(x @ weight).sum(), **by_name("aot_eager"))
        for size in SIZES:
            x = torch.randn(size, 3, requires_grad=True)
            found = torch.autograd.grad(wrapped(x), [x, weight])
            expected = torch.autograd.grad(torch.tanh(x @ weight).sum(), [x, weight])
            torch.testing.assert_close(found, expected)
        assert wrapped.stats().graphs == 2

    def test_take_two_inputs_and_two_axes_that_may_be_equally_long(self) -> None:
        def function(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x * mask).sum(0) + y.sum(0)

        dims = {"x": {0: "t"}, "mask": {0: "t"}, "y": {0: "s"}}
        wrapped = bucketed(function, **by_name(dims=dims))
        for t, s in [(4, 4), (4, 7), (9, 3), (5, 5), (16, 2), (2, 16)]:
            given_ = torch.randn(t, 3), torch.randn(t, 1), torch.randn(s, 3)
            torch.testing.assert_close(wrapped(*given_), function(*given_))
        assert wrapped.stats().graphs == 1

    def test_take_inputs_inside_of_containers_and_keywords(self) -> None:
        def function(batch: dict[str, torch.Tensor], *, scale: float = 1.0) -> Any:
            return {"out": batch["x"] * scale, "rest": batch["y"]}

        wrapped = bucketed(function, **by_name(dims={"batch": {"x": {1: "t"}}}))
        for size in SIZES:
            batch = {"x": torch.randn(2, size), "y": torch.randn(2)}
            found = wrapped(batch, scale=2.0)
            assert torch.equal(found["out"], 2 * batch["x"])
            assert torch.equal(found["rest"], batch["y"])
        assert wrapped.stats().graphs == 2

    def test_of_a_module_share_its_parameters_and_modes(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        wrapped = bucketed(model, **by_name("aot_eager", dims={"input": {0: "t"}}))
        wrapped.eval()
        for size in SIZES:
            x = torch.randn(size, 3)
            torch.testing.assert_close(wrapped(x), model(x))
        wrapped.train()
        wrapped(torch.ones(5, 3)).sum().backward()
        assert model[0].weight.grad is not None

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_make_masks_and_lengths_of_the_real_size(self, side: str) -> None:
        def function(x: torch.Tensor, mask: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
            assert mask.shape == (2, x.shape[1])
            return (x * mask).sum(1) / length

        wrapped = bucketed(
            function,
            **by_name(dims={"x": {1: "t"}}, mask="mask", lengths="length", side=side),
        )
        for size in SIZES:
            x = torch.randn(2, size)
            torch.testing.assert_close(wrapped(x), x.sum(1) / size)
        assert wrapped.stats().graphs == 2

    def test_leave_out_a_mask_that_the_function_can_do_without(self) -> None:
        given_ = []

        def function(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            given_.append(mask)
            return x * 2

        options = by_name(dims={"x": {0: "t"}}, mask="mask", compile=None)
        bucketed(function, **options)(torch.ones(5))
        assert given_ == [None]

    def test_keep_what_varies_behind_a_graph_break_from_a_graph_per_size(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        wrapped = bucketed(function, **by_name(buckets=Buckets([64])))
        for size in range(2, 65):
            assert torch.equal(wrapped(torch.ones(size)), torch.full((size,), 4.0))
        assert wrapped.stats().graphs < 6

    def test_are_given_up_where_each_size_is_compiled_anew(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        # The caller's own compiler makes nothing dynamic by itself.
        compiled = torch.compile(function, backend="eager", dynamic=False)
        options = by_name(buckets=Buckets([64]))
        wrapped = bucketed(compiled, **{**options, "compile": None})
        for size in range(2, 65):
            assert torch.equal(wrapped(torch.ones(size)), torch.full((size,), 4.0))
        assert what_runs(wrapped) == {64: "static"}
        assert "compiled anew 9 times" in wrapped.stats().engines[64,]
        assert wrapped.stats().graphs < 30

    def test_above_the_ladder_are_what_overflow_says(self) -> None:
        with pytest.raises(ValueError, match="the largest bucket is 16"):
            bucketed(lambda x: x * 2, **by_name())(torch.ones(17))
        wrapped = bucketed(lambda x: x * 2, **by_name(overflow="grow"))
        for size in (5, 17, 40):
            assert wrapped(torch.ones(size)).shape == (size,)
        assert wrapped.stats().graphs == 1
        wrapped = bucketed(lambda x: x * 2, **by_name(overflow="dynamic"))
        assert wrapped(torch.ones(40)).shape == (40,)

    def test_of_automatic_buckets_are_one_graph_without_an_end(self) -> None:
        wrapped = bucketed(lambda x: x * 2, **by_name(buckets="auto"))
        for size in range(2, 100):
            assert wrapped(torch.ones(size)).shape == (size,)
        assert wrapped.stats().graphs == 1

    def test_of_two_axes_with_buckets_together(self) -> None:
        pairs = Buckets.fit_pairs([(2, 5), (4, 8), (3, 16)], 3)
        wrapped = bucketed(
            lambda x: x * 2, **by_name(dims={"x": {0: "b", 1: "t"}}, buckets={("b", "t"): pairs})
        )
        for size in ((2, 5), (3, 7), (4, 8), (3, 16), (2, 2)):
            assert torch.equal(wrapped(torch.ones(size)), torch.full(size, 2.0))
        assert (wrapped.stats().graphs, wrapped.stats().waste) == (1, 0.0)

    def test_are_warm_after_warmup(self) -> None:
        wrapped = bucketed(lambda x: (x * x).sum(), **by_name("aot_eager"))
        wrapped.warmup(torch.ones(5, requires_grad=True))
        assert wrapped.stats().graphs == 2
        with no_recompile():
            for size in range(1, 17):
                wrapped(torch.ones(size, requires_grad=True)).backward()
            with pytest.raises(RecompileError):
                wrapped(torch.ones(5, dtype=torch.float64))

    def test_refuse_to_compile_in_no_recompile_and_name_the_size(self) -> None:
        wrapped = bucketed(lambda x: x * 2, **by_name())
        with no_recompile(), pytest.raises(RecompileError, match="t: 5 in x"):
            wrapped(torch.ones(5))

    def test_check_no_padding_and_verify_still_does(self) -> None:
        wrapped = bucketed(lambda x: x.mean(), **by_name())
        x = torch.randn(5)
        torch.testing.assert_close(wrapped(x), x.mean())
        with pytest.raises(PaddingLeakError):
            wrapped.verify(x)

    def test_run_eager_where_nothing_compiles_and_say_so(self) -> None:
        wrapped = bucketed(lambda x: x.mean(), **by_name(compile=None))
        assert float(wrapped(torch.ones(5))) == 1.0
        assert "pass compile=True" in str(wrapped.stats())

    def test_let_errors_of_the_function_through_and_go_on(self) -> None:
        def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return x[index]

        wrapped = bucketed(function, **by_name())
        with pytest.raises(IndexError):
            wrapped(torch.ones(5), torch.tensor(9))
        bad = bucketed(lambda x: x @ torch.ones(3, 2), **by_name())
        with pytest.raises(RuntimeError):
            bad(torch.ones(5, 4))
        assert bad(torch.ones(5, 3)).shape == (5, 2)
        assert what_runs(bad) == {8: "ranges"}

    def test_run_in_threads(self) -> None:
        wrapped = bucketed(lambda x: x * 2, **by_name())
        assert wrong_in_four_threads(wrapped, calls=50) == []


class TestFallback:
    """A size that can't be a symbol never reaches the user as an error."""

    @pytest.mark.parametrize(
        ("function", "runs"),
        [
            (lambda x: x + 1 if x.shape[0] > 8 else x * 2, "range"),
            (lambda x: x.flip(0) * 2 + x.shape[0] // 3, "ranges"),
        ],
        ids=["branch", "arithmetic"],
    )
    @pytest.mark.parametrize("kind", ["ranges", "auto"])
    def test_is_a_narrower_range(
        self, function: Callable[..., Any], runs: str, kind: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        wrapped = bucketed(function, **by_name(engine=kind))
        for _ in range(2):
            for size in range(2, 17):
                x = torch.randn(size)
                assert torch.equal(wrapped(x), function(x))
        if kind == "ranges":
            assert what_runs(wrapped) == dict.fromkeys(LADDER, runs)
        assert not caplog.records

    def test_is_a_static_graph(self) -> None:
        wrapped = bucketed(lambda x: x.view(-1, 4) * 2, **by_name())
        for size in (4, 8, 12, 16):
            x = torch.randn(size)
            assert torch.equal(wrapped(x), x.view(-1, 4) * 2)
        assert what_runs(wrapped) == dict.fromkeys(LADDER, "static")
        assert "a graph would hold only where" in wrapped.stats().engines[8,]

    def test_is_eager_where_padding_would_leak(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return x.softmax(0) * {5: 2.0, 7: 3.0}.get(int(x.shape[0]), 1.0)

        wrapped = bucketed(function, **by_name())
        for size in (5, 6, 7, 8):
            x = torch.randn(size)
            torch.testing.assert_close(wrapped(x), function(x))
        assert what_runs(wrapped) == {8: "eager"}
        assert "padding changes the answer" in wrapped.stats().engines[8,]

    def test_is_static_where_a_backend_takes_no_symbols(self) -> None:
        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            if any(isinstance(each, torch.SymInt) for each in inputs):
                raise NotImplementedError("symbols")
            return graph.forward

        wrapped = bucketed(lambda x: x * x.shape[0] / x.shape[0], **by_name(backend=backend))
        for size in SIZES:
            torch.testing.assert_close(wrapped(torch.ones(size)), torch.ones(size))
        assert what_runs(wrapped)[16] == "static"

    def test_does_not_change_a_buffer_twice(self) -> None:
        class Counts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.get_buffer("calls").add_(1)
                return x.view(-1, 4) * 2

        wrapped: Any = bucketed(Counts(), **by_name())
        for count, size in enumerate((4, 8, 12, 16, 8), 1):
            wrapped(torch.ones(size))
            assert int(wrapped.calls) == count

    def test_of_tensor_subclasses_is_refused_by_name(self) -> None:
        class Own(torch.Tensor):
            pass

        with pytest.raises(ValueError, match="tensor subclasses"):
            bucketed(lambda x: x * 2, **by_name())(torch.ones(5).as_subclass(Own))


class TestRefused:
    def test_an_unknown_engine(self) -> None:
        with pytest.raises(ValueError, match="engine is 'rages', expected one of 'static'"):
            bucketed(lambda x: x, **by_name(engine="rages"))

    @pytest.mark.parametrize("kind", ["ranges", "auto"])
    def test_with_ranks_which_must_agree(self, kind: Any) -> None:
        with pytest.raises(ValueError, match="use engine='static'"):
            bucketed(lambda x: x, **by_name(engine=kind, group=True))

    @pytest.mark.parametrize("defect", [True, False])
    @pytest.mark.parametrize("mode", ["default", "max-autotune"])
    @pytest.mark.parametrize("device", ["cuda", "cpu"])
    def test_ranges_on_a_torch_that_pads_out_of_bounds(
        self, defect: bool, mode: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """https://github.com/pytorch/pytorch/issues/169760."""
        monkeypatch.setattr(_torch, "bounds_of_padding_are_wrong", lambda: defect)
        monkeypatch.setattr(engine, "_devices", lambda _: {device})
        options = by_name(compile={"mode": mode}, engine="ranges")
        wrapped = bucketed(lambda x: x * 2, **options)
        if defect and mode == "max-autotune" and device == "cuda":
            with pytest.raises(ValueError, match=r"engine='ranges' is refused: .*169760"):
                wrapped(torch.ones(5))
            auto = bucketed(lambda x: x * 2, **{**options, "engine": "auto"})
            auto(torch.ones(5))
            assert "ranges refused: on this torch, max-autotune" in auto.stats().engines[8,]
        else:
            caller, _ = wrapped._bucketed_caller()
            plan, _ = caller.plan_for((), (torch.ones(5),), {})
            assert plan.how == "ranges"

    def test_the_defect_is_detected_by_what_torch_does(self) -> None:
        """2.6 to 2.9 have it, by the catalog's probe too."""
        probe = importlib.import_module("torchguard.defects.probes.dynamic_sizes")
        if _torch.bounds_of_padding_are_wrong():
            assert probe.pad_dynamic.probe() is not None


class TestAuto:
    def test_begins_eager_and_ends_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "_ASSUMED_CHEAP", 0.01)
        graphs = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            # What it compiles takes no time, what is eager sleeps.
            return lambda *given: (given[-1] * 2,)

        def function(x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                threading.Event().wait(0.002)
            return x * 2

        wrapped = bucketed(function, **by_name(engine="auto", backend=backend))
        numbers = random.Random(0)  # noqa: S311
        for count in range(120):
            x = torch.randn(numbers.randint(2, 16))
            assert torch.equal(wrapped(x), x * 2)
            assert not vars(x)
            assert graphs or count < 100
        assert not any(each == "eager" for each in what_runs(wrapped).values())

    def test_times_the_backward_too(self) -> None:
        wrapped = bucketed(lambda x: (x * x).sum(), **by_name("aot_eager", engine="auto"))
        for _ in range(4):
            wrapped(torch.ones(5, requires_grad=True)).backward()
        caller, _ = wrapped._bucketed_caller()
        [choice] = caller.engine._choices.values()
        assert isinstance(choice, break_even.AutoChoice)
        assert choice.timings["eager"].count == 4
        assert len(choice.timings["eager"].backward) == 4

    def test_reads_the_clock_of_a_gpu_once_it_is_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No call waits for the device."""
        over: list[bool] = []

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                pass

            def query(self) -> bool:
                return bool(over)

            def elapsed_time(self, _: Any) -> float:
                return 250.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        seconds: list[float] = []
        clock, device = engine.Clock(), torch.device("cuda")
        clock.start(device, seconds.append)()
        clock.start(device, seconds.append)()
        assert seconds == []
        over.append(True)
        clock.start(torch.device("cpu"), seconds.append)
        assert seconds == [0.25, 0.25]

    def test_leaves_static_out_where_padding_leaks(self) -> None:
        wrapped = bucketed(lambda x: x * x.mean(), **by_name("aot_eager", engine="auto"))
        wrapped.warmup(torch.ones(5))
        for size in range(2, 17):
            x = torch.randn(size)
            for _ in range(40):
                torch.testing.assert_close(wrapped(x), x * x.mean())

    def test_compiles_and_times_all_in_warmup(self) -> None:
        wrapped = bucketed(lambda x: x * 2, **by_name("aot_eager", engine="auto"))
        wrapped.warmup(torch.ones(5))
        stats = wrapped.stats()
        assert stats.graphs == 4
        assert all("ranges" in text and "static" in text and "ms" in text
                   for text in stats.engines.values())  # fmt: skip
        with no_recompile():
            for size in range(1, 17):
                assert torch.equal(wrapped(torch.ones(size)), torch.full((size,), 2.0))

    def test_runs_eager_in_warmup_where_nothing_compiles(self) -> None:
        wrapped = bucketed(lambda x: x * 2, **by_name(engine="auto", compile=False))
        wrapped.warmup(torch.ones(5))
        assert what_runs(wrapped) == dict.fromkeys(LADDER, "eager")

    def test_compiles_nothing_in_no_recompile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "_ASSUMED_CHEAP", 0.0)
        wrapped = bucketed(lambda x: x * 2, **by_name(engine="auto"))
        with no_recompile():
            for _ in range(5):
                wrapped(torch.ones(5))
        assert wrapped.stats().graphs == 0
        for _ in range(5):
            wrapped(torch.ones(5))
        assert wrapped.stats().graphs == 1

    @pytest.mark.parametrize("assumed", [0.0, 0.003])
    def test_is_right_in_every_phase(self, assumed: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """Outputs, gradients and buffers, whatever runs."""
        monkeypatch.setattr(engine, "_ASSUMED_CHEAP", assumed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        wrapped: Any = bucketed(
            model, **by_name("aot_eager", engine="auto", dims={"input": {0: "t"}})
        )
        plain = copy.deepcopy(model)
        numbers = random.Random(1)  # noqa: S311
        for _ in range(150):
            x = torch.randn(numbers.randint(1, 16), 3)
            wrapped(x).square().sum().backward()
            plain(x).square().sum().backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name, rtol=1e-4, atol=1e-4)
        assert wrapped.stats().calls == 150

    def test_runs_in_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "_ASSUMED_CHEAP", 0.001)
        wrapped = bucketed(lambda x: x * 2, **by_name(engine="auto"))
        assert wrong_in_four_threads(wrapped, calls=200) == []
        assert wrapped.stats().calls == 800


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ranges", "auto"])
def test_an_encoder_compiled_with_inductor(kind: Any) -> None:
    """Values and gradients of a small transformer, with a mask that is made for the real size."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    wrapped: Any = bucketed(
        model,
        dims={"src": {1: "t"}},
        buckets=LADDER,
        mask={"src_key_padding_mask": "padding"},
        engine=kind,
        compile=True,
    )
    if kind == "auto":
        wrapped.warmup(torch.randn(2, 5, 16))
    for size in (3, 5, 1, 16, 9):
        x = torch.randn(2, size, 16, requires_grad=True)
        found, expected = wrapped(x), model(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        gradients = [torch.autograd.grad(out.square().sum(), x) for out in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    if kind == "ranges":
        assert wrapped.stats().graphs == 2


def test_auto_imports_no_compiler_before_it_compiles() -> None:
    """Dynamo takes longer to import than many streams take in all."""
    program = """
    import sys, torch, torchguard
    before = "torch._dynamo" in sys.modules
    double = torchguard.bucketed(
        lambda x: 2 * x, dims=({0: "t"},), buckets=[4, 8], compile=True, engine="auto"
    )
    for length in (3, 5, 3):
        double(torch.ones(length))
    print(before, "torch._dynamo" in sys.modules, double.stats().graphs)
    """
    assert output_of(program).split() == ["False", "False", "0"]
