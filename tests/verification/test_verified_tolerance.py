"""verified: what differs follows the tensor, in any unit; casts of the program round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from support.miscompiling import stats
from torchguard import MiscompilationWarning, verified
from torchguard.defects.probes.gradients import _RunningNorm
from torchguard.equivalence.compare import judge
from torchguard.equivalence.copies import run_on_copies
from torchguard.equivalence.outcome import Outcome
from torchguard.verification.backend import inner_of
from torchguard.verification.graph import copy_graph
from torchguard.verification.rounding import exact, policy_of

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
    compile_ = inner_of(backend, {}, None).compile

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
        assert judge(eager, other, policy, in_double) == ()
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
    assert missed_faults(kind(), backend, units) == {ZERO_BY_ALGEBRA.get(kind, 0)}


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


def test_the_gradient_of_a_small_loss_is_compared() -> None:
    """Of a module that writes a statistic (https://github.com/pytorch/pytorch/pull/197039)."""
    plain, norm = _RunningNorm(), _RunningNorm()
    checked = verified(backend="aot_eager")(lambda x: norm(x) * 1e-6)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    (plain(x) * 1e-6).backward()
    with pytest.warns(MiscompilationWarning):
        checked(x).backward()
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad)


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


def test_an_operation_between_two_of_one_narrow_type_may_stay_wide() -> None:
    def wide(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        return lambda *given: [out.bfloat16() for out in graph(*(v.float() for v in given))]

    checked = verified(backend=wide)(lambda x: (x.exp() * 1.7 + x).sin())
    checked(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert stats(checked).verified == 1


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
