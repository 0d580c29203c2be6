"""What bucketed proves before it trusts a bucket: padding changes nothing, however much of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from support.bucketed import in_time, leak, wrap
from torchguard import BucketCollator, PaddingLeakError, bucketed
from torchguard.errors import TorchGuardWarning


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
    @pytest.mark.parametrize("fill", [None, {"ids": 0}])
    def test_a_leak_is_found_where_the_first_call_has_little(self, fill: Any) -> None:
        with torch.no_grad():
            leak(Attending(), torch.randint(1, 50, (2, 255)), buckets=[256], fill=fill)

    def test_a_bucket_is_proven_again_where_padding_has_grown(self) -> None:
        def creeping(x: torch.Tensor) -> torch.Tensor:
            return x * (1 + 1e-7 * (x == 1).sum() ** 2)

        wrapped = wrap(creeping, buckets=[64], fill={"x": 1.0})
        wrapped(torch.zeros(63) + 2)
        with pytest.raises(PaddingLeakError, match="t: 24 -> 64 in x"):
            wrapped(torch.zeros(24) + 2)


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


class TestOtherValuesInThePadding:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.sum(1),
            lambda x: x.norm(dim=1),
            lambda x: x.amax(1),
            lambda x: x.amin(1),
            lambda x: functional.conv1d(x[None], torch.ones(2, 2, 3), padding="same"),
        ],
        ids=["sum", "norm", "amax", "amin", "conv"],
    )
    def test_what_relies_on_0_says_so(self, function: Callable[..., Any]) -> None:
        """Whether 0 is right for all data, as of a sum, or not, as of a maximum, is not guessed."""
        x = torch.tensor([[1.0, -1.0, 2.0, 0.5, 3.0], [-3.0, 1.0, 2.0, -5.0, 7.0]])
        text = leak(function, x)
        assert "with another value in the padding of x" in text
        assert "With 0 there nothing differs for this call; fill={'x': 0} says" in text
        torch.testing.assert_close(in_time(function, fill={"x": 0})(x), function(x))

    @pytest.mark.parametrize("function", [lambda x: x.mean(1), lambda x: x.logsumexp(1)])
    def test_what_0_itself_changes_is_not_told_to(self, function: Callable[..., Any]) -> None:
        assert "With 0 there" not in leak(function, torch.randn(2, 5))

    @pytest.mark.parametrize(("least", "refused"), [(0.5, True), (-9.0, False)])
    def test_are_above_all_data_and_below(self, least: float, refused: bool) -> None:
        x = torch.tensor([[1.0, 2.0, 3.0]])
        if refused:
            leak(lambda x: x * (x > least).all(), x, outputs={1: "t"})
        else:  # 9 below all data is no value of theirs
            in_time(lambda x: x * (x > least).all(), outputs={1: "t"})(x)

    def test_that_the_function_does_not_take(self) -> None:
        def checks(x: torch.Tensor) -> torch.Tensor:
            if bool((x.abs() > 100).any()):
                raise ValueError("out of range")
            return x * 2

        x = torch.full((2, 5), 60.0)
        text = leak(checks, x, outputs={1: "t"})
        assert "fails with another value than 0 in the padding of x" in text
        assert "ValueError: out of range" in text
        assert torch.equal(in_time(checks, fill={"x": 0}, outputs={1: "t"})(x), x * 2)

    def test_ids_are_no_others_than_there_are(self) -> None:
        embedding = nn.Embedding(8, 3)
        ids = torch.tensor([[3, 7, 7, 0, 3]])
        torch.testing.assert_close(in_time(embedding)(ids), embedding(ids))
        leak(lambda ids: embedding(ids).sum(1), ids)


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


class TestAMaskThatIsMade:
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_is_given_to_padded_runs(self, side: Any) -> None:
        model = Packing()
        wrapped = in_time(model, side=side, **POSITIONS)
        for length in (5, 7, 11):
            ids, positions = torch.randint(1, 50, (2, length)), torch.arange(length).expand(2, -1)
            torch.testing.assert_close(wrapped(ids, positions), model(ids, positions))

    def test_but_not_to_the_one_without_padding(self) -> None:
        ids, positions = torch.randint(1, 50, (2, 5)), torch.tensor([[0, 1, 2, 0, 1]] * 2)
        assert "t: 5 -> 8 in ids" in leak(Packing(), ids, positions, **POSITIONS)


# Batches that arrive padded: a mask or lengths say what is real, which is checked and counted.


DIMS: dict[str, Any] = {"x": {1: "t"}, "mask": {1: "t"}}
LENGTHS = [5, 9, 13, 14, 7, 3, 11, 2]


def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, T, D), (B, T) -> (B, D), of what is real."""
    real = mask[..., None].to(x.dtype)
    return (x * real).sum(1) / real.sum(1).clamp(min=1)


def ignores(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.mean(1)


def inverted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mean(x, ~mask.bool())


def batches(side: Any = "right", rows: Any = None, **options: Any) -> list[dict[str, Any]]:
    """Return the batches of a loader with :class:`BucketCollator`; each fits its bucket."""
    torch.manual_seed(0)
    samples: Any = [{"x": torch.randn(length, 3)} for length in LENGTHS]
    collate = BucketCollator(
        [8, 16], {"x": {1: "t"}}, mask_key="mask", side=side, batch_sizes=rows, **options
    )
    return list(DataLoader(samples, batch_size=3, collate_fn=collate))


def padded(length: int, size: int, kind: str = "real") -> tuple[torch.Tensor, torch.Tensor]:
    """Return one batch (2, size, 3) of that length, padded with 0, and its mask."""
    x, mask = torch.zeros(2, size, 3), torch.zeros(2, size)
    x[:, :length], mask[:, :length] = torch.randn(2, length, 3), 1
    if kind == "padding":
        mask = 1 - mask
    return x, mask


class TestCheck:
    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("when", ["first", "always"])
    @pytest.mark.parametrize("function", [ignores, inverted])
    def test_a_leak_in_batches_of_a_collator_is_found(
        self, function: Any, when: Any, side: Any
    ) -> None:
        """Wherever the collator pads: ``side`` of bucketed is about what it pads itself."""
        wrapped = in_time(function, dims=DIMS, mask="mask", check_padding=when)
        given = batches(side)
        with pytest.raises(PaddingLeakError, match="padding changes output of"):
            for batch in given:
                wrapped(batch["x"], batch["mask"])
        with pytest.raises(PaddingLeakError):
            for batch in given:
                wrapped.verify(batch["x"], batch["mask"])

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_a_right_model_is_proven(self, side: Any) -> None:
        wrapped = in_time(mean, dims=DIMS, mask="mask")
        for batch in batches(side):
            found = wrapped(batch["x"], batch["mask"])
            assert torch.equal(found, mean(batch["x"], batch["mask"]))
        assert wrapped.stats().proven == ((16,),)

    @pytest.mark.parametrize("kind", ["real", "padding"])
    def test_masks_of_every_kind(self, kind: Any) -> None:
        def attends(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            kept = (mask != 0) == (kind == "real")
            weights = torch.zeros(mask.shape).masked_fill(~kept, float("-inf")).softmax(1)
            return (x * weights[..., None]).sum(1)

        in_time(attends, dims=DIMS, mask={"mask": kind})(*padded(5, 8, kind))
        leak(ignores, *padded(5, 8, kind), dims=DIMS, mask={"mask": kind})

    @pytest.mark.parametrize("shape", [(), (2,)], ids=["0-d", "one a row"])
    def test_lengths_of_the_caller_say_it_too(self, shape: tuple[int, ...]) -> None:
        def by_length(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            real = torch.arange(x.shape[1]) < n.reshape(-1, 1)
            return mean(x, real.expand(2, -1))

        x, _ = padded(5, 8)
        options: dict[str, Any] = {"dims": {"x": {1: "t"}}, "lengths": "n"}
        n = torch.full(shape, 5)
        wrapped = in_time(by_length, **options)
        torch.testing.assert_close(wrapped(x, n), by_length(x, n))
        assert wrapped.stats().proven == ((8,),)
        assert wrapped.stats().waste == pytest.approx(8 / 5 - 1)
        assert leak(lambda x, n: x.mean(1), x, n, **options)
        torch.testing.assert_close(wrapped(x[:, :5]), x[:, :5].mean(1))  # made, if he gives none

    def test_what_padding_holds_other_than_0_was_put_there_on_purpose(self) -> None:
        """Labels of -100, which the collator fills in, are not varied, and no fill is asked for."""
        head = nn.Linear(3, 4)

        def loss(x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(head(x).flatten(0, 1), labels.flatten())

        x, mask = padded(5, 8)
        labels = torch.randint(4, (2, 8)).masked_fill(mask == 0, -100)
        dims = {**DIMS, "labels": {1: "t"}}
        in_time(loss, dims=dims, mask="mask")(x, mask, labels)
        text = leak(loss, x, mask, labels.clamp(min=0), dims=dims, mask="mask")
        assert "padding changes output of" in text

    def test_rows_that_pad_a_batch(self) -> None:
        """Their answer, here NaN, is not compared, whether the batch is an axis or not."""

        def attends(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
            return (scores.softmax(1)[..., None] * x).sum(1)

        given = batches(rows={8: 4, 16: 4})
        wrapped = in_time(attends, dims=DIMS, mask="mask")
        both = bucketed(
            attends,
            dims={"x": {0: "b", 1: "t"}, "mask": {0: "b", 1: "t"}},
            buckets={"b": [4], "t": [8, 16]},
            mask={"mask": ("t", "real")},
        )
        for batch in given:
            batch["mask"][-1] = False
            for function in (wrapped, both):
                found = function(batch["x"], batch["mask"])
                there = batch["mask"].any(1)
                assert found[there].equal(attends(batch["x"], batch["mask"])[there])
        assert wrapped.stats().proven == ((16,),)
        assert both.stats().proven == ((4, 16),)
        text = leak(ignores, given[0]["x"], given[0]["mask"], dims=DIMS, mask="mask")
        assert "padding changes output" in text

    def test_a_function_that_takes_no_other_size_than_a_buckets_warns(self) -> None:
        def blocks(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return mean(x.reshape(2, x.shape[1] // 4, 4, 3).flatten(1, 2), mask)

        wrapped = in_time(blocks, dims=DIMS, mask="mask")
        with pytest.warns(
            TorchGuardWarning, match=r"can't be checked, .*t: 5 -> 8 in x\) does not run"
        ):
            found = wrapped(*padded(5, 8))
        assert found.shape == (2, 3)
        assert wrapped.stats().proven == ()
        with pytest.raises(ValueError, match="can't be derived"):
            wrapped.verify(*padded(5, 8))

    def test_a_write_to_an_input_that_is_not_copied_is_none_of_ours(self) -> None:
        def scales(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x.mul_(2)

        x, mask = padded(5, 8)
        before = x.clone()
        assert in_time(scales, dims=DIMS, mask="mask")(x, mask) is x
        assert torch.equal(x, before * 2)


class TestWaste:
    def test_is_what_the_mask_says(self) -> None:
        wrapped = in_time(mean, dims=DIMS, mask="mask")
        cells = 0
        for batch in batches():
            wrapped(batch["x"], batch["mask"])
            cells += batch["mask"].numel()
        assert wrapped.stats().waste == pytest.approx(cells / sum(LENGTHS) - 1)
        assert "waste 0.0 %" not in str(wrapped.stats())

    def test_of_calls_that_are_padded_here(self) -> None:
        wrapped = in_time(mean, dims=DIMS, mask="mask")
        x, mask = torch.randn(2, 5, 3), torch.ones(2, 5)
        mask[1, 3:] = 0
        wrapped(x, mask)
        assert wrapped.stats().waste == pytest.approx(16 / 8 - 1)

    def test_of_each_axis_and_of_what_arrives_padded(self) -> None:
        dims: Any = {name: {0: "batch", 1: "t"} for name in ("x", "mask")}
        wrapped = bucketed(mean, dims=dims, buckets=[4, 8], mask={"mask": ("t", "real")})
        x, mask = torch.randn(3, 5, 3), torch.ones(3, 5)
        mask[2, 1:] = 0  # 11 of 15 are real: a row that fills the batch up
        wrapped(x, mask)
        stats = wrapped.stats()
        assert stats.waste == pytest.approx(32 / 11 - 1)
        assert stats.waste_by_axis == pytest.approx({"batch": 4 / 3 - 1, "t": 8 / 5 - 1})
        assert stats.waste_given == pytest.approx(15 / 11 - 1)
        by_cause = "waste by cause: batch 33.3 %, t 60.0 %, padded before the call 36.4 %"
        assert by_cause in str(stats)
        assert by_cause in stats._repr_html_()

    @pytest.mark.cuda
    def test_nothing_waits_for_an_accelerator(self) -> None:
        wrapped = in_time(mean, dims=DIMS, mask="mask", check_padding="never")
        x, mask = (each.cuda() for each in padded(5, 8))
        wrapped(x, mask)
        torch.cuda.set_sync_debug_mode("error")
        try:
            wrapped(x, mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert wrapped.stats().waste == pytest.approx(8 / 5 - 1)
