"""verified with optimizers, checkpoints, autocast, CUDA graphs, and compile modes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.miscompiling import stats, workload
from torchguard import verified, verified_backend

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("fresh_reports")


# --- other parts of torch


def _optimizer() -> Callable[[], Any]:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.arange(3.0)
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    return lambda: (optimizer.step(), weight.detach().clone())[1]


def _with_checkpoint() -> Callable[[], Any]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        value = layer(value)
        return value.sin()

    return lambda: checkpoint(block, x, use_reentrant=False).sum()


def _autocast() -> Callable[[], Any]:
    x = torch.full((4, 4), 0.3, requires_grad=True)

    def run() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x).sum() * 2

    return run


def _aliased() -> Callable[[], Any]:
    base = torch.arange(12.0).view(3, 4)

    def run() -> Any:
        row, column = base[1], base[:, 2]
        row.mul_(0.5)
        return column.sum(), base.t(), row

    return run


def _differentiable_view() -> Callable[[], Any]:
    leaf = torch.ones(3, 4, requires_grad=True)

    def write_through(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        row.add_(1)
        return (x * x).sum()

    def run() -> Any:
        x = leaf * 2
        return write_through(x, x[0])

    return run


def _no_grad() -> Callable[[], Any]:
    x = torch.ones(3, requires_grad=True)

    def run() -> Any:
        with torch.no_grad():
            x.mul_(0.5)
        return x * 2, torch.zeros(0, 3) + 1, torch.zeros(3, 0).sum()

    return run


def _complex() -> Callable[[], Any]:
    x = torch.arange(4.0) + 1j

    def run() -> Any:
        return (x * 2j).abs()

    return run


MAKERS = [
    _optimizer, _with_checkpoint, _autocast, _aliased, _differentiable_view, _no_grad, _complex,
]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__.strip("_"))
def test_it_works_with_other_parts_of_torch(make: Callable[[], Any]) -> None:
    backend = verified_backend("aot_eager")
    compiled: Callable[[], Any] = torch.compile(make(), backend=backend)
    eager = make()
    for _ in range(2):
        torch.testing.assert_close(compiled(), eager())
    statuses = {graph.status for graph in backend.stats().graphs}
    assert statuses == {"verified"}, str(backend.stats())


def test_inference_mode() -> None:
    backend = verified_backend("aot_eager")
    with torch.inference_mode():
        x = torch.ones(3)
        assert torch.compile(lambda v: v.mul_(2) + 1, backend=backend)(x).tolist() == [3, 3, 3]
        assert x.tolist() == [2, 2, 2]
    assert backend.stats().graphs[0].status == "verified", str(backend.stats())


def test_an_unknown_backend_is_refused_where_it_is_named() -> None:
    """As ``torch.compile`` does, and not in the first call."""
    with pytest.raises(Exception, match="Invalid backend") as of_torch:
        torch.compile(workload, backend="no_such_backend")
    with pytest.raises(of_torch.type, match="Invalid backend"):
        verified(backend="no_such_backend")(workload)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_every_mode_reaches_inductor_whichever_way_it_is_given(mode: str) -> None:
    expected = torch._inductor.list_mode_options(mode)
    assert expected
    given = verified_backend(mode=mode).fallbacks()
    by_torch_compile = verified_backend().fallbacks(mode=mode)
    for fallbacks in (given, by_torch_compile):
        for name, value in expected.items():
            assert f"{name!r}: {value!r}" in str(fallbacks[0].source)


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
