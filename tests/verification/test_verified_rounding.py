"""verified: a rounding error is no defect, also at a discontinuity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.miscompiling import spoiling, stats, verified_backend
from torchguard import MiscompilationWarning, verified

pytestmark = pytest.mark.usefixtures("fresh_reports")


# --- rounding is no defect


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w) * 1.7 + x).sum(0) / 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_rounded_otherwise_is_no_mismatch_and_a_defect_is_one(dtype: torch.dtype) -> None:
    def wide(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        """Compute in double precision and round once, better than eager does."""
        return lambda *values: [out.to(dtype) for out in graph(*(v.double() for v in values))]

    torch.manual_seed(0)
    x, w = (torch.randn(64, 64).to(dtype) for _ in "xw")
    backend = verified_backend(wide)
    torch.compile(chain, backend=backend)(x, w)
    assert backend.stats().verified == 1
    torch._dynamo.reset()
    shifted = verified_backend(spoiling(lambda outputs, _: [outputs[0].roll(1)]))
    with pytest.warns(MiscompilationWarning):
        torch.testing.assert_close(torch.compile(chain, backend=shifted)(x, w), chain(x, w))


# --- at a discontinuity the last digit decides


def a_digit_further(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
    """A backend whose weights are a digit larger than they should be."""

    def run(*inputs: Any) -> Any:
        given = [value * (1 + 2.0**-22) if value.requires_grad else value for value in inputs]
        return graph(*given)

    return run


def stopped(weight: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.relu(weight * x - 1)  # a gradient of zeros, or of x


def chosen(weight: torch.Tensor, x: torch.Tensor) -> Any:
    return (weight * x)[0] * 0, torch.where(weight * x > 1, 7, 3)


def compared(weight: torch.Tensor, x: torch.Tensor) -> Any:
    return (weight * x)[0] * 0, weight * x > 1


def below() -> torch.Tensor:
    """A weight a digit below a discontinuity, and one far above."""
    return torch.tensor([1 - 2.0**-24, 2.0], requires_grad=True)


@pytest.mark.parametrize("discontinuous", [stopped, chosen, compared])
def test_a_discontinuity_within_the_rounding_error_is_no_mismatch(
    discontinuous: Callable[..., Any],
) -> None:
    before = torch.get_rng_state()
    checked = verified(backend=a_digit_further)(discontinuous)
    checked(below(), torch.tensor([1.0, 2.0]))
    (record,) = stats(checked).graphs
    assert record.status == "verified"
    assert record.reason.startswith("rounding decides at a discontinuity: ")
    assert torch.equal(torch.get_rng_state(), before)


def test_many_discontinuities_at_once_raise_no_false_alarm() -> None:
    weight = torch.full((12,), 1 - 2.0**-24, requires_grad=True)
    checked = verified(backend=a_digit_further)(compared)
    checked(weight, torch.ones(12))
    assert stats(checked).verified == 1


def named(weight: torch.Tensor, x: torch.Tensor) -> Any:
    return (weight * x)[0] * 0, (weight * x).argmax()


def larger(outputs: list[Any]) -> list[Any]:
    return [outputs[0] + 0.01]


@pytest.mark.parametrize(
    ("function", "numbers", "spoil", "match"),
    [
        # What rounding never does, though the graph is discontinuous.
        (stopped, [0.7] * 4, larger, "the largest by 0.01"),
        (chain, [[0.7] * 4] * 4, larger, "the largest by 0.01"),
        # A large number excuses no small one: rounding moves the first by more than 3.
        (
            lambda w, x: w * x,
            [1e8, 1.0],
            lambda outputs: [outputs[0] + torch.tensor([0.0, 3.0])],
            "1 of 2 elements differ, the largest by 3",
        ),
        # A discontinuity excuses no number that eager never names.
        (named, [1.0, 1.0, 0.5], lambda outputs: [outputs[0], torch.tensor(-7)], "output 1"),
    ],
)
def test_what_differs_by_more_than_rounding_is_a_mismatch(
    function: Any, numbers: list[Any], spoil: Any, match: str
) -> None:
    weight = torch.tensor(numbers, requires_grad=True)
    x = torch.eye(4) if function is chain else torch.ones(len(numbers))
    backend = spoiling(lambda outputs, _: spoil(outputs))
    with pytest.warns(MiscompilationWarning, match=match):
        found = verified(backend=backend)(function)(weight, x)
    torch.testing.assert_close(found, function(weight, x))
