"""What can be scripted, traced and exported without the guards can be with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchguard import guarded, install
from torchguard.patching.guards import GUARDS

X = torch.arange(12.0).reshape(3, 4)


def add(x: Tensor) -> Tensor:
    return torch.add(x, x, alpha=2)


def mm(x: Tensor) -> Tensor:
    return torch.mm(x, x.t())


def cat(x: Tensor) -> Tensor:
    return torch.cat([x, x])


def norm(x: Tensor) -> Tensor:
    return torch.norm(x, dim=1)  # type: ignore[no-any-return]


def gather(x: Tensor) -> Tensor:
    return torch.gather(x, 0, torch.zeros([1, 4], dtype=torch.long))


def one_hot(x: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(x[0].long(), 9)


def write(x: Tensor) -> Tensor:
    y = torch.zeros([4])
    torch.cumsum(x[0], 0, out=y)
    y += x[1]
    y[1:] = y[:-1].clone()
    return y


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    add, mm, cat, norm, gather, one_hot, write,
)  # fmt: skip
MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(3, 3),
    "LSTM": lambda: nn.LSTM(3, 3),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(4, 2, batch_first=True),
    "Embedding": lambda: nn.Embedding(3, 3),
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
}


def fresh(function: Any) -> Any:
    """A twin of a function, which TorchScript has not compiled yet."""
    twin = FunctionType(function.__code__, function.__globals__, function.__name__)
    twin.__annotations__ = function.__annotations__
    return twin


def made() -> list[str]:
    """What TorchScript makes of functions and modules."""
    programs = [str(torch.jit.script(fresh(function)).code) for function in FUNCTIONS]
    return programs + [type(torch.jit.script(make())).__name__ for make in MODULES.values()]


class Program(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(x) for function in FUNCTIONS)


def recorded() -> list[list[str]]:
    """What a trace, an export and a symbolic trace hold."""
    trace = torch.jit.trace(Program(), (X,))
    graphs = [torch.export.export(Program(), (X,), strict=False).graph]
    graphs += [torch.fx.symbolic_trace(each).graph for each in FUNCTIONS if each is not write]
    kinds = [node.kind() for node in trace.inlined_graph.nodes()]
    return [kinds, *([str(node.target) for node in graph.nodes] for graph in graphs)]


@pytest.fixture(scope="module")
def bare() -> tuple[list[str], list[list[str]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return made(), recorded()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [*zip(GUARDS), tuple(GUARDS)], ids="-".join)
def test_what_is_recorded_or_scripted_is_the_same(names: Any, bare: tuple[Any, Any]) -> None:
    """While the guards are on, and while what a scope has replaced is off."""
    with guarded(*names):
        assert recorded() == bare[1]
    assert recorded() == bare[1]
    with install(*names, only_if_needed=False):
        assert made() == bare[0]
