"""verified: a rounding error is no defect, also at a discontinuity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.miscompiling import spoiling, stats, verified_backend
from torchguard import MiscompilationWarning, verified

if TYPE_CHECKING:
    from collections.abc import Callable

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


def a_digit_further(digit_in_double: float) -> Any:
    """Make a backend whose weights are a digit larger than they should be."""
    digits = {torch.float32: 2.0**-22, torch.float64: digit_in_double}

    def planted(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        def run(*inputs: Any) -> Any:
            larger = [
                value * (1 + digits[value.dtype])
                if isinstance(value, torch.Tensor) and value.requires_grad
                else value
                for value in inputs
            ]
            return graph(*larger)

        return run

    return planted


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
@pytest.mark.parametrize("digit_in_double", [2.0**-51, 2.0**-22])
def test_a_discontinuity_within_the_rounding_error_is_a_mismatch_if_wrong_in_double_too(
    discontinuous: Callable[..., Any], digit_in_double: float
) -> None:
    checked = verified(backend=a_digit_further(digit_in_double))(discontinuous)
    if digit_in_double < 2.0**-50:
        checked(below(), torch.tensor([1.0, 2.0]))
        assert stats(checked).verified == 1
    else:
        with pytest.warns(MiscompilationWarning):
            checked(below(), torch.tensor([1.0, 2.0]))


def test_many_discontinuities_at_once_raise_no_false_alarm() -> None:
    weight = torch.full((12,), 1 - 2.0**-24, requires_grad=True)
    checked = verified(backend=a_digit_further(2.0**-51))(compared)
    checked(weight, torch.ones(12))
    (record,) = stats(checked).graphs
    assert record.status == "verified"
    assert record.reason.startswith("rounding decides at a discontinuity: output 1: ")


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
def test_what_differs_by_more_than_rounding_is_a_mismatch_though_double_is_right(
    function: Any, numbers: list[Any], spoil: Any, match: str
) -> None:
    def in_float32(outputs: list[Any], inputs: list[Any]) -> list[Any]:
        wide = any(value.dtype == torch.float64 for value in inputs)
        return outputs if wide else spoil(outputs)

    weight = torch.tensor(numbers, requires_grad=True)
    x = torch.eye(4) if function is chain else torch.ones(len(numbers))
    with pytest.warns(MiscompilationWarning, match=match):
        found = verified(backend=spoiling(in_float32))(function)(weight, x)
    torch.testing.assert_close(found, function(weight, x))


@pytest.mark.parametrize("when", ["compiling", "running", "copying"])
def test_what_double_precision_can_not_tell_is_a_mismatch(when: str) -> None:
    further = a_digit_further(2.0**-51)

    def planted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        run = further(graph, inputs)
        wide = any(value.dtype == torch.float64 for value in inputs)
        if wide and when == "compiling":
            raise torch.OutOfMemoryError

        def run_or_not(*given: Any) -> Any:
            if wide and when == "running":
                raise torch.OutOfMemoryError
            return run(*given)

        return run_or_not

    def discontinuous(
        weight: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> Any:
        return stopped(weight, x), a + 1, b + 1

    shared = torch.ones(2)
    other = shared.view(torch.int32) if when == "copying" else shared.clone()
    with pytest.warns(MiscompilationWarning):
        verified(backend=planted)(discontinuous)(below(), torch.ones(2), shared, other.detach())


def test_a_discontinuity_of_a_graph_with_dynamic_shapes_is_a_mismatch() -> None:
    further = a_digit_further(2.0**-51)

    def planted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        dynamic = any(isinstance(value, torch.SymInt) for value in inputs)
        return further(graph, inputs) if dynamic else graph.forward  # so right in double

    def discontinuous(weight: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.relu(weight * x - 1) * x.shape[0]

    with pytest.warns(MiscompilationWarning):
        torch.compile(discontinuous, backend=verified_backend(planted), dynamic=True)(
            below(), torch.ones(2)
        )


def test_a_discontinuity_draws_no_random_number_of_the_callers() -> None:
    further = a_digit_further(2.0**-51)

    def drawing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if inputs[0].dtype == torch.float64:
            torch.rand(3)
        return further(graph, inputs)

    checked, before = verified(backend=drawing)(stopped), torch.get_rng_state()
    checked(below(), torch.ones(2))
    assert stats(checked).graphs[0].reason
    assert torch.equal(torch.get_rng_state(), before)
