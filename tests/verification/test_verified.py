"""verified: a planted defect is found, reported and replaced."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.child_process import run_python
from support.miscompiling import inputs, one_value, spoiling, verified_backend, workload
from torchguard import MiscompilationWarning, verified
from torchguard.defects.probes.gradients import _RunningNorm
from torchguard.errors import MiscompilationError
from torchguard.verification.check import GraphCheck

pytestmark = pytest.mark.usefixtures("fresh_reports")


def output(place: int, change: Callable[[Any, list[Any]], Any]) -> Any:
    """Return what spoils an output, given it and the inputs."""

    def spoil(outputs: list[Any], inputs: list[Any]) -> Any:
        outputs[place] = change(outputs[place], inputs)
        return outputs

    return spoil


def with_element(value: float) -> Any:
    def change(output: torch.Tensor, _: Any) -> torch.Tensor:
        output = output.clone()
        output.data[1, 1] = value
        return output

    return output(0, change)


def written(place: int, *at: int, value: float) -> Any:
    """Return what writes to an element of an input."""

    def spoil(outputs: list[Any], inputs: list[Any]) -> Any:
        inputs[place].data[at] = value
        return outputs

    return spoil


def raises(*_: Any) -> Any:
    raise RuntimeError("no kernel")


def through(backward: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return what has an input pass through a function that has another gradient."""

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return backward(gradient)

    def spoil(graph: Any, inputs: list[Any]) -> Any:
        inputs[0] = Spoiled.apply(inputs[0])  # type: ignore[no-untyped-call]
        return graph(*inputs)

    return spoiling(spoil, after=False)


def one_larger(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.index_put((torch.tensor([0]), torch.tensor([0])), gradient[0, 0] + 0.01)


ONE = "1 of 24 elements"
DEFECTS: dict[str, tuple[Any, str]] = {
    "one value": (spoiling(one_value), f"output 0: {ONE} differ, the largest by 0.01"),
    "a whole number": (
        spoiling(output(1, lambda out, _: out + 1)),
        "output 1: 1 of 1 elements differ, the largest by 1",
    ),
    "a mutated input": (spoiling(written(1, 0, 0, value=9)), f"after the call: {ONE} differ"),
    "an untouched input": (spoiling(written(0, -1, -1, value=0)), f"after the call: {ONE} differ"),
    "an alias of an input": (
        spoiling(output(2, lambda _, inputs: inputs[1])),
        "output 2: shares memory with state",
    ),
    "an alias of an output": (
        spoiling(lambda outputs, _: [outputs[3], *outputs[1:]]),
        "output 0: 24 of 24 elements differ",
    ),
    "a lost alias": (
        spoiling(output(4, lambda out, _: out.clone())),
        "output 4: does not share memory with state",
    ),
    "a NaN": (spoiling(with_element(math.nan)), f"{ONE} are NaN in one only"),
    "a dtype": (spoiling(output(0, lambda out, _: out.double())), "output 0: "),
    "a shape": (spoiling(output(0, lambda out, _: out[None])), "output 0: "),
    "requires_grad": (
        spoiling(output(0, lambda out, _: out.detach())),
        "output 0: requires_grad False, eager has True",
    ),
    "an output too few": (spoiling(lambda outputs, _: outputs[:-1]), ""),
    "an exception": (spoiling(raises), "the run: raises RuntimeError: no kernel"),
    "a gradient": (through(one_larger), f"gradient of x: {ONE} differ"),
    "a backward pass": (through(raises), "the backward pass: raises RuntimeError: no kernel"),
}


def results_of(function: Callable[..., Any]) -> list[Any]:
    x, state = inputs()
    outputs = function(x, state)
    (outputs[0].sum() + outputs[3].sum()).backward()
    return [*outputs, state, x.grad]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_and_what_runs_is_right(name: str) -> None:
    planted, where = DEFECTS[name]
    backend = verified_backend(planted)
    compiled = torch.compile(workload, backend=backend)
    with pytest.warns(MiscompilationWarning, match="compiled workload wrong") as caught:
        found = results_of(compiled)
    assert len(caught) == 1
    assert where in str(caught[0].message)
    assert caught[0].filename == __file__
    line = Path(__file__).read_text().splitlines()[caught[0].lineno - 1]
    assert line.strip() == "outputs = function(x, state)"
    torch.testing.assert_close(found, results_of(workload), rtol=0, atol=0)
    (record,) = backend.stats().graphs
    assert (record.status, record.runs) == ("mismatched", "eager")
    torch.testing.assert_close(results_of(compiled), results_of(workload), rtol=0, atol=0)


def test_the_strides_of_a_gradient_are_not_compared() -> None:
    """AOTAutograd chooses them; what a leaf accumulates has the leaf's own."""
    backend = verified_backend(through(lambda gradient: gradient.t().contiguous().t()))
    x, _ = inputs()
    torch.compile(lambda x: x.sin().sum(), backend=backend)(x).backward()
    assert x.grad is not None
    assert x.grad.stride() == x.stride()
    assert backend.stats().verified == 1


# --- what happens on a difference


def test_raise_refuses_to_run_a_wrong_graph() -> None:
    backend = verified_backend(spoiling(one_value), on_mismatch="raise")
    compiled = torch.compile(workload, backend=backend)
    for _ in range(2):
        with pytest.raises(MiscompilationError, match="compiled workload wrong"):
            results_of(compiled)
    assert backend.stats().graphs[0].runs == "nothing"


def test_warn_runs_the_wrong_graph_and_says_so_once() -> None:
    backend = verified_backend(spoiling(one_value), on_mismatch="warn", calls=3)
    compiled = torch.compile(workload, backend=backend)
    with pytest.warns(MiscompilationWarning, match="runs all the same") as caught:
        found = [results_of(compiled) for _ in range(3)]
    assert len(caught) == 1
    assert not torch.equal(found[2][0], results_of(workload)[0])


def test_the_reproducer_shows_the_difference(tmp_path: Path) -> None:
    norm = verified(backend="aot_eager")(_RunningNorm())
    with pytest.warns(MiscompilationWarning) as caught:
        norm(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).backward()
    script = tmp_path / "reproducers" / "_RunningNorm.py"
    assert f"reproducer: {script}" in str(caught[0].message)
    assert "torchguard" not in script.read_text()
    done = run_python(script.read_text(), folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "the largest difference is" in done.stdout


# --- which calls are checked


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_defect_that_shows_in_the_second_call_is_found_with_calls_2(*, dynamic: bool) -> None:
    """A graph with dynamic shapes stays right for every size."""

    def at_zero(outputs: list[Any], given: list[Any]) -> Any:
        x = next(value for value in given if isinstance(value, torch.Tensor))
        return [outputs[0] + 1] if x.sum() == 0 else outputs

    backend = verified_backend(spoiling(at_zero), calls=2)
    compiled = torch.compile(lambda x: x.expand(2, -1) * 2, backend=backend, dynamic=dynamic)
    compiled(torch.ones(5))
    size = 6 if dynamic else 5
    with pytest.warns(MiscompilationWarning):
        assert compiled(torch.zeros(size)).tolist() == [[0] * size] * 2
    assert compiled(torch.ones(size + dynamic)).tolist() == [[2] * (size + dynamic)] * 2
    (record,) = backend.stats().graphs
    assert (record.status, record.runs) == ("mismatched", "eager")


def test_nothing_is_kept_alive() -> None:
    def checks() -> list[GraphCheck]:
        # By type: isinstance() asks a dead weakref.proxy for its class, which raises.
        return [value for value in gc.get_objects() if type(value) is GraphCheck]

    # What other tests have compiled may still wait for a first call.
    before = weakref.WeakSet(checks())
    backend = verified_backend("aot_eager")
    compiled = torch.compile(workload, backend=backend)
    x, state = inputs()
    outputs = compiled(x, state)
    alive = [weakref.ref(value) for value in (x, state, *outputs)]
    del x, state, outputs
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    # The graph writes its inputs: another pattern of inputs that overlap would be checked.
    before = weakref.WeakSet(checks())
    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3))
    assert [check for check in checks() if check not in before] == []


@pytest.mark.parametrize("compile_", [torch.compile, verified])
def test_the_guards_of_dynamo_are_not_kept(compile_: Any) -> None:
    """PyTorch 2.6 waits for itself in ``torch._dynamo.reset()`` if compiled code holds them."""
    kept: list[weakref.ref[Any]] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        kept.append(weakref.ref(torch._guards.TracingContext.get().guards_context))
        return graph

    def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(1) + y  # a graph that writes stays under check

    compiled = compile_(writes, backend=note)
    for size in (3, 2, 5):
        compiled(torch.ones(size), torch.ones(size))
    gc.collect()
    assert len(kept) == 2
    assert [ref() for ref in kept] == [None, None]
