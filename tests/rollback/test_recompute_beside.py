"""install("recompute") beside install(), transaction, threads, fake tensors and torch.compile."""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchguard
from torchguard import safe_checkpoint
from torchguard.rollback import recompute


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


class Left(nn.Module):
    """Leaves its keys where the next block finds them."""

    def __init__(self, place: str, *, detached: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.place, self.detached = place, detached
        self.held: Any = None

    def forward(self, x: torch.Tensor, box: Any) -> Any:
        keys = self.linear(x)
        keys = keys.detach() if self.detached else keys
        if self.place == "dict":
            box[0] = keys
        elif self.place == "dict of tuples":
            box[0] = (keys, 1)
        elif self.place == "list":
            box.append(keys)
        elif self.place == "attribute":
            self.held = keys
        elif self.place == "object":
            box.held = [keys]
        return (x * 2, keys) if self.place == "returned" else x * 2


PLACES: dict[str, Callable[[], Any]] = {
    "dict": dict, "dict of tuples": dict, "list": list, "attribute": dict,
    "object": types.SimpleNamespace, "returned": dict,
}  # fmt: skip


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_tensor_that_a_reentrant_block_leaves_is_named(
    place: str, reentrant: bool, detached: bool, installed: bool
) -> None:
    """It has lost its gradient. One that is returned, or detached, is right."""
    box, block = PLACES[place](), Left(place, detached=detached)
    x = torch.ones(2, 3, requires_grad=True)
    scope: Any = torchguard.install("recompute") if installed else contextlib.nullcontext()
    call = checkpoint if installed else safe_checkpoint
    with scope, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(lambda t: block(t, box), x, use_reentrant=reentrant)
        (result[0] if place == "returned" else result).sum().backward()
    said = [str(w.message) for w in caught if "use_reentrant=True, and" in str(w.message)]
    assert len(said) == (reentrant and not detached and place != "returned")


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_an_attribute_that_each_run_computes_anew_is_not_named(norm: Any) -> None:
    block, x = norm(nn.Linear(2, 2)), torch.ones(2, 2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torchguard.errors.TorchGuardWarning)
        for _ in range(2):
            safe_checkpoint(block, x, use_reentrant=True).sum().backward()


def test_two_blocks_that_share_a_module_do_not_run_again_at_once() -> None:
    # Each block meets a module of its own before the shared one.
    ahead, before, shared = (nn.Linear(1, 1) for _ in range(3))
    inside, go_on, second = threading.Event(), threading.Event(), threading.Event()

    def one(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(60)
        return shared(ahead(x))  # type: ignore[no-any-return]

    def other(x: torch.Tensor) -> torch.Tensor:
        second.set()
        return shared(before(x))  # type: ignore[no-any-return]

    blocks = [recompute.Checkpointed(each, (), keeps_random=False) for each in (one, other)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(blocks[0].run_again, torch.ones(1))
        assert inside.wait(60)
        then = pool.submit(blocks[1].run_again, torch.ones(1))
        assert not second.wait(0.5)  # a run that need not wait is there within microseconds
        go_on.set()
        first.result(60)
        then.result(60)
    assert second.is_set()
