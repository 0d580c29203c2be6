"""A patched function is compiled, scripted, traced, exported and transformed as before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from support.compiled import Counting, many, plain, resizes, square, with_out
from torchguard import install


def graph(module: Any) -> list[tuple[str, Any, str, str]]:
    return [(node.op, node.target, str(node.args), str(node.kwargs)) for node in module.graph.nodes]


# --- what is made of a function, as something that can be compared


def as_fx_graph(function: Any) -> Any:
    module: Any = make_fx(function, tracing_mode="symbolic")(*square())
    guards = {str(each.expr) for each in module.shape_env.guards}
    return graph(module), sorted(guards)


def as_transforms(loss: Any) -> Any:
    weight, batch = torch.ones(2, 3) / 7, torch.arange(12.0).view(4, 3)
    return [
        torch.vmap(loss, in_dims=(None, 0))(weight, batch).tolist(),
        torch.func.grad(loss)(weight, batch[0]).tolist(),
        torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, batch).tolist(),
        torch.func.jvp(lambda w: loss(w, batch[0]), (weight,), (weight,))[1].tolist(),
        torch.func.functionalize(with_out)(*square()).tolist(),
    ]


def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.norm(torch.add(torch.matmul(weight, x), 1)) + torch.sum(torch.exp(weight))  # type: ignore[no-any-return]


MADE: list[tuple[Callable[[Any], Any], Any]] = [
    *((as_fx_graph, each) for each in (plain, many, with_out)),
    (as_transforms, loss),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "function"), MADE, ids=lambda each: each.__qualname__.partition(".")[0]
)
def test_what_is_made_of_a_function_is_the_same(make: Any, function: Any) -> None:
    """Program, guards, results; if torch refuses it, in the same words. See test_harm.py too."""

    def outcome() -> Any:
        try:
            return make(function)
        except Exception as error:  # noqa: BLE001 - torch's own differs by release
            return f"{type(error).__name__}: {error}".partition("\n")[0]

    bare = outcome()
    with install("resize", "out"):
        assert outcome() == bare


# --- torch.compile


def outcome(
    function: Callable[..., Any],
    inputs: Callable[[], tuple[Any, ...]],
    backend: str,
    *,
    calls: int = 2,
    **options: Any,
) -> tuple[Any, list[Any]]:
    """Compile and run a function; return its graphs, breaks and frames, and the results."""
    torch._dynamo.reset()
    counters.clear()
    counting = Counting(backend)
    torch.manual_seed(0)
    compiled = torch.compile(function, backend=counting, **options)
    results = []
    for _ in range(calls):
        arguments = inputs()
        results.append((compiled(*arguments), arguments))
    reasons = [str(each).partition("\n")[0] for each in counters["graph_break"].elements()]
    # Dynamo up to 2.9 reaches the inputs of a replaced builtin in another order.
    graphs = list(map(sorted, counting.graphs))
    return (graphs, sorted(reasons), dict(counters["frames"])), results


def assert_same(guarded: tuple[Any, list[Any]], bare: tuple[Any, list[Any]]) -> None:
    assert guarded[0] == bare[0]
    torch.testing.assert_close(guarded[1], bare[1], rtol=0, atol=0)


# --- the functions


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2), nn.Softmax(1))


def into_input(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    torch.sin(x, out=given)
    out = torch.empty(0)  # of another size
    torch.mul(x, 3, out=out)
    return out + given


def after_a_break(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    y.resize_(2, 2)
    torch._dynamo.graph_break()
    return torch.add(y, 1, out=torch.empty(2, 2)) * 2


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], str]] = {
    "model": (model(), square, "eager"),
    "many": (many, square, "eager"),
    "with_out": (with_out, square, "eager"),
    "into_input": (into_input, lambda: (*square(), torch.empty(4, 4)), "aot_eager"),
    "resizes": (resizes, square, "aot_eager"),
    "after_a_break": (after_a_break, square, "aot_eager"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_graphs_breaks_and_results_are_the_same(name: str) -> None:
    bare = outcome(*CASES[name])
    with install("resize", "out"):
        assert_same(outcome(*CASES[name]), bare)
    assert bare[0][0]


def keeps_its_dynamic_sizes(x: torch.Tensor) -> torch.Tensor:
    total = torch.fft.fft(x).real + torch.norm(x, dim=1, keepdim=True)  # fft's shape resizes
    total = total + torch.nn.functional.gelu(x) + torch.special.erf(x)
    return total + torch.mul(x, 2, out=torch.empty_like(x))  # type: ignore[no-any-return]


ASKED: dict[str, Callable[[Any], bool]] = {
    "is": lambda op: op is torch.add,
    "is not": lambda op: op is not torch.add,
    "==": lambda op: op == torch.add,
    "!=": lambda op: op != torch.add,
    "in a tuple": lambda op: op in (torch.sub, torch.add),
    "in a dict": lambda op: op in {torch.add: 1},
    "key of a dict": lambda op: {torch.add: True, torch.mul: False}[op],
    "another one": lambda _: torch.add is torch.mul,
    "its name": lambda op: op.__name__ == "add",
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_what_is_asked_of_a_function_is_answered_as_in_eager(asked: Any, fullgraph: bool) -> None:
    """Or raises, where PyTorch can't trace it: it never takes another branch."""

    def branch(x: torch.Tensor, op: Any) -> torch.Tensor:
        return x + 1 if asked(op) else x

    with install("out"), contextlib.suppress(torch._dynamo.exc.Unsupported):
        compiled = torch.compile(branch, backend="eager", fullgraph=fullgraph)
        assert compiled(torch.zeros(1), torch.add).item() == asked(torch.add)


def test_dynamic_sizes_stay_dynamic() -> None:
    def run() -> tuple[Any, list[Any]]:
        lengths = iter((3, 5, 7, 9))
        make = lambda: (torch.ones(4, next(lengths)),)  # noqa: E731
        return outcome(keeps_its_dynamic_sizes, make, "aot_eager", calls=4, dynamic=True)

    bare = run()
    assert len(bare[0][0]) == 1
    for guard in ("resize", "out"):
        with install(guard):
            assert_same(run(), bare)


class Attributes(nn.Module):
    """Takes what stands at the names when it is made: under guards, replacements."""

    def __init__(self) -> None:
        super().__init__()
        self.activation, self.join = nn.functional.gelu, torch.add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(self.activation(x), x)


def test_a_function_in_an_attribute_of_a_module_is_one_graph() -> None:
    """Dynamo up to 2.9 raised an AssertionError."""
    bare = outcome(Attributes(), square, "eager", fullgraph=True)
    with install("out", "overlap"):
        assert_same(outcome(Attributes(), square, "eager", fullgraph=True), bare)
