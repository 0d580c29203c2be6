"""A patched function is compiled, scripted, traced, exported and transformed as before."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from support.compiled import Counting, many, resizes, square, with_out
from torchguard import install

if TYPE_CHECKING:
    from collections.abc import Callable


def adds_and_norms(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.add(x, y, alpha=2) + torch.norm(x, dim=1, keepdim=True)
    total = torch.nn.functional.gelu(total) + torch.tensordot(x, y, dims=1)
    total = total + torch.nn.functional.normalize(x) + torch.linalg.norm(y)
    return total + torch.special.erf(x) + torch.fft.ifft(torch.fft.fft(x)).real  # type: ignore[no-any-return]


def writes_into_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0)
    torch.mul(x, y, out=out)
    values, indices = torch.max(x, 1)
    return out + values + indices


SQUARE = (torch.arange(9.0).view(3, 3), torch.ones(3, 3))


def graph(module: Any) -> list[tuple[str, Any, str, str]]:
    return [(node.op, node.target, str(node.args), str(node.kwargs)) for node in module.graph.nodes]


# --- what is made of a function, as something that can be compared


def as_fx_graph(function: Any) -> Any:
    module: Any = make_fx(function, tracing_mode="symbolic")(*SQUARE)
    guards = {str(each.expr) for each in module.shape_env.guards}
    return graph(module), sorted(guards)


def as_transforms(loss: Any) -> Any:
    weight, batch = torch.ones(2, 3) / 7, torch.arange(12.0).view(4, 3)
    return [
        torch.vmap(loss, in_dims=(None, 0))(weight, batch).tolist(),
        torch.func.grad(loss)(weight, batch[0]).tolist(),
        torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, batch).tolist(),
        torch.func.jvp(lambda w: loss(w, batch[0]), (weight,), (weight,))[1].tolist(),
        torch.func.functionalize(writes_into_out)(*SQUARE).tolist(),
    ]


def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.norm(torch.add(torch.matmul(weight, x), 1)) + torch.sum(torch.exp(weight))  # type: ignore[no-any-return]


MADE: list[tuple[Callable[[Any], Any], Any]] = [
    *((as_fx_graph, each) for each in (adds_and_norms, writes_into_out)),
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


class Outcome(NamedTuple):
    """What compiling and running a function twice has come to."""

    graphs: list[list[str]]
    breaks: dict[str, int]
    frames: dict[str, int]
    results: list[Any]


def outcome(
    function: Callable[..., Any],
    inputs: Callable[[], tuple[Any, ...]],
    backend: str,
    *,
    calls: int = 2,
    **options: Any,
) -> Outcome:
    torch._dynamo.reset()
    counters.clear()
    counting = Counting(backend)
    torch.manual_seed(0)
    compiled = torch.compile(function, backend=counting, **options)
    results = []
    for _ in range(calls):
        arguments = inputs()
        results.append((compiled(*arguments), arguments))
    breaks = Counter(
        str(reason).partition("\n")[0] for reason in counters["graph_break"].elements()
    )
    return Outcome(counting.graphs, dict(breaks), dict(counters["frames"]), results)


def assert_same(guarded: Outcome, bare: Outcome) -> None:
    assert guarded[:3] == bare[:3]
    torch.testing.assert_close(guarded.results, bare.results, rtol=0, atol=0)


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


CASES: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], tuple[Any, ...]]]] = {
    "model": (model, square),
    "many": (lambda: many, square),
    "with_out": (lambda: with_out, square),
    "into_input": (lambda: into_input, lambda: (*square(), torch.empty(4, 4))),
    "resizes": (lambda: resizes, square),
    "after_a_break": (lambda: after_a_break, square),
}


# What AOTAutograd makes of a graph, and inductor of that, is no matter of the guards.
ON_AOT_EAGER = {"into_input", "resizes", "after_a_break"}
GRID = [
    *((name, "eager") for name in CASES),
    *((name, "aot_eager") for name in CASES if name in ON_AOT_EAGER),
    pytest.param("with_out", "inductor", marks=pytest.mark.slow),
]


def attempt(name: str, backend: str, **options: Any) -> Outcome | str:
    """Compile and run; where plain torch refuses the program, the refusal is the outcome."""
    make, inputs = CASES[name]
    try:
        return outcome(make(), inputs, backend, **options)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}".partition("\n")[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "backend"), GRID)
def test_graphs_breaks_and_results_are_the_same(name: str, backend: str) -> None:
    bare = attempt(name, backend)
    with install("resize", "out"):
        guarded = attempt(name, backend)
    if isinstance(bare, str) or isinstance(guarded, str):
        assert guarded == bare
    else:
        assert bare.graphs
        assert_same(guarded, bare)


def keeps_its_dynamic_sizes(x: torch.Tensor) -> torch.Tensor:
    total = torch.fft.fft(x).real + torch.norm(x, dim=1, keepdim=True)  # fft's shape resizes
    total = total + torch.nn.functional.gelu(x) + torch.special.erf(x)
    return total + torch.mul(x, 2, out=torch.empty_like(x))  # type: ignore[no-any-return]


def test_dynamic_sizes_stay_dynamic() -> None:
    def run() -> Outcome:
        lengths = iter((3, 5, 7, 9))
        make = lambda: (torch.ones(4, next(lengths)),)  # noqa: E731
        return outcome(keeps_its_dynamic_sizes, make, "aot_eager", calls=4, dynamic=True)

    bare = run()
    assert len(bare.graphs) == 1
    for guard in ("resize", "out"):
        with install(guard):
            assert_same(run(), bare)
