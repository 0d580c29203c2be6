"""What a check compares besides outputs: gradients, buffers and hooks."""

from __future__ import annotations

import enum
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.bucketed import in_time, leak, wrap
from torchguard import Buckets, PaddingLeakError, bucketed

WAYS: tuple[dict[str, Any], ...] = ({}, {"check_padding": "never"})


class LeakyBackward(torch.autograd.Function):
    """Whose gradients depend on how long x is, those of the weight on what it holds too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / gradient.shape[0], ctx.saved_tensors[0].mean()


class TestWhatIsCompared:
    @pytest.mark.parametrize("of", ["parameter 0", "argument 0"])
    def test_gradients_are_compared(self, of: str) -> None:
        apply: Any = LeakyBackward.apply
        weight = torch.ones((), requires_grad=of == "parameter 0")
        wrapped = wrap(lambda *args: apply(*args, weight))
        x = torch.randn(5, requires_grad=of == "argument 0")
        with torch.no_grad():
            wrapped(x)
        with pytest.raises(PaddingLeakError, match=f"the gradient of {of}"):
            wrapped(x)

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
        x = torch.randn(2, 5, 3)
        torch.testing.assert_close(in_time(module)(x), module(x))

    def test_a_parameter_that_only_the_padded_run_reaches_is(self) -> None:
        bias, x = nn.Parameter(torch.zeros(3)), torch.randn(2, 5, 3)
        in_time(lambda x: x + (bias * 0 if x.shape[1] == 8 else 0))(x)  # a gradient of 0
        text = leak(lambda x: x + (bias if x.shape[1] == 8 else 0), x)
        assert "gradient of parameter 0" in text

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
            assert "changes the buffer avg that" in leak(module, torch.randn(2, 5))
            assert float(module.avg) == 0

        class Aside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm1d(3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.norm(x)
                return x * 2

        wrapped = in_time(Aside(), dims={"x": {2: "t"}})
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

        for options in WAYS:
            module = Counting()
            wrapped = in_time(module, **options)
            for length in (5, 12):
                wrapped(torch.randn(2, length))
            assert int(module.steps) == 2  # the run without data counts nothing
            assert module.steps._version == 2

    def test_a_module_without_its_sizes_becomes_what_it_becomes(self) -> None:
        module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
        x = torch.randn(2, 5, 3)
        torch.testing.assert_close(in_time(module)(x), module(x))
        assert not module[0]._forward_pre_hooks


class Name(str):
    """A text of a class of its own."""

    __slots__ = ()


class Share(float, enum.Enum):
    HALF, ALL = 0.5, 0.9


def centred(x: torch.Tensor, by: float = 0, other: float = 0) -> torch.Tensor:
    return x + 0 * other - by * x.mean()


class TestAProofOfItsOwn:
    """What may lead the function another way is checked, whatever is proven already."""

    @pytest.mark.parametrize(
        ("function", "first", "then"),
        [
            (lambda x, mode: x - x.mean() if mode else x, np.False_, np.True_),
            (lambda x, mode: x - x.mean() if mode == "mean" else x, "none", "mean"),
            (lambda x, mode: x - x.mean() if mode == "mean" else x, Name("none"), Name("mean")),
            (lambda x, weight: x + weight * (x + 1).mean(), 0.0, 0.5),
            (lambda x, then: x - then(x), lambda x: x.tanh(), lambda x: x.mean()),
            (
                lambda x, then: then(x),
                functools.partial(centred, other=1),
                functools.partial(centred, by=1),
            ),
            (lambda x, layers: layers(x), *map(nn.Sequential, (nn.ELU(), nn.Softmax(1)))),
            (lambda x, layer: layer(x), nn.ELU(), nn.Softmax(1)),
            (lambda x, w: x + x.mean() if w is True else x, 1, True),
            (lambda x, w: x + x.mean() if w is Share.ALL else x, Share.HALF, Share.ALL),
            (lambda x, scale: x if scale is None else x - scale * x.mean(), None, torch.ones(())),
            (lambda x, m: x + x.mean().clamp(max=m), -math.inf, 0.5),
            (lambda x, names: x - x.mean() if "mean" in names else x, {"sum"}, {"mean"}),
        ],
    )
    def test_belongs_to_a_value(self, function: Any, first: Any, then: Any) -> None:
        wrapped, x = in_time(function), torch.randn(2, 5)
        wrapped(x, first)
        with pytest.raises(PaddingLeakError):
            wrapped(x, then)

    def test_belongs_to_a_dtype(self) -> None:
        wrapped = in_time(lambda x: x.amax(1))
        wrapped(torch.ones(2, 5, dtype=torch.uint8))
        with pytest.raises(PaddingLeakError):
            wrapped(-torch.ones(2, 5))

    def test_belongs_to_an_input_that_requires_a_gradient(self) -> None:
        def roots(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.where(x != 0, (x.abs() * scale[:, None]).sqrt(), 0.0).sum(1)

        wrapped, x = in_time(roots, fill={"x": 0}), torch.randn(2, 5)
        wrapped(x, torch.ones(2))
        with pytest.raises(PaddingLeakError, match="gradient"):
            wrapped(x, torch.ones(2, requires_grad=True))

    def test_of_each_axis_is_none_of_both(self) -> None:
        def pairs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a[:, :, None] == b[:, None, :]).sum((1, 2))

        dims, fill = {"a": {1: "t"}, "b": {1: "s"}}, {"a": -1, "b": -1}
        wrapped = bucketed(pairs, dims=dims, buckets=Buckets([8]), fill=fill, compile=False)
        short, full = (torch.randint(0, 3, (2, size)) for size in (5, 8))
        wrapped(short, full)
        wrapped(full, short)
        with pytest.raises(PaddingLeakError):
            wrapped(short, short)

    def test_a_slice_has_a_plan_of_its_own(self) -> None:
        wrapped, x = in_time(lambda x, part: x[:, part]), torch.randn(2, 5)
        for part in (slice(4, None), slice(0, 4), slice(np.int64(1), None)):
            assert torch.equal(wrapped(x, part), x[:, part])
