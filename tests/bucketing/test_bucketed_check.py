"""bucketed(): the padding check finds a leak, blames nothing else and leaves no trace."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from support.bucketed import LADDER, Counting, wrapped_net
from torchguard import Buckets, PaddingLeakError, bucketed
from torchguard.bucketing.decorator.masking import Mask

perturbed = importlib.import_module("torchguard.equivalence.perturb").perturbed


class TestVerification:
    def test_gradients_are_compared(self) -> None:
        class Leaky(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x * 1

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> Any:
                return gradient, ctx.saved_tensors[0].mean()

        weight = torch.ones((), requires_grad=True)
        apply: Any = Leaky.apply
        wrapped = bucketed(lambda x: apply(x, weight), dims=({0: "t"},), buckets=LADDER)
        x = torch.randn(5)
        with torch.no_grad():
            wrapped(x)
        with pytest.raises(PaddingLeakError, match="the gradient of parameter 0"):
            wrapped(x)

    def test_gradients_of_inputs_are_compared_too(self) -> None:
        class Leaky(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> Any:
                return gradient / gradient.shape[0]

        wrapped = bucketed(
            Leaky.apply,
            dims=({0: "t"},),
            buckets=LADDER,
        )
        with pytest.raises(PaddingLeakError, match="the gradient of argument 0"):
            wrapped(torch.randn(5, requires_grad=True))

    def test_another_filler_finds_what_zeros_hide(self) -> None:
        def largest(x: torch.Tensor) -> torch.Tensor:
            return x.amax(0)

        x = torch.tensor([1.0, -2.0, 3.0])
        with pytest.raises(PaddingLeakError, match="with other data, where x is negative"):
            bucketed(largest, dims={"x": {0: "t"}}, buckets=LADDER)(x)
        said = bucketed(largest, dims={"x": {0: "t"}}, buckets=LADDER, fill={"x": 0})
        torch.testing.assert_close(said(x), torch.tensor(3.0))

    def test_leaves_everything_as_it_was(self) -> None:
        net, wrapped = wrapped_net()
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

    def test_random_numbers_of_python_and_numpy_are_held_fixed_too(self) -> None:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * random.random() * float(np.random.rand())  # noqa: S311, NPY002

        wrapped = bucketed(scaled, dims={"x": {0: "t"}}, buckets=LADDER)
        before = random.getstate(), np.random.get_state(legacy=True)  # noqa: NPY002
        wrapped.verify(torch.ones(3))
        assert random.getstate() == before[0]
        with np.printoptions(threshold=1000):
            assert str(np.random.get_state(legacy=True)) == str(before[1])  # noqa: NPY002

    @pytest.mark.parametrize("how", ["closure", "argument", "attribute", "list"])
    def test_training_is_checked_on_its_own_wherever_the_module_is(self, how: str) -> None:
        norm = nn.BatchNorm1d(3).eval()
        options: dict[str, Any] = {"buckets": LADDER}

        class Trainer:
            def __init__(self) -> None:
                self.model = norm

            @bucketed(dims={"x": {2: "t"}}, **options)  # type: ignore[untyped-decorator]
            def loss(self, x: torch.Tensor) -> Any:
                return self.model(x)

        models = [norm]
        calls: dict[str, Callable[[torch.Tensor], Any]] = {
            "closure": bucketed(lambda x: 1 * norm(x), dims=({2: "t"},), **options),
            "attribute": Trainer().loss,
            "list": bucketed(lambda x: 1 * models[0](x), dims=({2: "t"},), **options),
        }
        applied = bucketed(lambda model, x: 1 * model(x), dims=(None, {2: "t"}), **options)
        calls["argument"] = lambda x: applied(norm, x)
        x = torch.randn(2, 3, 5)
        torch.testing.assert_close(calls[how](x), norm(x))
        norm.train()
        with pytest.raises(PaddingLeakError, match="first differs after native_batch_norm"):
            calls[how](x)

    def test_a_leak_is_found_again_and_counts_as_no_call(self, backend: Counting) -> None:
        wrapped = bucketed(
            lambda x: x.mean(), dims=({0: "t"},), buckets=LADDER, compile={"backend": backend}
        )
        for _ in range(2):
            with pytest.raises(PaddingLeakError):
                wrapped(torch.randn(3))
        assert (wrapped.stats().calls, backend.graphs) == (0, [])

    def test_dropout_is_no_leak(self) -> None:
        _, wrapped = wrapped_net()
        for length in (3, 5, 11):
            wrapped(torch.randn(length, 3)).sum().backward()

        def attend(x: torch.Tensor) -> torch.Tensor:
            """x (B, T, D): which elements are dropped depends on T."""
            dropped = functional.dropout(x, 0.5) * torch.rand_like(x)
            return dropped * functional.scaled_dot_product_attention(
                x[:, :1], x[:, :1], x[:, :1], dropout_p=0.5
            )

        attending = bucketed(attend, dims={"x": {1: "t"}}, buckets=LADDER)
        for length in (3, 5, 11):
            attending(torch.randn(2, length, 3))

    def test_leaves_what_the_function_notes_and_its_gradients(self) -> None:
        class Noting(nn.Linear):
            seen = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.seen += 1
                self.last = x
                out = super().forward(x)
                out.detach().requires_grad_().square().sum().backward()
                functional.linear(x, self.weight).sum().backward()
                return out.detach()

        net = Noting(3, 3)
        wrapped: Any = bucketed(net, dims={"x": {0: "t"}}, buckets=LADDER)
        wrapped.verify(torch.randn(5, 3))
        assert net.seen == 0
        assert not hasattr(net, "last")
        assert net.weight.grad is None

    def test_a_jump_within_the_rounding_error_is_no_leak(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sum of three is 1 + 2**-23; padded to four, its halves are others and give 1."""
        x = torch.tensor([1.0, 2.0**-24, 2.0**-24])

        class Jumping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return jumping(x, self.weight)

        def jumping(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            half = x.shape[0] // 2
            scaled = weight * (x[:half].sum() + x[half:].sum())
            return torch.relu(scaled - 1) + scaled  # the gradient of weight is 1, or 2

        module, held = Jumping(), torch.ones((), requires_grad=True)
        expanded = torch.ones(1).expand(3).requires_grad_()  # can't be written in place
        module.weight.grad = torch.ones(())
        ways: list[tuple[Any, tuple[Any, ...]]] = [
            (module, (x,)),
            (lambda x: jumping(x, held) + expanded.sum() * 0, (x,)),
            (jumping, (x, torch.ones((), requires_grad=True))),
        ]
        before = [(t, t.detach().clone(), t._version) for t in (module.weight, held)]
        padded = functools.partial(bucketed, dims={"x": {0: "t"}}, buckets=LADDER, fill={"x": 0.0})
        for function, call in ways:
            padded(function).verify(*call)
        for tensor, values, version in before:
            assert torch.equal(tensor, values)
            assert tensor._version == version
        assert torch.equal(module.weight.grad, torch.ones(()))
        assert held.grad is None
        # What other processes may be writing is not touched.
        module.weight.detach().share_memory_()
        with pytest.raises(PaddingLeakError, match="gradient of weight"):
            padded(module).verify(x)
        leak_check = importlib.import_module("torchguard.bucketing.decorator.prove")
        monkeypatch.setattr(leak_check, "_TURNS", 1)
        for function, call in ways[1:]:
            with pytest.raises(PaddingLeakError):
                padded(function).verify(*call)

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
        wrapped: Any = bucketed(net, dims={"x": {0: "t"}}, buckets=LADDER)
        with pytest.raises(PaddingLeakError):
            wrapped.verify(torch.randn(5, 3))
        assert torch.equal(net.flat, torch.ones(6))
        assert [each._version for each in net.parameters()] == versions
        saved.backward()  # which needs the weights as they were

    def test_a_leak_of_the_first_run_alone_is_one_where_there_are_no_weights(self) -> None:
        seen = []

        def once(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[0])
            return x.sum() + (1 if len(seen) == 1 else 0)

        with pytest.raises(PaddingLeakError):
            bucketed(once, dims={"x": {0: "t"}}, buckets=LADDER, fill={"x": 0.0}).verify(
                torch.ones(3)
            )

    def test_a_turn_that_fails_excuses_nothing(self) -> None:
        linear, runs = nn.Linear(3, 3), []

        def fails_later(x: torch.Tensor) -> torch.Tensor:
            runs.append(x)
            if len(runs) > 4:
                raise ValueError("the fifth run")
            total: torch.Tensor = linear(x).mean()
            return total

        with pytest.raises(PaddingLeakError):
            bucketed(fails_later, dims={"x": {0: "t"}}, buckets=LADDER).verify(torch.randn(5, 3))
        assert len(runs) > 4

    def test_unusual_weights_keep_their_digits_and_say_so(self) -> None:
        unusual = [
            nn.Parameter(torch.ones(2, device="meta")),
            nn.Parameter(torch.ones(2).share_memory_()),
            nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
            torch.ones(1).expand(2),
            torch.ones(2, dtype=torch.complex64).conj(),
            torch.zeros(2),
        ]
        with torch.inference_mode():
            unusual.append(torch.ones(2))
        before = [tensor.detach().clone() for tensor in unusual]
        with perturbed(unusual, 1) as changed:
            assert not changed
        for tensor, values in zip(unusual, before, strict=True):
            assert tensor.is_meta or torch.equal(tensor, values)

    def test_other_last_digits_are_seen_under_autocast_too(self) -> None:
        linear = nn.Linear(64, 64)
        x = torch.randn(2, 64)
        with torch.autocast("cpu", torch.bfloat16):
            before = linear(x)  # autocast keeps the weight as it has cast it
            with perturbed(linear.parameters(), 1) as changed:
                assert changed
                assert not torch.equal(linear(x), before)
            assert torch.equal(linear(x), before)

    def test_happens_once_per_bucket(self) -> None:
        runs = []

        def note(x: torch.Tensor) -> torch.Tensor:
            runs.append(tuple(x.shape))
            return x + 1

        wrapped = bucketed(note, dims={"x": {0: "t"}}, buckets=LADDER, outputs={0: "t"})
        for length in (2, 3, 2, 5, 6):
            wrapped(torch.ones(length))
        real = [shape for shape in runs if shape[0] not in LADDER.sizes]
        assert real == [(2,), (2,), (5,)]  # (2,) with negative data, too

    def test_checks_another_switch_on_its_own(self) -> None:
        def maybe(x: torch.Tensor, how: str) -> torch.Tensor:
            return x - x.mean() if how == "centred" else x

        wrapped = bucketed(maybe, dims={"x": {0: "t"}}, buckets=LADDER)
        x = torch.randn(3)
        assert torch.equal(wrapped(x, "plain"), x)
        with pytest.raises(PaddingLeakError):
            wrapped(x, how="centred")

    def test_never_and_always(self) -> None:
        def mean(x: torch.Tensor) -> torch.Tensor:
            return x.mean()

        x = torch.ones(3)
        never = bucketed(mean, dims={"x": {0: "t"}}, buckets=LADDER, check_padding="never")
        assert float(never(x)) == 0.75
        with pytest.raises(PaddingLeakError):
            never.verify(x)

        def sometimes(x: torch.Tensor) -> torch.Tensor:
            return x * 1 if float(x[0].abs()) > 0.5 else x - x.mean()

        always = bucketed(
            sometimes,
            dims={"x": {0: "t"}},
            buckets=LADDER,
            check_padding="always",
            outputs={0: "t"},
        )
        always(torch.tensor([1.0, 2.0, 3.0]))
        with pytest.raises(PaddingLeakError):
            always(torch.tensor([0.25, 2.0, 3.0]))

    def test_other_data_is_tried_again_for_a_bucket_whose_answer_depends_on_the_padding(
        self,
    ) -> None:
        """The function takes a minimum of long inputs only; one negative number hides the leak."""

        def function(x: torch.Tensor) -> torch.Tensor:
            return x.amin(1) if x.shape[1] > 8 else x[:, 0]

        wrapped = bucketed(function, dims=({1: "t"},), buckets=Buckets([8, 16]))
        wrapped(torch.tensor([[-1.0, 2.0, 3.0]]))
        with pytest.raises(PaddingLeakError, match="is positive"):
            wrapped(torch.tensor([[-1.0, *[2.0] * 9]]))

    def test_a_leak_that_only_the_values_of_the_padding_show_is_looked_for_with_more_padding(
        self,
    ) -> None:
        """One padded position adds 1e-6, a sixteenth of what is allowed at most; 128 add 1e-4."""

        def function(x: torch.Tensor) -> torch.Tensor:
            return x[:, :1] + 2e-6 * torch.sigmoid(x).sum(1, keepdim=True)

        wrapped = bucketed(function, dims=({1: "t"},), buckets=Buckets([256]))
        with torch.no_grad(), pytest.raises(PaddingLeakError):
            wrapped(torch.eye(1, 255))

    def test_inputs_are_cut_where_every_row_has_something_real(self) -> None:
        """A row without any real position would be averaged over padding, which is no leak."""

        def pooled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            weights = x.masked_fill(~mask, -1e9).softmax(1)
            # So little of the padding that nothing but a difference in the last digits is seen.
            return (weights * x).sum(1) + 1e-12 * torch.sigmoid(x).sum(1)

        wrapped = bucketed(
            pooled,
            dims={"x": {1: "t"}, "mask": {1: "t"}},
            buckets=Buckets([256]),
            mask={"mask": "real"},
        )
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(2, 200, generator=generator, dtype=torch.float64)
        mask = torch.ones(2, 200, dtype=torch.bool)
        mask[1, :150] = False
        assert torch.allclose(wrapped(x, mask), pooled(x, mask))

    def test_a_bias_in_an_additive_mask_is_real_and_minus_10000_is_not(self) -> None:
        given = torch.tensor([0.0, -3.0, -1e4, float("-inf"), torch.finfo(torch.float32).min])
        assert Mask("mask", "t", "additive").real(given).tolist() == [True, True, *[False] * 3]
