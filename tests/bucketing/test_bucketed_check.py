"""bucketed(): the padding check finds a leak, names it, blames nothing else and leaves no trace."""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from support.bucketed import Counting, Net, in_time, leak, wrap
from torchguard import Buckets, PaddingLeakError, bucketed


class TestWhatItLeaves:
    def test_everything_is_as_it_was(self) -> None:
        net = Net()
        wrapped = wrap(net)
        net.linear.weight.grad = torch.ones(3, 3)
        x = torch.randn(5, 3, requires_grad=True)
        state = {name: value.clone() for name, value in net.state_dict().items()}
        versions = {name: value._version for name, value in net.state_dict().items()}
        random_state = torch.get_rng_state()
        wrapped.verify(x)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert {name: value._version for name, value in net.state_dict().items()} == versions
        for name, value in net.state_dict().items():
            assert torch.equal(value, state[name]), name
        assert torch.equal(net.linear.weight.grad, torch.ones(3, 3))
        assert net.linear.bias.grad is None
        assert x.grad is None
        assert wrapped.stats().calls == 0

    def test_weights_in_the_same_memory_are_as_before(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.flat = nn.Parameter(torch.ones(6))
                self.first = nn.Parameter(self.flat.detach()[:3])
                self.again = nn.Parameter(self.flat.detach())

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x * self.first).mean() + self.flat.sum() + self.again.sum()

        net = Tied()
        saved = (net.flat * net.again.detach()).sum()
        versions = [each._version for each in net.parameters()]
        with pytest.raises(PaddingLeakError):
            wrap(net).verify(torch.randn(5, 3))
        assert torch.equal(net.flat, torch.ones(6))
        assert [each._version for each in net.parameters()] == versions
        saved.backward()  # which needs the weights as they were


class TestWhenItIsMade:
    @pytest.mark.parametrize("how", ["closure", "argument", "attribute", "list"])
    def test_training_is_checked_on_its_own_wherever_the_module_is(self, how: str) -> None:
        norm = nn.BatchNorm1d(3).eval()

        class Trainer:
            def __init__(self) -> None:
                self.model = norm

            def loss(self, x: torch.Tensor) -> Any:
                return self.model(x)

        models = [norm]
        dims = ({2: "t"},)
        applied = wrap(lambda model, x: 1 * model(x), dims=(None, *dims))
        calls: dict[str, Callable[[torch.Tensor], Any]] = {
            "closure": wrap(lambda x: 1 * norm(x), dims=dims),
            "argument": lambda x: applied(norm, x),
            "attribute": wrap(Trainer().loss, dims=dims),
            "list": wrap(lambda x: 1 * models[0](x), dims=dims),
        }
        x = torch.randn(2, 3, 5)
        torch.testing.assert_close(calls[how](x), norm(x))
        norm.train()
        with pytest.raises(PaddingLeakError, match="first differs after native_batch_norm"):
            calls[how](x)

    def test_a_leak_is_found_again_and_counts_as_no_call(self, backend: Counting) -> None:
        wrapped = wrap(lambda x: x.mean(), compile={"backend": backend})
        for _ in range(2):
            with pytest.raises(PaddingLeakError):
                wrapped(torch.randn(3))
        assert (wrapped.stats().calls, backend.graphs) == (0, [])

    def test_never_and_always(self) -> None:
        x = torch.ones(3)
        never = wrap(torch.mean, check_padding="never")
        assert float(never(x)) == 0.75
        with pytest.raises(PaddingLeakError):
            never.verify(x)
        with pytest.raises(ValueError, match="so nothing is padded; pass shorter inputs"):
            never.verify(torch.ones(4))

        def sometimes(x: torch.Tensor) -> torch.Tensor:
            return x * 1 if float(x[0].abs()) > 0.5 else x - x.mean()

        always = wrap(sometimes, check_padding="always", outputs={0: "t"})
        always(torch.tensor([1.0, 2.0, 3.0]))
        with pytest.raises(PaddingLeakError):
            always(torch.tensor([0.25, 2.0, 3.0]))


class TestNoLeak:
    def test_dropout(self) -> None:
        def attend(x: torch.Tensor) -> torch.Tensor:
            """x (B, T, D): which elements are dropped depends on T."""
            dropped = functional.dropout(x, 0.5) * torch.rand_like(x)
            return dropped * functional.scaled_dot_product_attention(
                x[:, :1], x[:, :1], x[:, :1], dropout_p=0.5
            )

        in_time(attend)(torch.randn(2, 5, 3, requires_grad=True)).sum().backward()

    @pytest.mark.parametrize(
        "draw",
        [
            lambda x: functional.gumbel_softmax(x, dim=2),
            lambda x: torch.normal(x, 0.1),
            lambda x: torch.rand_like(x).exponential_() * x,
            lambda x: (
                torch.randint_like(x, 1, 9) + torch.randint(9, x.shape) + x.clone().random_(3, 5)
            ),
            lambda x: functional.rrelu(x, training=True),
            lambda x: functional.rrelu(x * 1, training=True, inplace=True),
            lambda x: (
                torch.poisson(x.abs())
                + torch.binomial(x.detach().exp().ceil(), x.detach().sigmoid())
            ),
            lambda x: x.softmax(2).flatten(0, 1).multinomial(1).view(2, -1, 1),
            lambda x: x.clone().geometric_(0.5) + x.clone().log_normal_() + x.clone().cauchy_(),
            lambda x: torch._standard_gamma(x.exp()) * torch._sample_dirichlet(x.detach().exp()),
        ],
    )
    def test_random_numbers_of_each_kind(self, draw: Any) -> None:
        in_time(draw)(torch.randn(2, 5, 4, requires_grad=True))

    def test_a_number_is_rounded_as_a_tensor_is(self) -> None:
        def mean(x: torch.Tensor, n: Any = None) -> tuple[torch.Tensor, float]:
            real = torch.arange(x.shape[1])[:, None] < n
            return x, (x.square() * real).sum().item() + 0.1

        def leaky(x: torch.Tensor, n: Any = None) -> tuple[torch.Tensor, float]:
            return x, x.exp().sum().item() * bool(n)

        options: Any = {"dims": {"x": {1: "t"}}, "lengths": "n", "outputs": ({1: "t"}, None)}
        options |= {"buckets": Buckets([64]), "compile": False}
        bucketed(mean, **options)(torch.randn(2, 21, 40))
        with pytest.raises(PaddingLeakError):
            bucketed(leaky, **options)(torch.randn(2, 21, 40))

    def test_without_data_none_is_looked_for(self) -> None:
        wrapped = wrap(lambda x: x.mean(0))
        for mode in (FakeTensorMode(), torch.device("meta")):
            with mode:
                assert wrapped(torch.ones(5, 3)).shape == (3,)
                masked = in_time(lambda x, m: x * m, dims={"x": {1: "t"}}, mask="m")
                assert masked(torch.ones(2, 8), torch.ones(2, 8)).shape == (2, 8)
        with pytest.raises(PaddingLeakError):
            wrapped(torch.ones(5, 3))


def two_steps(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.softmax(1) + y.mean(1, keepdim=True)


class TestOperator:
    def test_the_first_that_differs_is_named_with_its_line(self) -> None:
        _, begin = inspect.getsourcelines(two_steps)
        text = leak(two_steps, torch.randn(2, 5))
        assert f"It first differs after softmax, test_bucketed_check.py:{begin + 2}. " in text

    @pytest.mark.parametrize(
        ("function", "named", "side"),
        [
            (lambda x: (x * 2).flip(-1) + 1, "flip", "right"),
            (
                nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU(), nn.InstanceNorm1d(2)),
                *("batch_norm", "right"),
            ),
            # What is real is no padding on either side.
            (lambda x: (x + 1).relu().softmax(-1), "softmax", "right"),
            (lambda x: (x + 1).relu().softmax(-1), "softmax", "left"),
            # An integer that differs is not named before a result.
            (lambda x: ((x == 0).sum(), x.mean(-1))[1], "mean", "right"),
        ],
    )
    def test_of_several(self, function: Any, named: str, side: Any) -> None:
        text = leak(function, torch.randn(2, 2, 5), dims=({-1: "t"},), side=side)
        assert f"first differs after {named}" in text.replace("native_b", "b")


class TestWhatToType:
    """It is what the option takes, inside containers and behind ``*args`` too."""

    @pytest.mark.parametrize(
        ("function", "dims", "given"),
        [
            (lambda b: b["x"].amax(1), {"b": {"x": {1: "t"}}}, {"x": torch.ones(2, 5)}),
            (lambda *a: a[0].amax(1), ({1: "t"},), torch.ones(2, 5)),
        ],
        ids=["in a container", "*args"],
    )
    def test_in_fill(self, function: Any, dims: Any, given: Any) -> None:
        said = leak(function, given, dims=dims)
        found = re.search(r"fill=({.*}) says", said)
        assert found is not None
        wrapped = in_time(function, dims=dims, fill=ast.literal_eval(found[1]))
        assert torch.equal(wrapped(given), function(given))


# What is compared besides outputs: gradients, buffers and hooks; and what has a proof of its own.


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
            (lambda x, by: x - x.mean() if str(by) == "-0.0" else x, 0.0, -0.0),
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

    @pytest.mark.parametrize(
        ("leaks", "make"),
        [
            (lambda x, other: x.shape[0] < 2, lambda n: (torch.randn(n, 5), None)),
            (lambda x, other: x.shape[2] < 2, lambda n: (torch.randn(2, 5, n), None)),
            (lambda x, other: len(other) < 2, lambda n: (torch.randn(2, 5), torch.ones(n))),
            (lambda x, other: other[0].shape[1] < 2,
             lambda n: (torch.randn(2, 5), [torch.ones(1, n)])),
            (lambda x, other: len(other) < 2, lambda n: (torch.randn(2, 5), np.ones(n))),
        ],
        ids=["rows", "channels", "another argument", "in a list", "an array"],
    )  # fmt: skip
    @pytest.mark.parametrize("small", [0, 1])
    def test_belongs_to_a_size_of_0_or_1_that_has_no_name(
        self, leaks: Any, make: Any, small: int
    ) -> None:
        wrapped = in_time(lambda x, other: x + (x + 1).mean() if leaks(x, other) else x * 2)
        for size in (4, 3):
            wrapped(*make(size))
        if make(small)[0].numel():  # of nothing padding changes nothing
            with pytest.raises(PaddingLeakError):
                wrapped(*make(small))

    def test_is_that_of_all_other_sizes(self) -> None:
        runs = []
        wrapped = in_time(lambda x, other: runs.append(1) or x * 2, outputs={1: "t"})  # type: ignore[func-returns-value]
        for rows in (4, 2, 3, 9, 1, 1, 4):
            wrapped(torch.randn(rows, 5), torch.ones(rows + 1, 7))
        assert len(runs) == 7 + 2 * 4  # a proof with many rows, and one with one row

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
