"""The silent training errors of TrainCheck, each as a small program with its right twin.

The errors are those of https://www.usenix.org/conference/osdi25/presentation/jiang, by the names of
its artifact. A program keeps the cause and none of the code. An error that PyTorch
has fixed is made by a function that does the same wrong.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchguard

PAGE = Path(__file__).parents[2] / "docs" / "training" / "setup-warnings.md"
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def loop(optimizer_of: Callable[[Any], Any], *, clears: bool = True) -> str:
    model = net()
    optimizer = optimizer_of(model.parameters())
    step = torchguard.transaction(model, optimizer)
    for _ in range(3):
        with step:
            model(X).square().mean().backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()
    return step.guarantee


class Traced(torch.optim.Optimizer):
    """An update that was traced once; it updates the parameters that had a gradient then."""

    def __init__(self, parameters: Any, *, traced_early: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.traced: list[Any] | None = [] if traced_early else None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.traced is None:
            self.traced = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for each in self.traced:
            each.data.sub_(each.grad, alpha=0.1)


def pictures(rows: int) -> None:
    """A processor that joins the texts of a batch into one row."""
    model = net()
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {"pixel_values": X, "input_ids": torch.ones(rows, 8)}
    loss_of = lambda b: (model(b["pixel_values"] + b["input_ids"])).square().mean()  # noqa: E731
    for _ in range(2):
        step.run(loss_of, batch, retry="halve")


def without_autocast(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
    """A compiler that loses the regions of autocast."""
    for node in reversed(graph.graph.nodes):
        if "autocast" in str(node.target):
            graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


def compiled(backend: Any) -> None:
    linear = nn.Linear(8, 8)

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return linear(x)  # type: ignore[no-any-return]

    torchguard.verified(f, backend=backend)(X)


def frozen_but(kind: Any) -> None:
    """Freeze all but the layers of a kind."""
    model = net()
    for each in model:
        each.requires_grad_(isinstance(each, kind))
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ("90 of 106 parameters are frozen" in step.guarantee) == (kind is nn.BatchNorm1d)


SGD = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731

# The wrong program, the right one, and what the wrong one says.
ALONE: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "stackoverflow-60335387": (
        lambda: loop(SGD, clears=False), lambda: loop(SGD),
        "TrainingSetupWarning: transaction: the gradients that SGD has used in its first step were",
    ),
    "pytorch-115607": (
        lambda: loop(lambda p: Traced(p, traced_early=True)),
        lambda: loop(lambda p: Traced(p, traced_early=False)),
        "TrainingSetupWarning: transaction: Traced.step() did not move 5 trainable parameters",
    ),
    "pytorch-forum-84911": (
        lambda: frozen_but(nn.BatchNorm1d), lambda: frozen_but(nn.Module),
        "TrainingSetupWarning: transaction: only norms are trained; 90 of 106 parameters are",
    ),
    "transformers-34204": (
        lambda: pictures(1), lambda: pictures(4),
        "TypeError: run: can't split batch['input_ids'] of shape (1, 8): expected 4",
    ),
    "lightning-thunder-725": (
        lambda: compiled(without_autocast), lambda: compiled("eager"), "MiscompilationWarning",
    ),
}  # fmt: skip


def said(program: Callable[[], Any]) -> list[str]:
    """Return the warnings and the error of a program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program()
        except (TypeError, ValueError) as error:
            return [f"{type(error).__name__}: {error}"]
    return [f"{each.category.__name__}: {each.message}" for each in caught]


@pytest.mark.usefixtures("fresh_reports")
@pytest.mark.parametrize("name", ALONE)
def test_an_error_of_one_process_is_said_and_its_right_twin_is_not(name: str) -> None:
    wrong, right, message = ALONE[name]
    assert said(right) == []
    (found,) = said(wrong)
    assert found.replace("torchguard: ", "", 1).startswith(message)


# Errors of several ranks, of which each is a case of the table that compares replicas.
REPLICAS = (Path(__file__).parents[1] / "checkpoint" / "test_replicas.py").read_text("utf-8")


def test_the_page_names_each_error_and_where_it_is_said() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## TrainCheck")[2].partition("\n##")[0]
    names = {*re.findall(r"`((?:\w|-)+-(?:\d+|sync))`", text.partition("Not found")[0])}
    assert names >= {*ALONE}
    assert [name for name in names - {*ALONE} if f'"{name}"' not in REPLICAS] == []
