"""What the tests of bucketed() share: a backend that counts, a ladder, a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchguard import Buckets, bucketed

LADDER = Buckets([4, 8, 16])


class Counting:
    """A backend that runs graphs as they are and keeps the shapes of their inputs."""

    def __init__(self) -> None:
        self.graphs: list[list[tuple[Any, ...]]] = []
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        assert not any(isinstance(value, torch.SymInt) for value in inputs)
        shapes = [tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor)]
        assert not any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)
        self.graphs.append(shapes)

        def run(*given: Any) -> Any:
            self.calls += 1
            return graph.forward(*given)

        return run


@pytest.fixture
def backend() -> Counting:
    torch.compiler.reset()
    return Counting()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif dataclasses.is_dataclass(expected):
        for each in dataclasses.fields(expected):
            same(getattr(found, each.name), getattr(expected, each.name))
    else:
        assert found == expected


class Net(nn.Module):
    steps: torch.Tensor
    name: str

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.steps += 1
        return self.dropout(self.linear(x))

    def other(self) -> str:
        return "other"


def wrapped_net(**options: Any) -> tuple[Net, Any]:
    net = Net()
    return net, bucketed(net, dims={"x": {0: "t"}}, buckets=LADDER, **options)
