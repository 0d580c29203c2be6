"""verified beside other parts of torch: it works with them, and the caller sees one run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.miscompiling import right, spoiling, stats, verified_backend, workload, wrong
from torchguard import MiscompilationWarning, sliced_assign, sliced_assign_, verified
from torchguard.verification.graph import why_not_twice

pytestmark = pytest.mark.usefixtures("fresh_reports")


# --- other parts of torch


def _optimizer() -> Callable[[], Any]:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.arange(3.0)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    return lambda: (optimizer.step(), weight.detach().clone())[1]


def with_checkpoint(layer: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(lambda value: layer(value).sin(), x, use_reentrant=False).sum()


def aliased(base: torch.Tensor) -> Any:
    row, column = base[1], base[:, 2]
    row.mul_(0.5)
    return column.sum(), base.t(), row


def no_grad(x: torch.Tensor) -> Any:
    with torch.no_grad():
        x.mul_(0.5)
    return x * 2, torch.zeros(0, 3) + 1, torch.zeros(3, 0).sum()


def _write_through(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    row.add_(1)
    return (x * x).sum()


def differentiable_view(leaf: torch.Tensor) -> Any:
    x = leaf * 2
    return _write_through(x, x[0])


PARTS: list[tuple[Callable[..., Any], Callable[[], list[Any]]]] = [
    (lambda run: run(), lambda: [_optimizer()]),
    (with_checkpoint, lambda: [nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)]),
    (aliased, lambda: [torch.arange(12.0).view(3, 4)]),
    (differentiable_view, lambda: [torch.ones(3, 4, requires_grad=True)]),
    (no_grad, lambda: [torch.ones(3, requires_grad=True)]),
    (lambda x: (x * 2j).abs(), lambda: [torch.arange(4.0) + 1j]),
    (torch.inference_mode()(lambda x: x * 2), lambda: [torch.ones(3)]),
]


@pytest.mark.parametrize(("function", "make"), PARTS)
def test_it_works_with_other_parts_of_torch(
    function: Callable[..., Any], make: Callable[[], list[Any]]
) -> None:
    backend = verified_backend("aot_eager")
    compiled = torch.compile(function, backend=backend)
    torch.manual_seed(0)
    given = make()
    torch.manual_seed(0)
    same = make()
    for _ in range(2):
        torch.testing.assert_close(compiled(*given), function(*same))
    statuses = {graph.status for graph in backend.stats().graphs}
    assert statuses == {"verified"}, str(backend.stats())


# Whole nodes of the graph; the last reads what it writes, and says nothing of it.
ASSIGN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sliced_assign": lambda x: sliced_assign(x, [0], 7.0) * 2,
    "sliced_assign_": lambda x: sliced_assign_(x, slice(1, None), x[:-1]) * 2,
}


@pytest.mark.parametrize(
    ("name", "spoiled"), [*((n, False) for n in ASSIGN), ("sliced_assign", True)]
)
def test_torchguards_own_assignments_are_checked(name: str, spoiled: bool) -> None:
    compiled = verified(ASSIGN[name], backend=wrong if spoiled else "aot_eager")
    x = torch.arange(4.0)
    expected = x.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = compiled(x)
    assert result.equal(ASSIGN[name](expected))
    assert x.equal(expected)  # written once
    assert [each.category for each in caught] == [MiscompilationWarning] * spoiled
    assert stats(compiled).graphs[0].status == ("mismatched" if spoiled else "verified")


def test_an_unknown_backend_is_refused_where_it_is_named() -> None:
    """As ``torch.compile`` does, and not in the first call."""
    with pytest.raises(Exception, match="Invalid backend") as of_torch:
        torch.compile(workload, backend="no_such_backend")
    with pytest.raises(of_torch.type, match="Invalid backend"):
        verified(backend="no_such_backend")(workload)


def test_a_mode_reaches_inductor_whichever_way_it_is_given() -> None:
    mode = "reduce-overhead"
    expected = torch._inductor.list_mode_options(mode)
    assert expected
    given = verified_backend(mode=mode).inner()
    by_torch_compile = verified_backend().inner(mode=mode)
    for inner in (given, by_torch_compile):
        for name, value in expected.items():
            assert f"{name!r}: {value!r}" in str(inner.source)


@pytest.mark.cuda
def test_cuda_graphs_are_recorded_and_replayed_after_the_check() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)).cuda()
    eager = copy.deepcopy(model)
    checked = verified(mode="reduce-overhead")(model)
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.full((4, 8), float(step), device="cuda")
        for module in (checked, eager):
            module.zero_grad()
            module(x).sum().backward()
        for one, other in zip(eager.parameters(), checked.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad)
    assert [graph.runs for graph in stats(checked).graphs] == ["inductor"]
    assert stats(checked).verified == 1


# --- the caller sees one run


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
    reduce = torch.ops._c10d_functional.all_reduce.default
    reason = why_not_twice(torch.fx.symbolic_trace(lambda x: reduce(x, "sum", "0")))
    assert "communicates with other processes" in (reason or "")


@pytest.mark.parametrize("reason", ["sparse", "NestedTensor"])
def test_what_can_not_be_copied_is_left_unverified(reason: str) -> None:
    given = torch.eye(3).to_sparse()
    if reason == "NestedTensor":
        rows = [torch.ones(2), torch.ones(3)]
        given = torch.nested.nested_tensor(rows, layout=torch.jagged)
    backend = verified_backend("aot_eager")
    torch.compile(lambda x: x * 2, backend=backend)(given)
    graphs = backend.stats().graphs
    assert graphs or given.is_sparse  # which Dynamo may not compile
    for record in graphs:
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
    backend = verified_backend(right)
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
    assert record.reason == "out of memory while running it again for verification"


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


@pytest.mark.parametrize(("dynamic", "graphs"), [(False, 4), (None, 2), (True, 1)])
def test_dynamic_means_what_it_means_to_torch_compile(dynamic: bool | None, graphs: int) -> None:
    def halved(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x / 2

    checked = verified(halved, backend="eager", dynamic=dynamic)
    for size in (3, 4, 5, 6):
        assert checked(torch.ones(size)).tolist() == [0.5] * size
    assert len(checked.stats().graphs) == graphs
