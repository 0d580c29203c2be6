"""Batches that arrive padded: a mask or lengths say what is real, which is checked and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from support.bucketed import in_time, leak
from torchguard import BucketCollator, PaddingLeakError, bucketed

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

    def test_a_call_that_is_padded_here_too(self) -> None:
        """5 of 6 are real, in a bucket of 8."""
        wrapped = in_time(mean, dims=DIMS, mask="mask")
        x, mask = padded(5, 6)
        torch.testing.assert_close(wrapped(x, mask), mean(x, mask))
        text = leak(ignores, x, mask, dims=DIMS, mask="mask")
        assert "(t: 5 -> 8 in x" in text

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
            assert not bool(batch["mask"][-1].any())
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
        with pytest.warns(UserWarning, match=r"can't be checked, .*t: 5 -> 8 in x\) does not run"):
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
