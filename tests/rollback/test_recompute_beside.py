"""install("recompute") beside install(), transaction, threads, fake tensors and torch.compile."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchguard
from torchguard import safe_checkpoint


def make() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4))


def test_install_reaches_who_took_the_function_before_and_uninstall_undoes_it() -> None:
    module = torch.utils.checkpoint
    before = dict(vars(module)), dict(vars(module.CheckpointFunction))
    norm = nn.BatchNorm1d(4)
    x = torch.randn(5, 4, requires_grad=True)
    with torchguard.install("recompute") as installation:
        assert installation.names == ("recompute",)
        assert module.checkpoint is checkpoint  # what Dynamo knows by identity
        checkpoint(norm, x, use_reentrant=False).sum().backward()
        checkpoint(norm, x, use_reentrant=True).sum().backward()
    assert norm.num_batches_tracked == 2
    assert (dict(vars(module)), dict(vars(module.CheckpointFunction))) == before
    checkpoint(norm, x, use_reentrant=False).sum().backward()
    assert norm.num_batches_tracked == 4


def test_what_has_no_elements_is_left_alone() -> None:
    """Fake tensors, the meta device, and lazy modules, which become others in their first run."""
    with torchguard.install("recompute"):
        with torch._subclasses.FakeTensorMode():
            x = torch.ones(5, 4, requires_grad=True)
            checkpoint(make(), x, use_reentrant=False).sum().backward()
        with torch.device("meta"):
            x = torch.ones(5, 4, requires_grad=True)
            checkpoint(make(), x, use_reentrant=False).sum().backward()
        lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
        x = torch.ones(5, 4, requires_grad=True)
        for _ in range(2):
            checkpoint(lazy, x, use_reentrant=False).sum().backward()
    assert lazy[0].in_features == 4


def test_two_threads_leave_the_buffers_of_a_shared_module_in_it() -> None:
    norm = nn.BatchNorm1d(4)
    buffers = list(norm.buffers())

    def train(_: int) -> None:
        for _ in range(30):
            x = torch.randn(5, 4, requires_grad=True)
            safe_checkpoint(norm, x).sin().sum().backward()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))
    assert all(now is buffer for now, buffer in zip(norm.buffers(), buffers, strict=True))


# ---- compiled code ----


@pytest.mark.parametrize("name", ["torch's", "ours", "ours, installed"])
def test_inside_compile_it_is_dynamos_own(name: str, fresh_dynamo: None) -> None:
    """The same graph, and the same gradients, as without the guard."""

    def run(call: Any, guard: Any) -> tuple[list[str], list[Tensor]]:
        torch._dynamo.reset()
        graphs: list[str] = []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append("".join(m.code for m in graph.modules() if hasattr(m, "code")))
            return graph.forward

        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def function(x: Tensor) -> Tensor:
            return call(block, x.sin(), use_reentrant=False).cos()  # type: ignore[no-any-return]

        with guard:
            compiled = torch.compile(function, backend=backend, fullgraph=True)
            for _ in range(2):
                compiled(torch.ones(5, 4, requires_grad=True)).sum().backward()
        return graphs, [p.grad for p in block.parameters() if p.grad is not None]

    graphs, gradients = run(checkpoint, contextlib.nullcontext())
    call = checkpoint if name == "torch's" else safe_checkpoint
    guard = contextlib.nullcontext() if name == "ours" else torchguard.install("recompute")
    now_graphs, now_gradients = run(call, guard)
    assert now_graphs == graphs
    assert len(graphs) == 1
    assert all(map(torch.equal, now_gradients, gradients))


def test_a_compiled_module_inside_a_checkpoint_counts_a_batch_once(fresh_dynamo: None) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # noqa: PLC0415

    counter = CompileCounterWithBackend("aot_eager")
    model = make()
    compiled = torch.compile(model, backend=counter)
    with torchguard.install("recompute"):
        for _ in range(3):
            x = torch.ones(5, 4, requires_grad=True)
            checkpoint(compiled, x, use_reentrant=False).sum().backward()
    assert model[1].num_batches_tracked == 3
    assert counter.frame_count == 1
