"""Compiled functions and guarded(): the same graphs, graph breaks and results as without it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.kinds import locked
from support.ways import outcome_of
from torchguard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


class Counting:
    """A backend that runs graphs as they are, and counts them and their calls."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run

    @property
    def counts(self) -> tuple[int, int]:
        return self.graphs, self.runs


def stack() -> int:
    return torch._C._len_torch_function_stack()


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.mul(2).add(1).relu()


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.add_(1)
    y[0] = 5
    return torch.mul(y, 2, out=torch.empty_like(y))


def resizes(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2)
    y.resize_(3).copy_(x)
    return y + 1


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def eager_part(x: torch.Tensor) -> torch.Tensor:
    return x.mul(3)


def disabled_inside(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = eager_part(x + 1) + 1
    return result


def branches(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x - 1


inner = torch.compile(plain, backend="eager")


def nested(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = inner(x + 1) + 1
    return result


FUNCTIONS = {
    each.__name__: each
    for each in (
        plain, in_place, resizes, broken, disabled_inside, branches, nested,
    )
}  # fmt: skip
SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": nullcontext,
    "guarded": guarded,
    "all four": lambda: guarded("resize", "out", "overlap", "checks"),
}
X = torch.tensor([1.0, 2.0, 3.0])


def entering(function: Callable[..., Any], scope: Any) -> Callable[..., Any]:
    def inside(x: torch.Tensor) -> Any:
        with scope():
            return function(x)

    return inside


Compile = Any


def compiled(function: Any, backend: Any) -> Any:
    return torch.compile(function, backend=backend)


# How a function is compiled, and in which scopes it is called.
HOW: dict[str, tuple[Compile, tuple[str, ...]]] = {
    "called outside, inside, outside": (compiled, ("torch", "guarded", "torch")),
    "called inside first": (compiled, ("guarded", "guarded", "torch")),
    "decorated outside": (lambda f, b: guarded()(compiled(f, b)), ("torch", "torch")),
    "decorated inside": (lambda f, b: compiled(guarded()(f), b), ("torch", "guarded")),
    "entering a scope itself": (lambda f, b: compiled(entering(f, guarded), b), ("torch",) * 2),
}


def run(name: str, compile_: Compile, scopes: tuple[str, ...]) -> list[Any]:
    torch._dynamo.reset()
    with guarded():  # what is compiled before the first scope may be compiled once more
        pass
    backend = Counting()
    function = compile_(FUNCTIONS[name], backend)
    found: list[Any] = []
    for scope in scopes:
        with SCOPES[scope]():
            found.append((function(X).tolist(), backend.counts))
            assert stack() == 0
    found.append((function(torch.ones(3, dtype=torch.float64)).tolist(), backend.counts))
    return found


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            how,
            marks=[]
            if how in {"called outside, inside, outside", "decorated inside"}
            else pytest.mark.slow,
        )
        for how in HOW
    ],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_graphs_are_those_without_a_scope(name: str, how: str) -> None:
    compile_, scopes = HOW[how]

    def bare(function: Any, backend: Any) -> Any:
        if how == "entering a scope itself":  # a with statement may cost a graph of its own
            function = entering(function, nullcontext)
        return compiled(function, backend)

    assert run(name, compile_, scopes) == run(name, bare, ("torch",) * len(scopes))


@pytest.mark.parametrize(
    "decorate", [lambda function: function, guarded()], ids=["torch", "guarded"]
)
def test_many_decorated_functions_do_not_share_one_recompile_limit(decorate: Any) -> None:
    backend = Counting()
    for number in range(12):
        function = eval(f"lambda x: x.mul({number}).add(1)")  # noqa: S307  each has code of its own
        compiled = torch.compile(decorate(function), backend=backend)
        assert compiled(X).tolist() == [number * x + 1 for x in X.tolist()]  # type: ignore[no-untyped-call]
    assert backend.graphs == 12


def shape_after_failure() -> tuple[int, ...]:
    tensor = locked([1.0])
    outcome_of(lambda: tensor.resize_(9))
    return tuple(tensor.shape)


def test_a_scope_is_whole_after_an_exception_in_compiled_code() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        raise ValueError(y.shape)

    def backend(_: Any, __: Any) -> Any:
        raise ZeroDivisionError

    raising = torch.compile(function, backend="eager")
    failing = torch.compile(plain, backend=backend)
    with guarded():
        for call in (raising, raising, failing):
            assert outcome_of(lambda: call(X)).error is not None  # noqa: B023
            assert stack() == 0
            assert shape_after_failure() == (1,)
