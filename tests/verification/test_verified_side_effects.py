"""verified: a check has no side effects."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from support.miscompiling import inputs, spoiling, stats, workload
from torchguard import verified, verified_backend
from torchguard.verification.check import GraphCheck
from torchguard.verification.graph import why_not_twice

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("fresh_reports")


# --- the caller sees one run


def test_random_numbers_are_those_of_one_run() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4)

    backend = verified_backend("aot_eager")
    compiled = torch.compile(noisy, backend=backend)
    torch.manual_seed(0)
    found = compiled(torch.zeros(4)), torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(found[0], noisy(torch.zeros(4)))
    assert torch.equal(found[1], torch.rand(1))
    assert backend.stats().graphs[0].status == "verified"


def test_random_operators_of_a_backend_with_its_own_are_left_unverified() -> None:
    backend = verified_backend(spoiling(lambda outputs, _: outputs))
    torch.compile(lambda x: nn.functional.dropout(x, 0.5), backend=backend)(torch.ones(4))
    (record,) = backend.stats().graphs
    assert record.status == "unverified"
    assert "random numbers" in record.reason


def test_gradients_are_accumulated_once_and_hooks_called_once() -> None:
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2))
    eager = copy.deepcopy(model)
    checked: nn.Module = verified(backend="aot_eager")(model)
    assert checked is model
    calls = []
    first.weight.register_hook(lambda gradient: calls.append("tensor"))
    first.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    x = torch.randn(8, 4)
    for module in (eager, model):
        module(x).sum().backward()
    assert calls == ["tensor", "accumulated"]
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)
    assert [graph.status for graph in stats(model).graphs] == ["verified"]


def test_hooks_on_saved_tensors_see_one_run() -> None:
    def packed(function: Callable[..., Any]) -> int:
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return tensor

        x = torch.randn(4, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(x).sum().backward()
        return count

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x.exp()).sum()

    bare = packed(torch.compile(function, backend="aot_eager"))
    torch._dynamo.reset()
    backend = verified_backend("aot_eager")
    assert packed(torch.compile(function, backend=backend)) == bare
    assert backend.stats().verified == 1


def test_what_communicates_is_left_unverified() -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    reduce = torch.ops._c10d_functional.all_reduce.default
    graph.output((graph.call_function(reduce, (x, "sum", "0")),))
    reason = why_not_twice(torch.fx.GraphModule({}, graph))
    assert reason is not None
    assert "communicates with other processes" in reason


def test_what_can_not_be_copied_is_left_unverified() -> None:
    sparse = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for given, reason in ((sparse, "sparse"), (nested, "NestedTensor")):
        backend = verified_backend("aot_eager")
        torch.compile(lambda x: x * 2, backend=backend)(given)
        for record in backend.stats().graphs:
            assert record.status == "unverified", record
            assert reason in record.reason


def test_what_eager_does_not_do_twice_is_no_mismatch() -> None:
    counted: list[int] = []

    def unsteady(x: torch.Tensor) -> torch.Tensor:
        counted.append(1)
        return x + len(counted)

    unsteady.__module__ = "math"  # functions of which torchguard expects that they only compute
    graph = torch.fx.Graph()
    graph.output((graph.call_function(unsteady, (graph.placeholder("x"),)),))
    backend = verified_backend(spoiling(lambda outputs, _: outputs))
    x = torch.ones(3)
    backend(torch.fx.GraphModule({}, graph), [x])(x)
    (record,) = backend.stats().graphs
    assert (record.status, record.runs) == ("unverified", "planted")
    assert record.reason == "eager itself does not give the same result twice"


def test_a_graph_for_which_memory_does_not_suffice_twice_runs_unverified() -> None:
    calls = []

    def twice(outputs: list[Any], _: list[Any]) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return outputs

    backend = verified_backend(spoiling(twice))
    assert torch.compile(lambda x: (x * 2,), backend=backend)(torch.ones(1))[0] == 2
    (record,) = backend.stats().graphs
    assert (record.status, record.runs) == ("unverified", "planted")
    assert record.reason == "out of memory while re-running the graph for verification"


def test_hooks_of_a_parameter_that_the_graph_owns_are_not_called_for_a_check() -> None:
    weight = nn.Parameter(torch.ones(3))
    seen: list[torch.Tensor] = []
    weight.register_hook(seen.append)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.mul, (x, graph.get_attr("weight")))
    graph.output((graph.call_function(torch.sum, (product,)),))
    backend = verified_backend("eager")
    given = torch.ones(3)
    backend(torch.fx.GraphModule({"weight": weight}, graph), [given])(given)[0].backward()
    assert len(seen) == 1
    assert backend.stats().graphs[0].reason == "a tensor that the graph owns has hooks"


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
    assert [check for check in checks() if check not in before] == []
