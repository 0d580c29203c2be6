"""verified: what differs follows the tensor, in any unit; rounding is no defect, a cast is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from support.miscompiling import spoiling, stats, verified_backend
from torchguard import MiscompilationWarning, verified
from torchguard.equivalence.compare import judge
from torchguard.equivalence.copies import run_on_copies
from torchguard.equivalence.outcome import Outcome
from torchguard.equivalence.perturb import not_by_rounding
from torchguard.verification.backend import Options, inner_of
from torchguard.verification.graph import copy_graph
from torchguard.verification.rounding import exact, perturbed_runs, policy_of

pytestmark = pytest.mark.usefixtures("fresh_reports")

# B batch, T time, C channels. Each ends in a mean loss, whose gradients are small.


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)
        self.layers = nn.Sequential(*layers, nn.Linear(64, 8))
        self.data = torch.randn(64, 32), torch.randint(0, 8, (64,))

    def forward(self, x: torch.Tensor, y: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), y) * unit


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.data = torch.randint(0, 50, (4, 12)), torch.randint(0, 50, (4, 12))

    def forward(self, x: torch.Tensor, y: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.layer(self.embed(x)))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()) * unit


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU()
        self.layers = nn.Sequential(*first, nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.SiLU())
        self.head = nn.Linear(16, 10)
        self.data = torch.randn(8, 3, 12, 12), torch.randint(0, 10, (8,))

    def forward(self, x: torch.Tensor, y: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(x).mean((2, 3))), y) * unit


MODELS = [Perceptron, Attention, Convolution]
ZERO_BY_ALGEBRA = {Convolution: 2}
"""The biases in front of a BatchNorm, whose gradients are noise."""


def traced(model: Any, backend: str) -> tuple[Any, Any, list[Any]]:
    """Return the graph of a model as Dynamo traced it, the same compiled, and its inputs."""
    found: list[tuple[Any, Any, list[Any]]] = []
    compile_ = inner_of(Options(backend=backend), {}).compile

    def keep(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        kept = copy_graph(graph)
        compiled = compile_(graph, examples)

        def run(*inputs: Any) -> Any:
            found.append((kept, compiled, list(inputs)))
            return kept(*inputs)

        return run

    torch._dynamo.reset()
    compiled_model: Any = torch.compile(model, backend=keep)
    compiled_model(*model.data, torch.tensor(1.0))
    (only,) = found
    return only


def spoiled(outcome: Outcome, key: Any, spoil: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
    gradient = outcome.gradients[key]
    assert gradient.value is not None
    changed = gradient._replace(value=spoil(gradient.value))
    return dataclasses.replace(outcome, gradients={**outcome.gradients, key: changed})


FAULTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda gradient: gradient * 1.1,
    lambda gradient: gradient.roll(1),
    torch.zeros_like,
    lambda gradient: torch.where(gradient.abs() == gradient.abs().max(), 1.2 * gradient, gradient),
)


class Narrow(Perceptron):
    """Computes in a narrow type: under autocast, or with its weights in that type."""

    def __init__(self, dtype: torch.dtype, *, autocast: bool) -> None:
        super().__init__()
        self.dtype, self.autocast = dtype, autocast
        if not autocast:
            self.to(dtype)
            self.data = self.data[0].to(dtype), self.data[1]

    def forward(self, x: torch.Tensor, y: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.autocast):
            return super().forward(x, y, unit)


def missed_faults(model: Any, backend: str, units: Any, autocast: Any = ()) -> set[int]:
    """Return how many faults in gradients are not found, of each kind and unit.

    Rounding, in each of these units, is none.
    """
    graph, compiled, inputs = traced(model, backend)
    places = [place for place, value in enumerate(inputs) if getattr(value, "ndim", 1) == 0]
    (place,) = [p for p in places if inputs[p].is_floating_point()]
    policy = policy_of(graph, inputs)
    assert policy.autocast == set(autocast)
    missed = set()
    for unit, is_spoiled in units:
        inputs[place] = torch.tensor(unit)
        eager = run_on_copies(graph, inputs)
        other = run_on_copies(compiled, inputs, reference=eager)
        in_double = functools.cache(lambda: exact(graph, inputs))
        found = judge(eager, other, policy, in_double)
        assert all(each.small for each in found)
        assert not_by_rounding(found, eager, other, perturbed_runs(graph, inputs, (), eager)) == []
        assert len(eager.gradients) >= 8
        for spoil in FAULTS if is_spoiled else ():
            judged = (
                judge(eager, spoiled(other, key, spoil), policy, in_double)
                for key in other.gradients
            )
            missed.add(sum(not each for each in judged))
    return missed


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [Perceptron, Convolution, pytest.param(Attention, marks=pytest.mark.slow)]
)
def test_a_fault_in_any_gradient_is_found_in_any_unit_and_rounding_is_none(
    kind: Any, backend: str
) -> None:
    torch.manual_seed(0)
    units = [(unit, True) for unit in (1.0, 1e-4, 1e-6, 1e-12, 1e12)]
    assert max(missed_faults(kind(), backend, units)) <= ZERO_BY_ALGEBRA.get(kind, 0)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "autocast", "units"),
    [
        (torch.bfloat16, False, (1.0, 1e-4, 1e-6)),
        (torch.bfloat16, True, (1.0, 1e-4, 1e-6)),
        (torch.float16, True, (1.0,)),
    ],
)
def test_a_fault_in_a_gradient_is_found_in_narrow_types(
    dtype: torch.dtype, autocast: bool, units: tuple[float, ...], backend: str
) -> None:
    """Not in float16 below 1e-5, where eager's gradients are mostly rounding."""
    torch.manual_seed(0)
    tried = [(unit, unit in units) for unit in (1.0, 1e-2, 1e-4, 1e-6)]
    model = Narrow(dtype, autocast=autocast)
    assert missed_faults(model, backend, tried, [dtype] * autocast) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_not_a_mismatch(
    kind: Any, dtype: torch.dtype, recwarn: pytest.WarningsRecorder
) -> None:
    """Compiled by inductor, whose kernels keep more digits than eager between two operations.

    Below 1e-5 float16 has next to none, which is why a loss is scaled there.
    """
    for unit in (1.0, 1e-2) if dtype is torch.float16 else (1.0, 1e-2, 1e-4, 1e-6):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = kind()
        checked = verified(backend="inductor")(model)
        with torch.autocast("cpu", dtype):
            loss = checked(*model.data, torch.tensor(unit))
        loss.backward()
    assert [each for each in recwarn if each.category is MiscompilationWarning] == []


# --- casts of the program


def without_casts(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
    """A backend that leaves casts to a narrower type out, as inductor does."""
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target in {"half", "bfloat16"}:
            node.target = "float"
    graph.recompile()
    return graph.forward


def half(x: torch.Tensor) -> torch.Tensor:
    return x.half().float() * 3


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.round(x / 1e-4).half() * torch.tensor(1e-4)


def projected(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).bfloat16() + x[0]


CASTS = [half, quantized, projected]


@pytest.mark.parametrize("function", CASTS)
@pytest.mark.parametrize("size", [4, 100])
def test_a_cast_that_is_left_out_is_a_mismatch(function: Any, size: int) -> None:
    """https://github.com/pytorch/pytorch/issues/185337"""
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    checked = verified(backend=without_casts)(function)
    with pytest.warns(MiscompilationWarning):
        assert torch.equal(checked(x), function(x))
    right = verified(backend="aot_eager")(function)
    right(x)
    assert stats(right).verified == 1


# --- autocast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_backward_that_runs_in_a_narrower_type_than_eagers_is_a_mismatch(
    dtype: torch.dtype,
) -> None:
    """https://github.com/pytorch/pytorch/issues/179804"""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(32, 64)

    def outside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), weight).relu()

    def gradient(function: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            loss = function(x).mean()
        (found,) = torch.autograd.grad(loss, weight)
        return found

    torch._dynamo.reset()
    bare = gradient(torch.compile(outside, backend="aot_eager"))
    torch._dynamo.reset()
    checked = verified(backend="aot_eager")(outside)
    if torch.equal(bare, gradient(outside)):
        checked(x)
        pytest.skip("this torch runs the backward in the type of the forward")
    with pytest.warns(MiscompilationWarning):
        torch.testing.assert_close(gradient(checked), gradient(outside))


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


def test_a_wrong_graph_of_a_function_that_amplifies_its_last_bits_is_a_mismatch() -> None:
    def amplified(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(weight * 1e8) * x

    weight = torch.rand(8, requires_grad=True)
    wrong = verified(backend=spoiling(lambda outputs, _: [torch.cos(outputs[0]) * 0.7]))(amplified)
    with pytest.warns(MiscompilationWarning):
        torch.testing.assert_close(wrong(weight, torch.ones(8)), amplified(weight, torch.ones(8)))
