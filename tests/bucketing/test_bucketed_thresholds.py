"""Functions that go by another rule beyond a number: accepted only where 0 is neutral there too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.bucketed import in_time, leak

Function = Callable[[torch.Tensor], torch.Tensor]


def padded(function: Any, **options: Any) -> Any:
    return in_time(function, **{"outputs": {}, **options})


class Held(nn.Module):
    """A function and a number that it compares with, in a buffer or a parameter."""

    def __init__(self, function: Callable[..., torch.Tensor], held: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        if isinstance(held, nn.Parameter):
            self.held = held
        else:
            self.register_buffer("held", held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B,)."""
        return self.function(x, self.held)


class Neuron(nn.Module):
    """A layer whose ReLU lets nothing through that is not far from 0."""

    def __init__(self, reduce: Function) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(1, 4)
        self.reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B, 4)."""
        return self.reduce((self.linear(x[..., None]) - 40).relu())


WRONG: dict[str, Function] = {
    "relu": lambda x: (x - 5).relu().mean(1),
    "relu-of-negative": lambda x: (-x - 100).relu().mean(1),
    "relu-of-quotient": lambda x: (x / 50 - 3).relu().mean(1),
    "relu-of-root": lambda x: (x.abs().sqrt() - 7).relu().mean(1),
    "share-above": lambda x: (x > 40).float().mean(1),
    "share-of-product": lambda x: (x * 0.01 > 3).float().mean(1),
    "share-of-square": lambda x: (x * x > 10_000).float().mean(1),
    "all-above": lambda x: (x > 20).all(1),
    "all-far-above": lambda x: (x > 40).all(1),
    "all-far-below": lambda x: (x < -40).all(1),
    "clamp": lambda x: x.clamp(min=7).amin(1),
    "where": lambda x: torch.where(x < -50, x, 0.0).mean(1),
    "masked-fill": lambda x: x.masked_fill(x < 64, 0).mean(1),
    "threshold": lambda x: functional.threshold(x, 10, 0).mean(1),
    "hardshrink": lambda x: functional.hardshrink(x, 10).mean(1),
    "softshrink": lambda x: functional.softshrink(x, 50).mean(1),
    "hardtanh": lambda x: functional.hardtanh(x - 90, 0, 9).mean(1),
    "gelu": lambda x: functional.gelu(x - 200).mean(1),
    "sigmoid": lambda x: (x - 200).sigmoid().mean(1),
    "maximum": lambda x: (torch.maximum(x, torch.full_like(x, 60.0)) - 60).mean(1),
    "rounded": lambda x: (x / 100).round().mean(1),
    "integers": lambda x: (x / 100).long().float().mean(1),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([60.0, 70.0])).float().mean(1),
    "buffer": Held(lambda x, held: (x > held).float().mean(1), torch.tensor(80.0)),
    "parameter": Held(lambda x, held: (x - held).relu().mean(1), nn.Parameter(torch.tensor(33.0))),
    "layer": Neuron(lambda hidden: hidden.mean(1)),
}
RIGHT: dict[str, Function] = {
    "relu": lambda x: (x - 5).relu().sum(1),
    "share-above": lambda x: (x > 40).float().sum(1),
    "any-above": lambda x: (x > 40).any(1),
    "equal": lambda x: (x == 50).sum(1),
    "clamp": lambda x: x.clamp(min=7).amax(1),
    "clamp-both": lambda x: x.clamp(-7, 7).sum(1),
    "where": lambda x: torch.where(x < -50, x, 0.0).sum(1),
    "hardshrink": lambda x: functional.hardshrink(x, 10).sum(1),
    "scores": lambda x: x.clamp(min=torch.finfo(x.dtype).min).sum(1),
    "rounded": lambda x: x.round().sum(1),
    "topk": lambda x: x.abs().topk(2, 1).values,
    "argmax": lambda x: x.relu().long().argmax(1),
    "normalized": lambda x: functional.normalize(x, dim=1).sum(1),
    "loss": lambda x: functional.huber_loss(x, torch.zeros_like(x), delta=50.0, reduction="sum"),
    "buffer": Held(lambda x, held: (x - held).relu().sum(1), torch.tensor(80.0)),
    "layer": Neuron(lambda hidden: hidden.sum(1)),
}
DATA: dict[str, Callable[[], torch.Tensor]] = {
    "normal": lambda: torch.randn(2, 5),
    "positive": lambda: torch.rand(2, 5),
    "negative": lambda: -torch.rand(2, 5),
    "small": lambda: torch.randn(1, 7) * 1e-2,
}


WRONG_OF_IDS: dict[str, Function] = {
    "equal": lambda ids: (ids == 17).float().mean(1),
    "isin": lambda ids: torch.isin(ids, torch.tensor([17, 50])).float().mean(1),
    "share-above": lambda ids: (ids > 40).float().mean(1),
    "all-above": lambda ids: (ids > 40).all(1),
    "least": lambda ids: ids.clamp(min=30).amin(1),
    "mode": lambda ids: ids.mode(1).values,
    "where": lambda ids: torch.where(ids > 45, ids, 0).float().mean(1),
    "relu": lambda ids: (ids.float() - 50).relu().mean(1),
    "quotient": lambda ids: (ids // 32).float().mean(1),
    "remainder": lambda ids: (ids - ids % 32).float().mean(1),
    "buffer": Held(lambda ids, held: (ids > held).float().mean(1), torch.tensor(44)),
}
RIGHT_OF_IDS: dict[str, Function] = {
    "equal": lambda ids: (ids == 17).sum(1),
    "any": lambda ids: (ids == 17).any(1),
    "share-above": lambda ids: (ids > 40).sum(1),
    "largest": lambda ids: ids.clamp(max=30).amax(1),
    "length": lambda ids: (ids != 0).sum(1),
    "topk": lambda ids: ids.topk(2, 1).values,
}
IDS: dict[str, Callable[[], torch.Tensor]] = {
    "many": lambda: torch.randint(1, 10, (2, 5)),
    "threes": lambda: torch.full((2, 5), 3),
    "int32": lambda: torch.randint(1, 12, (2, 5)).int(),
}


# What gives one answer to data that is all alike, whatever is padded.
ALIKE: dict[str, Function] = {
    "round-mode": lambda x: x.round().mode(1).values,
    "mode": lambda x: x.mode(1).values,
    "floor-median": lambda x: x.floor().median(1).values,
    "trunc-median": lambda x: x.trunc().nanmedian(1).values,
    "sign-median": lambda x: x.round().sign().median(1).values,
    "kthvalue": lambda x: x.round().kthvalue(2, 1).values,
    "quantile": lambda x: x.round().quantile(0.5, dim=1),
    "argmax": lambda x: x.long().argmax(1),
    "amin": lambda x: x.long().amin(1),
    "all-above": lambda x: (x > 0.5).all(1),
    "share-above": lambda x: (x > 0.5).float().mean(1),
    "share-below": lambda x: (x < -5).float().mean(1),
}
DATA_ALIKE: dict[str, Callable[[], torch.Tensor]] = {
    "below-half": lambda: torch.rand(2, 5) * 0.3,
    "above-minus-half": lambda: -torch.rand(2, 5) * 0.3,
    "near-0": lambda: torch.randn(2, 5).clamp(-3, 3) * 0.1,
    "near-1": lambda: torch.rand(2, 5) * 0.2 + 1.1,
    "ones": lambda: torch.ones(2, 5),
    "zeros": lambda: torch.zeros(2, 5),
}


def each_with_each(functions: dict[str, Function], data: dict[str, Any]) -> list[Any]:
    pairs = itertools.product(functions.items(), data.items())
    return [pytest.param(f, make, id=f"{name}-{kind}") for (name, f), (kind, make) in pairs]


@pytest.mark.parametrize(
    ("function", "make"),
    [
        *each_with_each(WRONG, DATA),
        *each_with_each(ALIKE, DATA_ALIKE),
        *each_with_each(WRONG_OF_IDS, IDS),
    ],
)
def test_what_the_first_data_does_not_reach_is_found(function: Function, make: Any) -> None:
    torch.manual_seed(0)
    leak(function, make(), outputs={})


@pytest.mark.parametrize(
    ("function", "make"), [*each_with_each(RIGHT, DATA), *each_with_each(RIGHT_OF_IDS, IDS)]
)
def test_a_number_beyond_which_0_is_neutral_raises_nothing(function: Function, make: Any) -> None:
    torch.manual_seed(0)
    wrapped, first = padded(function), make()
    wrapped(first)
    for scale in (1, 60, 1e4):
        x = torch.randn(3, 6) * scale
        if not first.is_floating_point():
            x = torch.randint(1, 60, (3, 6), dtype=first.dtype)
        # A sum of more numbers rounds otherwise.
        torch.testing.assert_close(wrapped(x), function(x), rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_in_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.rand(2, 5).to(dtype)
    assert "where x is a" in leak(lambda x: (x > 40).float().mean(1), x, outputs={})
    padded(lambda x: (x > 40).float().sum(1))(x)


class TestIds:
    def test_of_an_embedding_are_no_others_than_it_has(self) -> None:
        """An id that is not valid raises, and then shows nothing."""
        embedding = nn.Embedding(20, 4, padding_idx=0)
        torch.manual_seed(0)
        ids = torch.randint(1, 10, (2, 5))
        wrapped = padded(lambda ids: (embedding(ids) * (ids < 30)[..., None]).sum(1))
        torch.testing.assert_close(wrapped(ids), embedding(ids).sum(1))
        leak(lambda ids: (embedding(ids) * (ids == 15)[..., None]).mean(1), ids, outputs={})

    def test_with_negative_ones_are_tried_negative(self) -> None:
        x = torch.tensor([[-3, 5, 2, 1, 4], [1, 2, 3, 4, 5]])
        assert "where x is negative" in leak(lambda x: x.amax(1), x, outputs={})
        leak(lambda x: x.amin(1), x, outputs={})
        assert padded(lambda x: x.sum(1))(x).tolist() == [9, 15]

    def test_that_are_all_1_may_be_a_mask_and_are_left(self) -> None:
        def masked(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            assert bool((m <= 1).all())
            return x * (m > 0.5)

        wrapped = padded(masked, dims=({1: "t"}, {1: "t"}), outputs={1: "t"})
        x = torch.randn(2, 5)
        torch.testing.assert_close(wrapped(x, torch.ones(2, 5, dtype=torch.long)), x)
