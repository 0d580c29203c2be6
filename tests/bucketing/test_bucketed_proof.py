"""What bucketed proves before it trusts a bucket: padding changes nothing, however much of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.bucketed import Noting, in_time, leak, wrap
from torchguard import PaddingLeakError


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


MASKED: dict[str, Any] = {"dims": {"ids": {1: "t"}, "mask": {1: "t"}}, "mask": "mask"}


class TestHowMuchPaddingThereIs:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("fill", [None, {"ids": 0}])
    def test_a_leak_is_found_where_the_first_call_has_little(
        self, dtype: torch.dtype, fill: Any
    ) -> None:
        with torch.no_grad():
            leak(Attending(dtype), torch.randint(1, 50, (2, 255)), buckets=[256], fill=fill)

    @pytest.mark.parametrize(("buckets", "least"), [([256], 128), ([200, 256], 201)])
    def test_a_small_difference_is_looked_at_with_more(
        self, buckets: list[int], least: int
    ) -> None:
        """The inputs are cut to half, or to what the bucket can be entered with."""
        x = torch.ones(2, 255, dtype=torch.bfloat16)
        text = leak(lambda x: x.mean(1), x, buckets=buckets, fill={"x": 0})
        assert f"t: {least} -> 256 in x; inputs cut short" in text

    def test_what_does_not_take_shorter_inputs_is_right_at_its_own(self) -> None:
        def first_ones(x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] < 200:
                raise ValueError("too short")
            return x * (1 + 1e-5 * (x[:, -1:] == 0))

        wrapped = in_time(first_ones, buckets=[256], fill={"x": 0}, outputs={1: "t"})
        assert wrapped(torch.ones(2, 255)).shape == (2, 255)

    def test_a_bucket_is_proven_again_where_padding_has_grown(self) -> None:
        def creeping(x: torch.Tensor) -> torch.Tensor:
            return x * (1 + 1e-7 * (x == 1).sum() ** 2)

        wrapped = wrap(creeping, buckets=[64], fill={"x": 1.0})
        wrapped(torch.zeros(63) + 2)
        with pytest.raises(PaddingLeakError, match="t: 24 -> 64 in x"):
            wrapped(torch.zeros(24) + 2)

    def test_a_bucket_is_run_so_often(self) -> None:
        def runs(wrapped: Any, x: torch.Tensor) -> int:
            noting.shapes.clear()
            wrapped(x)
            return len(noting.shapes) - 1  # the call itself

        noting = Noting(lambda x: x + 1)
        wrapped = wrap(noting, buckets=[8, 16], outputs={0: "t"})
        counted = [
            runs(wrapped, torch.arange(1.0, length + 1))
            for length in (7, 7, 6, 5, 7, 4, 8, 12, 9, 10, 11, 12, 16)
        ]
        # Without padding, padded, with other values above and below; and once with negative data.
        assert counted == [4 + 2, 0, 4, 0, 0, 4, 0, 4, 4, 0, 0, 0, 0]
        x = torch.tensor([1.0, -1.0, 2.0])
        # Two more pairs: all positive, all negative.
        assert runs(wrap(noting, outputs={0: "t"}), x) == 4 + 4
        noting = Noting(lambda x: (x + 1).relu())
        # And three kinds of whole numbers.
        assert runs(wrap(noting, outputs={0: "t"}), x) == 4 + 4 + 6


class TestAutocast:
    """Where autocast is on, results in float32 are as exact as the dtype that it takes."""

    def test_rounding_is_no_leak(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        embedding = nn.Embedding(99, 64)

        def squares(ids: torch.Tensor, mask: Any = None) -> torch.Tensor:
            squared: torch.Tensor = encoder(embedding(ids), src_key_padding_mask=mask).square()
            return squared

        wrapped = in_time(squares, mask={"mask": "padding"}, buckets=[128])
        with torch.autocast("cpu", torch.bfloat16):
            assert wrapped(torch.randint(1, 99, (4, 100))).dtype is torch.float32

    def test_a_leak_is_one(self) -> None:
        linear = nn.Linear(16, 16)
        with torch.autocast("cpu", torch.bfloat16):
            leak(lambda x: linear(x).float().mean(1), torch.randn(2, 7, 16), fill={"x": 0})
            leak(lambda x: x + linear(x).square().mean(), torch.randn(2, 7, 16))


class TestMaskedPositionsOfTheCaller:
    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("masked", ["right", "left"])
    def test_may_hold_anything(self, side: Any, masked: str) -> None:
        model = Attending()
        wrapped = in_time(model, side=side, **MASKED)
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
        text = leak(leaky, ids, mask, **MASKED)
        assert "mask was given: something in TestMaskedPositionsOfTheCaller" in text
        assert "Pass the function a mask" not in text

    @pytest.mark.parametrize(
        ("kind", "masks"),
        [("padding", 1), ("additive", float("-inf")), ("additive", -1e4),
         ("additive", torch.finfo(torch.float32).min)],
    )  # fmt: skip
    def test_of_every_kind(self, kind: Any, masks: float) -> None:
        def where_real(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return torch.where(m == 0, x, x.sum(-1, keepdim=True) + x.shape[-1]).unsqueeze(-1)

        x, m = torch.randn(2, 5), torch.zeros(2, 5)
        m[1, 3:] = masks
        dims = {"x": {1: "t"}, "m": {1: "t"}}
        found = in_time(where_real, dims=dims, mask={"m": kind})(x, m)
        torch.testing.assert_close(found[m == 0], where_real(x, m)[m == 0])
        leak(where_real, x, m, dims=dims, fill={"m": 1.0})
        if kind == "additive":  # a bias is no mask
            leak(where_real, x, m.clamp(min=-3), dims=dims, mask={"m": kind})


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv1d(5, 5, 3, padding="same")


def checks(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sum numbers, and raise for large ones, such as another value in the padding of x."""
    if bool((x.abs() > 100).any()):
        raise ValueError("out of range")
    return x.sum(1) + y[:, 0]


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
            wrapped = in_time(function)
            for x in (torch.randn(1, 5), torch.randn(1, 7), torch.randn(1, 12)):
                torch.testing.assert_close(wrapped(x), function(x))
            stats = wrapped.stats()
            assert stats.relies_on_fill_0 == ("x",)
            assert stats.as_dict()["relies_on_fill_0"] == ["x"]
            assert "relies on fill 0 in the padding of x" in str(stats)

    @pytest.mark.parametrize(
        ("function", "relies"),
        [
            (lambda x, y: x * 2 + y * 3, ()),
            (lambda x, y: x + y.sum(1, keepdim=True), ("y",)),
            # Each of the inputs may refuse another value.
            (checks, ("x",)),
        ],
        ids=["nothing reads it", "of one", "another value is an error"],
    )
    def test_is_relied_on_where_it_is_read(
        self, function: Callable[..., Any], relies: tuple[str, ...]
    ) -> None:
        outputs = {} if function is checks else {1: "t"}
        wrapped = in_time(function, dims=({1: "t"}, {1: "t"}), outputs=outputs)
        x = torch.randn(2, 5)
        x[0, 0] = 60.0
        wrapped(x, torch.randn(2, 5))
        assert wrapped.stats().relies_on_fill_0 == relies

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
        text = leak(function, x)
        if said is not None:
            assert f"where x is {said}" in text
            assert "0 in the padding is not neutral" in text
            assert "fill={'x': 0} says that such data never comes" in text
            torch.testing.assert_close(in_time(function, fill={"x": 0})(x), function(x))

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
        torch.testing.assert_close(in_time(function)(x), function(x))

    def test_that_could_not_be_tried_on_other_data_is_refused(self) -> None:
        def picky(x: torch.Tensor) -> torch.Tensor:
            if float(x[0, 0]) != 0.5:
                raise ValueError("only this")
            return x.sum(1)

        text = leak(picky, torch.full((2, 5), 0.5), outputs={})
        assert "another value in the padding of x" in text


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


POSITIONS: dict[str, Any] = {
    "dims": {"ids": {1: "t"}, "positions": {1: "t"}}, "mask": "mask", "outputs": {1: "t"},
}  # fmt: skip


class TestOtherDataAndAMaskThatIsMade:
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_is_given_to_both_runs(self, side: Any) -> None:
        model = Packing()
        wrapped = in_time(model, side=side, **POSITIONS)
        for length in (5, 7, 11):
            ids, positions = torch.randint(1, 50, (2, length)), torch.arange(length).expand(2, -1)
            torch.testing.assert_close(wrapped(ids, positions), model(ids, positions))

    def test_but_not_with_the_data_of_the_caller(self) -> None:
        ids, positions = torch.randint(1, 50, (2, 5)), torch.tensor([[0, 1, 2, 0, 1]] * 2)
        assert "t: 5 -> 8 in ids" in leak(Packing(), ids, positions, **POSITIONS)

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
        assert f"where x is {said}" in leak(masked, x, mask="m")
