"""Compiled code has the same graphs and results with install() as without."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from support.compiled import Counting, many, plain, resizes, square, with_out
from torchguard import install

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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


def resizes_as(x: torch.Tensor) -> torch.Tensor:
    x.resize_(3)
    y = x + 1
    y.resize_as_(torch.ones(2, 2))
    torch.resize_as_(y, torch.ones(1, 2))
    return y * 2


def sets(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.set_(torch.ones(2, 2))  # type: ignore[call-overload]
    return y * 2


def after_a_break(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    y.resize_(2, 2)
    torch._dynamo.graph_break()
    return torch.add(y, 1, out=torch.empty(2, 2)) * 2


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def in_eager(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0)
    torch.mul(x, 2, out=out)
    torch.add(out, 1)
    torch.norm(out, "fro", 1, False, torch.empty(4))
    return out.resize_(2, 2).resize_as_(torch.ones(3)).set_(torch.ones(2, 2))  # type: ignore[call-overload, no-any-return]


def calls_eager_code(x: torch.Tensor) -> torch.Tensor:
    return in_eager(x + 1) * 2  # type: ignore[no-any-return]


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def failing_in_eager(x: torch.Tensor) -> torch.Tensor:
    for fails in (
        lambda: x.resize_(-1),
        lambda: x.set_(torch.ones(2).untyped_storage(), -3, (5,)),  # type: ignore[call-overload]
        lambda: torch.index_select(x, 0, torch.tensor([99]), out=x),
    ):
        with contextlib.suppress(RuntimeError, IndexError):
            fails()
    return torch.ones(2)


def calls_failing_eager_code(x: torch.Tensor) -> torch.Tensor:
    return failing_in_eager(x + 1) * 2  # type: ignore[no-any-return]


def through_the_interpreter(x: torch.Tensor) -> Any:
    # Dynamo gives up on this frame; what it calls is looked at on its own.
    made = sorted([3, 1, 2], key=lambda number: int(torch.add(x, number).sum()))
    y = x + made[0]
    y.resize_(2, 2)
    return torch.mul(y, 2)


def of_a_size_known_only_at_run_time(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    length = count.item()
    torch._check(length >= 0)
    torch._check(length <= 4)
    out = torch.empty(length)  # type: ignore[arg-type]
    torch.add(x[0, :length], 1, out=out)
    return out


CASES: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], tuple[Any, ...]]]] = {
    "model": (model, square),
    "plain": (lambda: plain, square),
    "many": (lambda: many, square),
    "with_out": (lambda: with_out, square),
    "into_input": (lambda: into_input, lambda: (*square(), torch.empty(4, 4))),
    "resizes": (lambda: resizes, square),
    "resizes_as": (lambda: resizes_as, square),
    "sets": (lambda: sets, square),
    "after_a_break": (lambda: after_a_break, square),
    "failing_in_eager": (lambda: calls_failing_eager_code, square),
    "unbacked": (lambda: of_a_size_known_only_at_run_time, lambda: (*square(), torch.tensor(3))),
    "calls_eager_code": (lambda: calls_eager_code, square),
    "through_the_interpreter": (lambda: through_the_interpreter, square),
}


# What AOTAutograd makes of a graph, and inductor of that, is no matter of the guards.
ON_AOT_EAGER = {"model", "with_out", "into_input", "resizes", "after_a_break", "calls_eager_code"}
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
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        bare = attempt(name, backend)
        with install("resize", "out"):
            guarded = attempt(name, backend)
    if isinstance(bare, str) or isinstance(guarded, str):
        assert guarded == bare
    else:
        assert bare.graphs
        assert_same(guarded, bare)


KEEPS_ITS_DYNAMIC_SIZES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fft": lambda x: torch.fft.fft(x).real,  # its shape function calls resize_
    "norm": lambda x: torch.norm(x, dim=1),
    "gelu": lambda x: torch.nn.functional.gelu(x) + torch.special.erf(x),
    "out": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("name", KEEPS_ITS_DYNAMIC_SIZES)
def test_dynamic_sizes_stay_dynamic(name: str) -> None:
    def run() -> Outcome:
        lengths = iter((3, 5, 7, 9))
        function = KEEPS_ITS_DYNAMIC_SIZES[name]
        make = lambda: (torch.ones(4, next(lengths)),)  # noqa: E731
        return outcome(function, make, "aot_eager", calls=4, dynamic=True)

    bare = run()
    for guard in ("resize", "out"):
        with install(guard):  # type: ignore[arg-type]
            assert_same(run(), bare)
