"""Compiled code has the same graphs, graph breaks and results with and without install()."""

from __future__ import annotations

import contextlib
import json
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from child_process import output_of
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

import torchguard
from torchguard import install

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


class Outcome(NamedTuple):
    """What compiling and running a function twice has come to."""

    graphs: list[list[str]]
    breaks: dict[str, int]
    frames: dict[str, int]
    results: list[Any]


class Counting:
    """A backend that counts graphs and notes their operators, and compiles with another."""

    def __init__(self, name: str) -> None:
        self.graphs: list[list[str]] = []
        self._compile: Callable[..., Any] = lookup_backend(name)

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs.append([f"{node.op} {node.target}" for node in module.graph.nodes])
        return self._compile(module, inputs)


def outcome(
    function: Callable[..., Any],
    inputs: Callable[[], tuple[Any, ...]],
    backend: str,
    **options: Any,
) -> Outcome:
    torch._dynamo.reset()
    counters.clear()
    counting = Counting(backend)
    torch.manual_seed(0)
    compiled = torch.compile(function, backend=counting, **options)
    results = []
    for _ in range(2):
        arguments = inputs()
        results.append((compiled(*arguments), arguments))
    breaks = Counter(
        str(reason).partition("\n")[0] for reason in counters["graph_break"].elements()
    )
    return Outcome(counting.graphs, dict(breaks), dict(counters["frames"]), results)


def assert_same(guarded: Outcome, bare: Outcome) -> None:
    assert guarded.graphs == bare.graphs
    assert sum(guarded.breaks.values()) == sum(bare.breaks.values())
    assert guarded.breaks == bare.breaks
    assert guarded.frames == bare.frames
    torch.testing.assert_close(guarded.results, bare.results, rtol=0, atol=0)


# --- the functions


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2), nn.Softmax(1))


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.add(torch.norm(x), torch.special.erf(x)) + torch.nn.functional.gelu(x)


def many(x: torch.Tensor) -> torch.Tensor:
    total = torch.full((4, 4), 2.0) + torch.cat([x, x])[:4] + torch.arange(4.0)
    total = total + torch.linalg.norm(x) + torch.max(x, 1).values + torch.fft.fft(x).real
    total = total + torch.tensordot(x, x, dims=1) + torch.nn.functional.normalize(x)
    return total + torch.resize_as_(torch.zeros(4, 4), x)  # type: ignore[no-any-return]


def with_out(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.mul(x, 3, out=out)
    values, indices = torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.max(x, 1, out=(values, indices))
    return torch.add(out, values + indices)


def into_input(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    torch.sin(x, out=out)
    return out + 1


def out_of_wrong_size(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0)
    torch.mul(x, 3, out=out)
    return out + 1


def resizes(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.resize_(2, 2)
    return y * 2


def resizes_an_input(x: torch.Tensor) -> torch.Tensor:
    x.resize_(3)
    return x * 2


def resizes_as(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.resize_as_(torch.ones(2, 2))
    return y * 2


def resizes_as_by_function(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    torch.resize_as_(y, torch.ones(2, 2))
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


def square() -> tuple[Any, ...]:
    return (torch.arange(16.0).view(4, 4) / 7,)


CASES: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], tuple[Any, ...]]]] = {
    "model": (model, square),
    "plain": (lambda: plain, square),
    "many": (lambda: many, square),
    "with_out": (lambda: with_out, square),
    "into_input": (lambda: into_input, lambda: (*square(), torch.empty(4, 4))),
    "out_of_wrong_size": (lambda: out_of_wrong_size, square),
    "resizes": (lambda: resizes, square),
    "resizes_an_input": (lambda: resizes_an_input, square),
    "resizes_as": (lambda: resizes_as, square),
    "resizes_as_by_function": (lambda: resizes_as_by_function, square),
    "sets": (lambda: sets, square),
    "after_a_break": (lambda: after_a_break, square),
    "failing_in_eager": (lambda: calls_failing_eager_code, square),
    "calls_eager_code": (lambda: calls_eager_code, square),
    "through_the_interpreter": (lambda: through_the_interpreter, square),
}
FOR_INDUCTOR = {"with_out", "calls_eager_code"}  # about 10 s each
GRID = [
    pytest.param(name, backend, marks=[pytest.mark.slow] if backend == "inductor" else [])
    for backend in ("eager", "aot_eager", "inductor")
    for name in CASES
    if backend != "inductor" or name in FOR_INDUCTOR
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["plain", "many", "with_out", "model"])
def test_dynamic_shapes_are_the_same(name: str) -> None:
    bare = attempt(name, "aot_eager", dynamic=True)
    with install("resize", "out"):
        guarded = attempt(name, "aot_eager", dynamic=True)
    assert isinstance(bare, Outcome)
    assert isinstance(guarded, Outcome)
    assert_same(guarded, bare)


def test_an_output_of_a_size_known_only_at_run_time_is_the_same() -> None:
    def function(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        length = count.item()
        torch._check(length >= 0)
        torch._check(length <= 16)
        out = torch.empty(length)  # type: ignore[arg-type]
        torch.add(x[:length], 1, out=out)
        return out

    def inputs() -> tuple[Any, ...]:
        return torch.arange(16.0), torch.tensor(5)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        outcomes = []
        for names in ((), ("resize", "out")):
            with install(*names) if names else contextlib.nullcontext():
                try:
                    outcomes.append(outcome(function, inputs, "aot_eager"))
                except Exception as error:  # noqa: BLE001  some releases refuse it
                    outcomes.append(type(error).__name__)  # type: ignore[arg-type]
    bare, guarded = outcomes
    if isinstance(bare, str):
        assert guarded == bare
    else:
        assert_same(guarded, bare)


def test_a_wrapper_that_dynamo_does_see_is_noticed() -> None:
    bare = attempt("after_a_break", "eager")
    resize_ = torch.Tensor.resize_

    def traced(self: torch.Tensor, *size: Any) -> torch.Tensor:
        self.untyped_storage().nbytes()
        return resize_(self, *size)

    torch.Tensor.resize_ = traced  # type: ignore[method-assign, assignment]
    try:
        patched = attempt("after_a_break", "eager")
    finally:
        del torch.Tensor.resize_
    assert isinstance(bare, Outcome)
    assert isinstance(patched, Outcome)
    with pytest.raises(AssertionError):
        assert_same(patched, bare)


KEEPS_ITS_DYNAMIC_SIZES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fft": lambda x: torch.fft.fft(x).real,  # its shape function calls resize_
    "norm": lambda x: torch.norm(x, dim=1),
    "gelu": lambda x: torch.nn.functional.gelu(x) + torch.special.erf(x),
    "out": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("guard", ["resize", "out"])
@pytest.mark.parametrize("name", KEEPS_ITS_DYNAMIC_SIZES)
def test_dynamic_sizes_stay_dynamic(name: str, guard: str) -> None:
    def graphs() -> int:
        torch._dynamo.reset()
        counting = Counting("eager")
        compiled = torch.compile(KEEPS_ITS_DYNAMIC_SIZES[name], backend=counting, dynamic=True)
        for length in (3, 5, 7, 9):
            compiled(torch.ones(4, length))
        return len(counting.graphs)

    bare = graphs()
    with install(guard):  # type: ignore[arg-type]
        assert graphs() == bare


# --- installing and uninstalling between calls


@pytest.mark.parametrize("backend", BACKENDS)
def test_install_between_calls_changes_no_result_and_goes_on_compiling_few_times(
    backend: str,
) -> None:
    counting = Counting(backend)
    compiled = torch.compile(with_out, backend=counting)
    (x,) = square()
    expected = with_out(x)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), expected)
        with install("resize", "out"):
            torch.testing.assert_close(compiled(x), expected)
    assert len(counting.graphs) <= 2, "one for the bare functions, one for the guarded ones"


def test_a_resize_that_breaks_the_graph_is_guarded_in_between() -> None:
    import numpy as np  # noqa: PLC0415

    def grows(x: torch.Tensor, locked: torch.Tensor) -> torch.Tensor:
        y = x + 1
        with contextlib.suppress(RuntimeError):
            locked.resize_(50)
        return y

    compiled = torch.compile(grows, backend="eager")
    for installed in (False, True, False):
        locked = torch.from_numpy(np.ones(2, dtype=np.float32))
        with install() if installed else contextlib.nullcontext():
            assert compiled(torch.ones(2), locked).tolist() == [2, 2]
        assert (tuple(locked.shape) == (2,)) == installed
        locked.set_(torch.empty(0))  # type: ignore[call-overload]


def test_compiled_before_install_and_called_under_it_from_many_places() -> None:
    counting = Counting("eager")
    compiled = torch.compile(resizes, backend=counting)
    (x,) = square()
    before = compiled(x)
    graphs = len(counting.graphs)
    with install("resize"):
        assert torch.equal(compiled(x), before)
        assert len(counting.graphs) == graphs, (
            "resize_ is a method: nothing has to be compiled again"
        )
    assert torch.equal(compiled(x), before)
    assert len(counting.graphs) == graphs


# --- the order of importing Dynamo and installing

ORDER = """
import json, sys
import torch, torchguard

def bare(): pass
def install(): torchguard.install("resize", "out")
def uninstall(): torchguard.uninstall()
def dynamo(): import torch._dynamo

for step in sys.argv[1].split(", "):
    globals()[step]()
installed = bool(torchguard.installed())

from torch._dynamo.utils import counters

graphs = []

def backend(module, inputs):
    targets = [getattr(node.target, "__qualname__", node.target) for node in module.graph.nodes]
    graphs.append(targets)
    return module.forward

def first(x):
    return torch.add(x, 1)

def second(x):
    return torch.full((2, 2), 3.0) + x

def third(x):
    return torch.resize_as_(torch.zeros(2, 2), x) + torch.norm(x) + torch.nn.functional.gelu(x)

def fourth(x):
    out = torch.empty(2, 2)
    torch.linalg.inv(x + torch.eye(2), out=out)
    return torch.max(out, 1).values

def fifth(x):
    y = x + 1
    y.resize_(2)
    return torch.mul(y, 2)

rows = []
for function in (first, second, third, fourth, fifth):
    torch._dynamo.reset()
    counters.clear()
    graphs.clear()
    try:
        compiled = torch.compile(function, backend=backend, fullgraph=function is not fifth)
        value = [compiled(torch.ones(2, 2)).tolist() for _ in range(2)]
    except Exception as error:
        value = type(error).__name__ + str(error)[:60]
    breaks = sum(counters["graph_break"].values())
    rows.append([function.__name__, value, list(graphs), breaks, dict(counters["frames"])])
print(json.dumps([rows, installed]))
"""
ORDERS = {
    "dynamo, install": True,
    "install, dynamo": True,
    "install, dynamo, uninstall": False,
    "install, uninstall, dynamo": False,
}


@pytest.fixture(scope="module")
def bare_rows() -> Any:
    rows, installed = json.loads(output_of(ORDER, "bare"))
    assert not installed
    return rows


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_importing_dynamo_and_installing_does_not_matter(
    order: str, bare_rows: Any
) -> None:
    rows, installed = json.loads(output_of(ORDER, order))
    assert installed == ORDERS[order]
    assert rows == bare_rows


def test_dynamo_knows_torchs_own_functions_after_uninstall() -> None:
    with install("resize", "out"):
        torch.compile(many, backend="eager")(*square())
        torch._dynamo.trace_rules.clear_lru_cache()
        torch.compile(plain, backend="eager")(*square())
    torchguard.uninstall()
    torch._dynamo.reset()
    for function in (plain, with_out):
        torch.compile(function, backend="eager", fullgraph=True)(*square())


def graphs_of(function: Any, *inputs: Any, **options: Any) -> tuple[int, Any]:
    """How many graphs Dynamo made of a function, and what it returned."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: Any = torch.compile(function, backend=backend, **options)
    result = compiled(*inputs)
    return len(graphs), result


@pytest.mark.parametrize("name", ["add", "matmul", "nn.functional.linear", "nn.functional.gelu"])
def test_a_function_of_torchs_that_is_compiled_by_itself_is_one_graph(name: str) -> None:
    inputs = square() * (1 if name.endswith("gelu") else 2)
    expected = torchguard.get_original(f"torch.{name}")(*inputs)
    with install("out"):
        function = operator.attrgetter(name)(torch)
        for options in ({}, {"fullgraph": True}):
            count, result = graphs_of(function, *inputs, **options)
            assert count == 1
            assert torch.equal(result, expected)
        assert torch.equal(torch.compiler.disable(function)(*inputs), expected)


def test_a_function_that_dynamo_leaves_to_eager_is_guarded() -> None:
    with install("out"):
        disabled = torch.compiler.disable(torch.add)
        out = torch.from_numpy(np.zeros(1, dtype=np.float32))
        with pytest.raises(RuntimeError):
            disabled(torch.ones(9), 1, out=out)
        assert out.shape == (1,)


def known(x: torch.Tensor, table: dict[Any, int], some: list[Any]) -> torch.Tensor:
    """Look functions of torch up, as transformers and quantization do."""
    x = x + table[torch.add] + table.get(torch.mul, 0)
    if torch.add in table and torch.sub not in table:
        x = x * 2
    if torch.add in {torch.add: 1} and torch.add in {torch.add, torch.sub}:
        x = x * 3
    if torch.add in (torch.sub, torch.add) and torch.mul not in [torch.add]:
        x = x * 5
    if torch.add is not torch.mul and torch.add != torch.sub and torch.add.__name__ == "add":
        x = x * 7
    return x + 1 if torch.add in some else x


def test_functions_of_torchs_are_looked_up_in_compiled_code_as_in_eager() -> None:
    (x,) = square()
    with install("out"):
        ours: dict[Any, int] = {torch.add: 1, torch.mul: 2}
        torchs: dict[Any, int] = {torch.add: 1, torchguard.get_original("torch.mul"): 2}
        for table in (ours, torchs):  # a table that was made before it was installed holds torch's
            count, result = graphs_of(known, x, table, list(table), fullgraph=True)
            assert count == 1
            assert torch.equal(result, known(x, table, list(table)))


def in_set(x: torch.Tensor, functions: Any) -> torch.Tensor:
    return x + 1 if torch.add in functions else x - 1


def test_a_frozenset_of_functions_is_looked_up_in_compiled_code_as_in_eager() -> None:
    (x,) = square()
    try:
        graphs_of(in_set, x, frozenset({known}), fullgraph=True)
    except torch._dynamo.exc.Unsupported:
        pytest.skip("Dynamo knows no frozenset of other functions than builtins (up to 2.8)")
    with install("out"):
        count, result = graphs_of(in_set, x, frozenset({torch.add, torch.sub}), fullgraph=True)
        assert count == 1
        assert torch.equal(result, x + 1)


def test_a_compiled_function_is_compiled_anew_when_another_function_stands_there() -> None:
    def one(x: torch.Tensor) -> torch.Tensor:
        return current(x, x)

    (x,) = square()
    torch._dynamo.reset()
    compiled = torch.compile(one, backend="eager")
    with install("out"):
        for current in (torch.add, torch.mul, torch.sub):
            assert torch.equal(compiled(x), current(x, x))
    current = torch.add
    assert torch.equal(compiled(x), x + x)
