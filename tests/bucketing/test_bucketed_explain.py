"""What the errors of bucketed say: the operator, the user's line, the mask, the line to type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchguard import Buckets, PaddingLeakError, bucketed

LADDER = Buckets([8, 16])
IN_TIME: Any = {"dims": {"x": {1: "t"}}, "buckets": LADDER}


def refused(function: Callable[..., Any], *given: Any, **options: Any) -> str:
    with pytest.raises(PaddingLeakError) as error:
        bucketed(function, **{**IN_TIME, **options})(*given)
    return str(error.value)


def two_steps(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.softmax(1) + y.mean(1, keepdim=True)


class TestOperator:
    def test_the_first_that_differs_is_named_with_its_line(self) -> None:
        _, begin = inspect.getsourcelines(two_steps)
        text = refused(two_steps, torch.randn(2, 5))
        assert f"It first differs after softmax, test_bucketed_explain.py:{begin + 2}. " in text

    @pytest.mark.parametrize(
        ("function", "named"),
        [
            (lambda x: (x * 2).flip(1) + 1, "flip"),
            (lambda x: functional.layer_norm(x, x.shape[1:]), "native_layer_norm"),
            (lambda x: (x - x.std(1, keepdim=True)).cos(), "std"),
            (nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU(), nn.InstanceNorm1d(2)), "batch_norm"),
        ],
        ids=["flip", "layer_norm", "std", "instance_norm"],
    )
    def test_of_several(self, function: Any, named: str) -> None:
        dims = {"dims": ({1: "t"},)}
        x = torch.randn(2, 5)
        if isinstance(function, nn.Module):
            dims, x = {"dims": ({2: "t"},)}, torch.randn(2, 2, 5)
        assert f"first differs after {named}" in refused(function, x, **dims).replace(
            "native_b", "b"
        )

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_real_is_what_is_no_padding_on_either_side(self, side: Any) -> None:
        text = refused(lambda x: (x + 1).relu().softmax(1), torch.randn(2, 5), side=side)
        assert "first differs after softmax" in text

    def test_an_integer_that_differs_is_not_named_before_a_result(self) -> None:
        def counts(x: torch.Tensor) -> torch.Tensor:
            (x == 0).sum()
            return x.mean(1)

        assert "first differs after mean" in refused(counts, torch.randn(2, 5))

    def test_a_padded_run_that_goes_another_way_is_said_to(self) -> None:
        def branches(x: torch.Tensor) -> torch.Tensor:
            return x.exp() if bool((x == 0).any()) else x.sin()

        text = refused(branches, torch.randn(2, 5), outputs={1: "t"})
        assert "Padded it goes another way: exp, test_bucketed_explain.py:" in text

    def test_what_other_values_in_the_padding_show_is_found_too(self) -> None:
        def first(x: torch.Tensor) -> torch.Tensor:
            return x[:, 0] + (x > 3).all(1)

        text = refused(first, torch.tensor([[4.0, 5.0, 9.0]]))
        assert "first differs after" in text

    def test_nothing_is_left_changed(self) -> None:
        model = nn.BatchNorm1d(3)
        before = {name: each.clone() for name, each in model.state_dict().items()}
        x, state = torch.randn(2, 3, 5), torch.get_rng_state()
        assert "native_batch_norm" in refused(model, x, dims=({2: "t"},))
        assert torch.equal(torch.get_rng_state(), state)
        for name, each in model.state_dict().items():
            assert torch.equal(each, before[name])


class TestMask:
    @staticmethod
    def mean(x: torch.Tensor, ignore: torch.Tensor | None = None) -> torch.Tensor:
        """Average what is not to be ignored."""
        kept = torch.ones_like(x) if ignore is None else (ignore == 0).to(x.dtype)
        return (x * kept).sum(1) / kept.sum(1)

    def test_the_other_way_round_is_named(self) -> None:
        text = refused(self.mean, torch.randn(2, 5), mask="ignore")
        assert "does True mean padding there? mask={'ignore': 'padding'}" in text
        right = bucketed(self.mean, mask={"ignore": "padding"}, **IN_TIME)
        x = torch.randn(2, 5)
        torch.testing.assert_close(right(x), x.mean(1))

    def test_of_the_callers_is_named_too(self) -> None:
        dims = {"x": {1: "t"}, "ignore": {1: "t"}}
        given = torch.randn(2, 5), torch.tensor([[0, 0, 0, 0, 1]] * 2)
        text = refused(self.mean, *given, dims=dims, mask="ignore")
        assert "mask={'ignore': 'padding'}" in text

    def test_that_is_right_is_not_blamed(self) -> None:
        def flipped(x: torch.Tensor, m: torch.Tensor | None = None) -> torch.Tensor:
            return (x if m is None else x * m).flip(1)

        assert "other way round" not in refused(flipped, torch.randn(2, 5), mask="m")

    @pytest.mark.parametrize("act", [functional.relu, functional.gelu])
    def test_minus_10000_in_scores_is_no_leak(self, act: Any) -> None:
        """Data whose scores are as large would be one, and is not tried where there is a mask."""
        torch.manual_seed(0)
        project = nn.Linear(16, 48)

        def attend(x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            q, k, v = project(x).chunk(3, -1)
            scores = q @ k.transpose(1, 2) / 4
            if mask is not None:
                scores = scores + (1 - mask.to(x.dtype))[:, None] * -1e4
            return act(scores.softmax(-1) @ v)

        x = torch.rand(2, 5, 16)
        torch.testing.assert_close(bucketed(attend, mask="mask", **IN_TIME)(x), attend(x))


class TestLineToType:
    def test_dims_turned_around(self) -> None:
        wrong: Any
        for wrong, right in (({"x": {"t": 0}}, r"\{0: 't'\}"), ({"x": 0}, r"\{'x': \{0: 't'\}\}")):
            with pytest.raises(TypeError, match=f"dimension and then its name: {right}$"):
                bucketed(lambda x: x, dims=wrong, buckets=LADDER)

    def test_no_dims(self) -> None:
        nothing: Any = {}
        with pytest.raises(TypeError, match=r"Write bucketed\(function, dims=\{'x': \{1: 't'\}\}"):
            bucketed(lambda x: x, **nothing)

    @pytest.mark.parametrize(
        ("name", "right"),
        [("inductor", "{'backend': 'inductor'}"), ("max-autotune", "{'mode': 'max-autotune'}")],
    )
    def test_compile_is_a_name(self, name: Any, right: str) -> None:
        with pytest.raises(TypeError, match=f"compile={right}"):
            bucketed(lambda x: x, compile=name, **IN_TIME)

    def test_a_call_without_its_argument(self) -> None:
        wrapped: Any = bucketed(two_steps, **IN_TIME)
        with pytest.raises(TypeError, match="the call is missing the argument 'x'"):
            wrapped()
