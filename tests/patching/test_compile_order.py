"""install() and uninstall() between calls of compiled code, before and after Dynamo's import."""

from __future__ import annotations

import contextlib
import json
import operator
from typing import Any

import numpy as np
import pytest
import torch

import torchguard
from support.child_process import output_of
from support.compiled import Counting, many, plain, resizes, square, with_out
from torchguard import install

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


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


@pytest.mark.parametrize("filled_anew", [False, True])
def test_a_frozenset_of_functions_is_looked_up_in_compiled_code_as_in_eager(
    filled_anew: bool,
) -> None:
    """Up to torch 2.8 Dynamo takes a frozenset of builtins and types alone."""
    (x,) = square()
    original = torch.add
    if filled_anew:  # Dynamo's table of functions, without the replacements
        torch._dynamo.trace_rules.clear_lru_cache()
        torch._dynamo.trace_rules.get_torch_obj_rule_map()
    with install("out"):
        for functions in (
            frozenset({torch.add, torch.sub}),
            frozenset({torch.add, original, dict}),
            frozenset({torch.sub}),
            frozenset({original, torch.cat}),  # not what stands there now
        ):
            count, result = graphs_of(in_set, x, functions, fullgraph=True)
            assert count == 1
            assert torch.equal(result, in_set(x, functions))
        replacements = frozenset({torch.add})
    for functions in (replacements, frozenset({original}), frozenset({1, 2})):
        count, result = graphs_of(in_set, x, functions, fullgraph=True)
        assert count == 1
        assert torch.equal(result, in_set(x, functions))


def test_a_frozenset_with_a_function_of_the_users_compiles_as_without_the_guard() -> None:
    (x,) = square()
    plain, _ = graphs_of(in_set, x, frozenset({torch.add, in_set}))
    with install("out"):
        functions = frozenset({torch.add, in_set})
        count, result = graphs_of(in_set, x, functions)
        assert torch.equal(result, in_set(x, functions))
    assert count == plain


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
