"""What bucketed proves before it trusts a bucket: padding changes nothing, however much of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchguard import Buckets, PaddingLeakError, bucketed

LADDER = Buckets([8, 16])
IN_TIME = ({1: "t"},)


def padded(function: Any, **options: Any) -> Any:
    return bucketed(function, **{"dims": IN_TIME, "buckets": LADDER, **options})


class Attending(nn.Module):
    """One head of attention over ids (B, T); a query that may attend nothing attends everything."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 8, dtype=dtype)
        self.project = nn.Linear(8, 24, dtype=dtype)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T) -> (B, T, 8)."""
        q, k, v = self.project(self.embedding(ids)).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        if mask is not None:
            causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
            allowed = causal & (mask != 0)[:, None]
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        attended: torch.Tensor = scores.softmax(-1) @ v
        return attended


IDS = {"ids": {1: "t"}}
MASKED: dict[str, Any] = {"dims": {"ids": {1: "t"}, "mask": {1: "t"}}, "mask": "mask"}


class TestHowMuchPaddingThereIs:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("fill", [None, {"ids": 0}])
    def test_a_leak_is_found_where_the_first_call_has_little(
        self, dtype: torch.dtype, fill: Any
    ) -> None:
        model = Attending(dtype)
        ids = torch.randint(1, 50, (2, 255))
        wrapped = bucketed(model, dims=IDS, buckets=Buckets([256]), fill=fill)
        with torch.no_grad(), pytest.raises(PaddingLeakError):
            wrapped(ids)

    def test_a_small_difference_is_looked_at_with_more(self) -> None:
        wrapped = padded(
            lambda x: x.mean(1), buckets=Buckets([256]), fill={"x": 0}, dims={"x": {1: "t"}}
        )
        with pytest.raises(PaddingLeakError, match="t: 128 -> 256 in x; inputs cut short"):
            wrapped(torch.ones(2, 255, dtype=torch.bfloat16))

    def test_of_a_smaller_bucket_the_inputs_are_cut_to_what_this_one_can_see(self) -> None:
        wrapped = padded(
            lambda x: x.mean(1), buckets=Buckets([200, 256]), fill={"x": 0}, dims={"x": {1: "t"}}
        )
        with pytest.raises(PaddingLeakError, match="t: 201 -> 256 in x; inputs cut short"):
            wrapped(torch.ones(2, 255, dtype=torch.bfloat16))

    def test_what_does_not_take_shorter_inputs_is_right_at_its_own(self) -> None:
        def first_ones(x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] < 200:
                raise ValueError("too short")
            return x * (1 + 1e-5 * (x[:, -1:] == 0))

        wrapped = padded(
            first_ones,
            buckets=Buckets([256]),
            fill={"x": 0},
            dims={"x": {1: "t"}},
            outputs={1: "t"},
        )
        assert wrapped(torch.ones(2, 255)).shape == (2, 255)

    def test_a_bucket_is_proven_again_where_padding_has_grown(self) -> None:
        def creeping(x: torch.Tensor) -> torch.Tensor:
            return x * (1 + 1e-7 * (x == 1).sum() ** 2)

        wrapped = bucketed(creeping, dims={"x": {0: "t"}}, buckets=Buckets([64]), fill={"x": 1.0})
        wrapped(torch.zeros(63) + 2)
        with pytest.raises(PaddingLeakError, match="t: 24 -> 64 in x"):
            wrapped(torch.zeros(24) + 2)

    def test_a_bucket_is_run_so_often(self) -> None:
        runs: list[int] = []

        def note(x: torch.Tensor) -> torch.Tensor:
            runs.append(x.shape[0])
            return x + 1

        wrapped = bucketed(note, dims={"x": {0: "t"}}, buckets=LADDER, outputs={0: "t"})

        def ran(length: int) -> int:
            runs.clear()
            wrapped(torch.arange(1.0, length + 1))
            return len(runs) - 1  # the call itself

        # Without padding, padded, with other values above and below.
        # And once with negative data.
        assert [ran(length) for length in (7, 7, 6, 5, 7, 4, 8)] == [4 + 2, 0, 4, 0, 0, 4, 0]
        assert ran(12) == 4
        assert [ran(length) for length in (9, 10, 11, 12, 16)] == [4, 0, 0, 0, 0]
        wrapped = bucketed(note, dims={"x": {0: "t"}}, buckets=LADDER, outputs={0: "t"})
        runs.clear()
        wrapped(torch.tensor([1.0, -1.0, 2.0]))
        assert len(runs) == 1 + 4 + 4  # two more pairs: all positive, all negative

    def test_a_call_with_more_inputs_is_proven_on_its_own(self) -> None:
        def model(x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            return x * 2 if labels is None else (x - labels).square().mean()

        wrapped = bucketed(model, dims={"x": {1: "t"}, "labels": {1: "t"}}, buckets=LADDER)
        x = torch.randn(2, 5)
        wrapped(x)
        with pytest.raises(PaddingLeakError):
            wrapped(x, torch.randn(2, 5))


class TestMaskedPositionsOfTheCaller:
    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("masked", ["right", "left"])
    def test_may_hold_anything(self, side: Any, masked: str) -> None:
        model = Attending()
        wrapped = bucketed(model, buckets=LADDER, side=side, **MASKED)
        for length in (7, 5, 15, 11):
            ids = torch.randint(1, 50, (2, length))
            mask = torch.ones(2, length, dtype=torch.long)
            mask[1, 3:] = 0
            if masked == "left":
                mask = mask.flip(1)
            found, expected = wrapped(ids, mask), model(ids, mask)
            assert found.shape == expected.shape
            torch.testing.assert_close(found[mask != 0], expected[mask != 0])

    def test_a_leak_at_real_positions_is_found(self) -> None:
        model = Attending()

        def leaky(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = model(ids, mask)
            return found + found.mean()

        ids, mask = torch.randint(1, 50, (2, 7)), torch.ones(2, 7)
        mask[1, :3] = 0
        with pytest.raises(
            PaddingLeakError, match=r"mask was given: something in .*leaky"
        ) as error:
            bucketed(leaky, buckets=LADDER, **MASKED)(ids, mask)
        assert "Pass the function a mask" not in str(error.value)

    @pytest.mark.parametrize("kind", ["padding", "additive"])
    def test_of_every_kind(self, kind: Any) -> None:
        def where_real(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            real = m == 0
            return torch.where(real, x, x.sum(-1, keepdim=True) + x.shape[-1]).unsqueeze(-1)

        x, m = torch.randn(2, 5), torch.zeros(2, 5)
        m[1, 3:] = 1 if kind == "padding" else torch.finfo(m.dtype).min
        options: dict[str, Any] = {"dims": {"x": {1: "t"}, "m": {1: "t"}}, "buckets": LADDER}
        found = bucketed(where_real, mask={"m": kind}, **options)(x, m)
        torch.testing.assert_close(found[m == 0], where_real(x, m)[m == 0])
        with pytest.raises(PaddingLeakError):
            bucketed(where_real, fill={"m": 1.0}, **options)(x, m)


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv1d(5, 5, 3, padding="same")


class TestFillZero:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: functional.pad(x, (0, 3)).relu(),
            lambda x: x.sum(1),
            lambda x: x.norm(dim=1),
            lambda x: x @ x.T,
            lambda x: conv()(x.expand(5, -1)[None]),
            lambda x: x.relu().amax(1),
        ],
        ids=["pad", "sum", "norm", "matmul", "conv", "relu"],
    )
    def test_that_is_neutral_is_relied_on(self, function: Callable[..., Any]) -> None:
        for seed in range(3):
            torch.manual_seed(seed)
            wrapped = padded(function)
            for x in (torch.randn(1, 5), torch.randn(1, 7), torch.randn(1, 12)):
                torch.testing.assert_close(wrapped(x), function(x))
            stats = wrapped.stats()
            assert stats.relies_on_fill_0 == ("x",)
            assert stats.as_dict()["relies_on_fill_0"] == ["x"]
            assert "relies on fill 0 in the padding of x" in str(stats)

    def test_is_not_relied_on_where_nothing_reads_it(self) -> None:
        wrapped = padded(lambda x: x * 2)
        wrapped(torch.randn(2, 5))
        assert wrapped.stats().relies_on_fill_0 == ()

    def test_only_of_the_inputs_that_it_is_read_of(self) -> None:
        def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y.sum(1, keepdim=True)

        wrapped = bucketed(added, dims={"x": {1: "t"}, "y": {1: "t"}}, buckets=LADDER)
        wrapped(torch.randn(2, 5), torch.randn(2, 5))
        assert wrapped.stats().relies_on_fill_0 == ("y",)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize(
        ("function", "said"),
        [
            (lambda x: x.amax(1), "negative"),
            (lambda x: x.amin(1), "positive"),
            (lambda x: (x > 0).all(1), "positive"),
            (lambda x: (x < 0).all(1), "negative"),
            (lambda x: x.mean(1), None),
            (lambda x: (100 * x + 1e-9).logsumexp(1), None),
        ],
        ids=["amax", "amin", "all-positive", "all-negative", "mean", "logsumexp"],
    )
    def test_that_is_not_neutral_is_refused(
        self, function: Callable[..., Any], said: str | None, seed: int
    ) -> None:
        torch.manual_seed(seed)
        x = torch.randn(2, 5)
        x[:, :2] = torch.tensor([1.0, -1.0])
        with pytest.raises(PaddingLeakError) as error:
            padded(function)(x)
        if said is not None:
            assert f"where x is {said}" in str(error.value)
            assert "0 in the padding is not neutral" in str(error.value)
            assert "fill={'x': 0} says that such data never comes" in str(error.value)

    def test_is_tried_on_negative_data_where_the_first_data_has_none(self) -> None:
        with pytest.raises(PaddingLeakError, match="where x is negative"):
            padded(lambda x: (x < 0).all(1))(torch.rand(2, 5))

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.sqrt(),
            lambda x: (x + 1).log().sum(1),
            lambda x: torch.xlogy(x, x).sum(1),
            lambda x: functional.binary_cross_entropy(x, torch.ones_like(x), reduction="none"),
            lambda x: x.clamp(min=0).amax(1),
            lambda x: x.lgamma(),
        ],
        ids=["sqrt", "log", "xlogy", "binary-cross-entropy", "clamp", "lgamma"],
    )
    def test_of_a_function_of_positive_numbers_is_none(self, function: Callable[..., Any]) -> None:
        """Negative numbers give NaN with padding and without, or an error in both."""
        x = torch.rand(2, 5, requires_grad=True)
        torch.testing.assert_close(padded(function)(x), function(x))

    @pytest.mark.parametrize(
        "data",
        [
            lambda: torch.rand(2, 5) * 0.3,
            lambda: -torch.rand(2, 5) * 0.3,
            lambda: torch.randn(2, 5).clamp(-3, 3) * 0.1,
            lambda: torch.rand(2, 5) * 0.2 + 1.1,
            lambda: torch.ones(2, 5),
            lambda: torch.zeros(2, 5),
        ],
        ids=["below-half", "above-minus-half", "near-0", "near-1", "ones", "zeros"],
    )
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.round().mode(1).values,
            lambda x: x.mode(1).values,
            lambda x: x.floor().median(1).values,
            lambda x: x.trunc().nanmedian(1).values,
            lambda x: x.round().sign().median(1).values,
            lambda x: x.round().kthvalue(2, 1).values,
            lambda x: x.round().quantile(0.5, dim=1),
            lambda x: x.long().argmax(1),
            lambda x: x.long().amin(1),
            lambda x: (x > 0.5).all(1),
            lambda x: (x > 0.5).float().mean(1),
            lambda x: (x < -5).float().mean(1),
        ],
        ids=[
            *("round-mode", "mode", "floor-median", "trunc-median", "sign-median", "kthvalue"),
            *("quantile", "argmax", "amin", "all-above", "share-above", "share-below"),
        ],
    )
    def test_is_tried_on_whole_numbers_where_the_first_data_is_all_alike(
        self, function: Callable[..., Any], data: Callable[..., torch.Tensor]
    ) -> None:
        torch.manual_seed(0)
        with pytest.raises(PaddingLeakError):
            padded(function, outputs={})(data())  # 2.6 does not derive those of quantile

    @pytest.mark.parametrize("ids", [[[2, 9, 2, 2, 2]], [[3, 3, 3, 3, 3]]])
    def test_is_tried_on_other_ids_where_the_first_are_all_alike(self, ids: Any) -> None:
        with pytest.raises(PaddingLeakError, match="where ids is a positive whole number"):
            padded(lambda ids: ids.mode(1).values)(torch.tensor(ids))

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.round().sum(1),
            lambda x: (x > 0.5).any(1),
            lambda x: x.abs().topk(2, 1).values,
            lambda x: x.round() * 2,
            lambda x: x.relu().long().argmax(1),
            lambda x: (x != 0).sum(1),
        ],
        ids=["sum", "any", "topk", "round", "argmax", "count"],
    )
    @pytest.mark.parametrize("integers", [False, True])
    def test_of_what_rounds_and_is_right_is_none(
        self, function: Callable[..., Any], integers: bool
    ) -> None:
        for first in (torch.ones(2, 5), torch.zeros(2, 5), torch.rand(2, 5)):
            wrapped = padded(function)
            for x in (first, torch.randn(2, 5) * 9, torch.randn(2, 12)):
                given = (x * 4).long().abs() if integers else x
                torch.testing.assert_close(wrapped(given), function(given))

    def test_of_ids_is_tried_on_others_of_the_same_range(self) -> None:
        ids = torch.tensor([[0, 3, 7, 2, 0], [5, 5, 0, 1, 9]])
        with pytest.raises(PaddingLeakError, match="where ids is positive"):
            padded(lambda ids: (ids > 0).all(1))(ids)
        wrapped = padded(lambda ids: (ids != 0).sum(1))
        assert wrapped(ids).tolist() == [3, 4]
        assert wrapped.stats().relies_on_fill_0 == ("ids",)

    def test_is_relied_on_where_another_value_is_an_error(self) -> None:
        def checks(x: torch.Tensor) -> torch.Tensor:
            if bool((x.abs() > 100).any()):
                raise ValueError("out of range")
            return x.sum(1)

        wrapped = padded(checks, outputs={})
        x = torch.randn(2, 5)
        x[0, 0] = 60.0
        torch.testing.assert_close(wrapped(x), x.sum(1))
        assert wrapped.stats().relies_on_fill_0 == ("x",)

    def test_each_of_the_inputs_may_refuse_another_value(self) -> None:
        def checks(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if bool((x.abs() > 100).any()):
                raise ValueError("out of range")
            return x.sum(1) + y[:, 0]

        dims = {"x": {1: "t"}, "y": {1: "t"}}
        wrapped = bucketed(checks, dims=dims, buckets=LADDER, outputs={})
        x = torch.randn(2, 5)
        x[0, 0] = 60.0
        wrapped(x, torch.randn(2, 5))
        assert wrapped.stats().relies_on_fill_0 == ("x",)

    def test_that_could_not_be_tried_on_other_data_is_refused(self) -> None:
        def picky(x: torch.Tensor) -> torch.Tensor:
            if float(x[0, 0]) != 0.5:
                raise ValueError("only this")
            return x.sum(1)

        with pytest.raises(PaddingLeakError, match="another value in the padding of x"):
            padded(picky, outputs={})(torch.full((2, 5), 0.5))


class Packing(nn.Module):
    """As transformers: positions that start again are several sequences, if there is no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attending = Attending()

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(B, T), (B, T) -> (B, T, 8)."""
        if mask is None and bool((positions.diff() != 1).any()):
            attended: torch.Tensor = self.attending.embedding(ids)
            return attended + positions[..., None]
        found: torch.Tensor = self.attending(ids, torch.ones_like(ids) if mask is None else mask)
        return found + positions[..., None]


class TestOtherDataAndAMaskThatIsMade:
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_is_given_to_both_runs(self, side: Any) -> None:
        model = Packing()
        wrapped = padded_with_positions(model, side=side)
        for length in (5, 7, 11):
            ids, positions = torch.randint(1, 50, (2, length)), torch.arange(length).expand(2, -1)
            torch.testing.assert_close(wrapped(ids, positions), model(ids, positions))

    def test_but_not_with_the_data_of_the_caller(self) -> None:
        with pytest.raises(PaddingLeakError, match="t: 5 -> 8 in ids"):
            padded_with_positions(Packing())(
                torch.randint(1, 50, (2, 5)), torch.tensor([[0, 1, 2, 0, 1]] * 2)
            )

    @pytest.mark.parametrize(
        ("function", "said"),
        [
            (lambda x: x.amax(1), "negative"),
            (lambda x: x.amin(1), "positive"),
            (lambda x: (x > 0).all(1), "positive"),
        ],
        ids=["amax", "amin", "all"],
    )
    def test_does_not_excuse_who_multiplies_by_it(
        self, function: Callable[..., Any], said: str
    ) -> None:
        def masked(x: torch.Tensor, m: torch.Tensor | None = None) -> Any:
            return function(x if m is None else x * m)

        x = torch.tensor([[1.0, -1.0, 2.0], [-3.0, 1.0, 2.0]])
        with pytest.raises(PaddingLeakError, match=f"where x is {said}"):
            padded(masked, dims={"x": {1: "t"}}, mask="m")(x)


def padded_with_positions(model: nn.Module, **options: Any) -> Any:
    dims = {"ids": {1: "t"}, "positions": {1: "t"}}
    return padded(model, dims=dims, mask="mask", outputs={1: "t"}, **options)


class TestWhatIsCompared:
    def test_leaves_that_the_function_makes_are_not(self) -> None:
        class Detaching(nn.Module):
            """As wav2vec2 with gradient checkpointing."""

            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(3, 3)
                self.frozen = nn.Linear(3, 3).requires_grad_(False)

            def forward(self, x: torch.Tensor) -> Any:
                hidden = self.frozen(x)
                hidden.requires_grad = True
                return self.linear(hidden)

        module = Detaching()
        wrapped = bucketed(module, dims={"x": {1: "t"}}, buckets=LADDER)
        x = torch.randn(2, 5, 3)
        torch.testing.assert_close(wrapped(x), module(x))

    def test_a_parameter_that_only_the_padded_run_reaches_is(self) -> None:
        linear = nn.Linear(3, 3)

        def by_size(x: torch.Tensor) -> torch.Tensor:
            return x + (linear.bias * 0 if x.shape[1] == 8 else 0) + x.shape[1] * 0

        class Bias(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bias = nn.Parameter(torch.zeros(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.bias if x.shape[1] == 8 else x + 0

        padded(by_size, dims={"x": {1: "t"}})(torch.randn(2, 5, 3))  # a gradient of 0
        with pytest.raises(PaddingLeakError, match="gradient of bias"):
            bucketed(Bias(), dims={"x": {1: "t"}}, buckets=LADDER)(torch.randn(2, 5, 3))

    def test_statistics_that_see_padding_are(self) -> None:
        class Averaging(nn.Module):
            avg: torch.Tensor

            def __init__(self, how: str) -> None:
                super().__init__()
                self.how = how
                self.register_buffer("avg", torch.zeros(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.how == "in place":
                    self.avg.mul_(0.9).add_(0.1 * x.detach().mean())
                else:
                    self.avg = 0.9 * self.avg + 0.1 * x.detach().mean()
                return x * 2

        for how in ("in place", "replaced"):
            module = Averaging(how)
            with pytest.raises(PaddingLeakError, match="changes the buffer avg that"):
                bucketed(module, dims={"x": {1: "t"}}, buckets=LADDER)(torch.randn(2, 5))
            assert float(module.avg) == 0

        class Aside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.norm(x)
                return x * 2

        wrapped = bucketed(Aside(), dims={"x": {2: "t"}}, buckets=LADDER)
        with pytest.raises(PaddingLeakError, match=r"the buffer norm\.running_"):
            wrapped(torch.randn(2, 3, 5))
        wrapped.eval()
        wrapped(torch.randn(2, 3, 5))

    def test_counters_and_tables_as_long_as_the_input_are_no_leak(self) -> None:
        class Counting(nn.Module):
            steps: torch.Tensor
            positions: torch.Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("steps", torch.zeros((), dtype=torch.long))
                self.register_buffer("positions", torch.zeros(1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.steps += 1
                self.positions = torch.arange(x.shape[1], dtype=x.dtype)
                return x + self.positions

        ways: tuple[dict[str, Any], ...] = ({}, {"check_padding": "never"})
        for options in ways:
            module = Counting()
            wrapped = bucketed(module, dims={"x": {1: "t"}}, buckets=LADDER, **options)
            for length in (5, 12):
                wrapped(torch.randn(2, length))
            assert int(module.steps) == 2  # the run without data counts nothing
            assert module.steps._version == 2

    @pytest.mark.parametrize("removes", [False, True])
    def test_hooks_go_back_with_the_attributes_that_tell_of_them(self, removes: bool) -> None:
        class Recording(nn.Module):
            """As transformers with output_hidden_states: hooks are registered at the first call."""

            installed = False

            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(3, 3)
                self.first = self.linear.register_forward_hook(lambda *_: None)
                self.linear.register_forward_hook(lambda *_: None)

            def forward(self, x: torch.Tensor) -> Any:
                if not self.installed:
                    if removes:
                        self.first.remove()
                    self.linear.register_forward_hook(lambda *args: self.seen.append(args[2]))
                    self.installed = True
                self.seen: list[torch.Tensor] = []
                return self.linear(x), tuple(self.seen)

        ways: tuple[dict[str, Any], ...] = ({}, {"check_padding": "never"})
        for options in ways:
            module = Recording()
            before = list(module.linear._forward_hooks)
            wrapped = bucketed(module, dims={"x": {1: "t"}}, buckets=LADDER, **options)
            for length in (5, 12, 7):
                _, seen = wrapped(torch.randn(2, length, 3))
                assert [each.shape for each in seen] == [(2, length, 3)]
            now = list(module.linear._forward_hooks)
            assert now[:-1] == before[removes:]

    def test_a_module_without_its_sizes_becomes_what_it_becomes(self) -> None:
        module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
        wrapped = bucketed(module, dims=({1: "t"},), buckets=LADDER)
        x = torch.randn(2, 5, 3)
        torch.testing.assert_close(wrapped(x), module(x))
        assert not module[0]._forward_pre_hooks
