"""What the errors of bucketed say: the operator, the user's line, the mask, the line to type."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

from support.bucketed import in_time, leak


def two_steps(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.softmax(1) + y.mean(1, keepdim=True)


class TestOperator:
    def test_the_first_that_differs_is_named_with_its_line(self) -> None:
        _, begin = inspect.getsourcelines(two_steps)
        text = leak(two_steps, torch.randn(2, 5))
        assert f"It first differs after softmax, test_bucketed_explain.py:{begin + 2}. " in text

    @pytest.mark.parametrize(
        ("function", "named"),
        [
            (lambda x: (x * 2).flip(-1) + 1, "flip"),
            (nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU(), nn.InstanceNorm1d(2)), "batch_norm"),
        ],
        ids=["flip", "instance_norm"],
    )
    def test_of_several(self, function: Any, named: str) -> None:
        text = leak(function, torch.randn(2, 2, 5), dims=({-1: "t"},))
        assert f"first differs after {named}" in text.replace("native_b", "b")

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_real_is_what_is_no_padding_on_either_side(self, side: Any) -> None:
        text = leak(lambda x: (x + 1).relu().softmax(1), torch.randn(2, 5), side=side)
        assert "first differs after softmax" in text

    def test_an_integer_that_differs_is_not_named_before_a_result(self) -> None:
        def counts(x: torch.Tensor) -> torch.Tensor:
            (x == 0).sum()
            return x.mean(1)

        assert "first differs after mean" in leak(counts, torch.randn(2, 5))


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
