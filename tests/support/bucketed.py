"""What the tests of bucketed() share: a backend that counts, a ladder, a module, comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from torchguard import Buckets, PaddingLeakError, bucketed

LADDER = Buckets([4, 8, 16])


def wrap(function: Any, **options: Any) -> Any:
    """Return it bucketed, in dim 0 of its first argument unless ``dims`` says otherwise."""
    return bucketed(function, **{"dims": ({0: "t"},), "buckets": LADDER, **options})


def in_time(function: Any, **options: Any) -> Any:
    """Likewise in dim 1, time, with the buckets 8 and 16."""
    return bucketed(function, **{"dims": ({1: "t"},), "buckets": [8, 16], **options})


def leak(function: Any, *given: Any, **options: Any) -> str:
    """Return what the error says of a function that leaks in time."""
    with pytest.raises(PaddingLeakError) as error:
        in_time(function, **options)(*given)
    return str(error.value)


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


def same_gradients(
    found: torch.Tensor, expected: torch.Tensor, parameters: Iterable[torch.Tensor], share: float
) -> None:
    """Compare what two losses send to parameters, to a share of the largest gradient of all."""
    own = [each for each in parameters if each.requires_grad]
    wanted = torch.autograd.grad(expected, own, allow_unused=True)
    got = torch.autograd.grad(found, own, allow_unused=True)
    atol = share * max(float(each.abs().max()) for each in wanted if each is not None)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=atol)


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
