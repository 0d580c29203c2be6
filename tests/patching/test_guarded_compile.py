"""Compiled functions and guarded(): the same graphs, graph breaks and results as without it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from support.compiled import Counting
from support.kinds import locked
from support.ways import outcome_of
from torchguard import guarded

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]

X = torch.tensor([1.0, 2.0, 3.0])


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.add_(1)
    y[0] = 5
    return torch.mul(y, 2, out=torch.empty_like(y))


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def eager_part(x: torch.Tensor) -> torch.Tensor:
    return x.mul(3)


def disabled_inside(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = eager_part(x + 1) + 1
    return result


inner = torch.compile(in_place, backend="eager")


def nested(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = inner(x + 1) + 1
    return result


def compiled(function: Any, backend: Any) -> Any:
    return torch.compile(function, backend=backend)


# How a function is compiled, and in which scopes it is called.
HOW: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "called outside, inside, outside": (compiled, (nullcontext, guarded, nullcontext)),
    "decorated outside": (lambda f, b: guarded()(compiled(f, b)), (nullcontext, nullcontext)),
    "decorated inside": (lambda f, b: compiled(guarded()(f), b), (nullcontext, guarded)),
}


def operators(backend: Counting) -> list[list[str]]:
    """Return those of each graph; its inputs may have other names."""
    return [[each for each in graph if "placeholder" not in each] for graph in backend.graphs]


def run(function: Any, compile_: Any, scopes: tuple[Any, ...]) -> list[Any]:
    torch._dynamo.reset()
    with guarded():  # what is compiled before the first scope may be compiled once more
        pass
    backend = Counting("eager")
    call, found = compile_(function, backend), list[Any]()
    for scope in scopes:
        with scope():
            found.append((call(X).tolist(), operators(backend)))
            assert torch._C._len_torch_function_stack() == 0
    return [*found, call(torch.ones(3, dtype=torch.float64)).tolist(), operators(backend)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("function", [in_place, disabled_inside, nested])
def test_results_and_graphs_are_those_without_a_scope(function: Any, how: str) -> None:
    compile_, scopes = HOW[how]
    assert run(function, compile_, scopes) == run(function, compiled, (nullcontext,) * len(scopes))


def test_a_scope_is_whole_after_an_exception_in_compiled_code() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        raise ValueError(y.shape)

    def backend(_: Any, __: Any) -> Any:
        raise ZeroDivisionError

    raising = torch.compile(function, backend="eager")
    failing = torch.compile(in_place, backend=backend)
    with guarded():
        for call in (raising, raising, failing):
            assert outcome_of(lambda: call(X)).error is not None  # noqa: B023
            assert torch._C._len_torch_function_stack() == 0
            tensor = locked([1.0])
            outcome_of(lambda: tensor.resize_(9))  # noqa: B023
            assert tensor.shape == (1,)
