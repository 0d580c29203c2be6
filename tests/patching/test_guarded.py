"""guarded(): which guards are on, where a scope begins and ends, what stays until uninstall()."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import torchguard
from support.install import out_is_safe, resize_is_safe, same, snapshot
from torchguard import guarded, install, installed, uninstall
from torchguard.errors import IndexOutOfRangeError, TorchGuardWarning


def overlap_is_right() -> bool:
    x = np.arange(12.0).reshape(3, 4)
    tensor = torch.from_numpy(x.copy())
    tensor -= tensor[:, :1]
    return np.array_equal(tensor.numpy(), x - x[:, :1])


def checks_raise() -> bool:
    with pytest.raises(IndexError) as raised:
        torch.index_select(torch.ones(3), 0, torch.tensor([99]))
    return isinstance(raised.value, IndexOutOfRangeError)


PROTECTS = {
    "resize": resize_is_safe,
    "out": out_is_safe,
    "overlap": overlap_is_right,
    "checks": checks_raise,
}
NOTHING: set[str] = set()


def on() -> set[str]:
    """The guards that protect now, of those that one operation shows."""
    return {name for name, protects in PROTECTS.items() if protects()}


# --- names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [("out",), ("overlap", "resize"), ("checks", "out"), ()])
def test_a_scope_has_the_guards_that_it_names(names: Any) -> None:
    """Without names "resize" and "out"."""
    with guarded(*names):
        assert on() == set(names or ("resize", "out")) == set(installed())
    assert on() == NOTHING == set(installed())


def test_a_name_that_is_no_guard_is_refused_with_what_to_type() -> None:
    with pytest.raises(ValueError, match="guarded: there is no guard named 'outs'; did you mean"):
        guarded("outs")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"got step, expected names .* @torchguard.guarded\(\) above"
    ):

        @guarded  # type: ignore[arg-type]
        def step() -> None:
            pass


# --- where a scope begins and ends


def test_scopes_nest_overlap_and_are_used_again() -> None:
    scope, error = guarded("resize"), ValueError("mine")
    for _ in range(2):
        with pytest.raises(ValueError, match="mine") as caught, scope, scope:
            assert resize_is_safe()
            raise error
        assert caught.value is error
        assert on() == NOTHING
    first, second = guarded("resize"), guarded("resize", "out")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert on() == {"resize", "out"}
    second.__exit__(None, None, None)
    assert on() == NOTHING


def test_a_scope_is_that_of_the_whole_process() -> None:
    found: list[bool] = []

    def look() -> None:
        found.append(resize_is_safe())

    with guarded():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [True]


def test_functions_methods_and_generators_are_decorated() -> None:
    @guarded()
    def function(depth: int) -> int:
        """Documented."""
        assert resize_is_safe()
        return 0 if depth == 0 else 1 + function(depth - 1)

    class Owner:
        @guarded("resize")
        def method(self, value: bool) -> bool:
            return resize_is_safe() is value

    @guarded()
    def generator() -> Iterator[bool]:
        got = yield resize_is_safe()
        assert got == 7
        yield resize_is_safe()

    assert function(3) == 3
    assert (function.__name__, function.__doc__) == ("function", "Documented.")
    assert Owner().method(value=True)
    steps = generator()
    assert next(steps)
    assert on() == NOTHING  # between the steps
    assert steps.send(7)  # type: ignore[attr-defined]
    steps.close()  # type: ignore[attr-defined]
    assert on() == NOTHING


def test_a_coroutine_is_covered_until_it_ends() -> None:
    @guarded("resize")
    async def task() -> bool:
        await asyncio.sleep(0)
        return resize_is_safe()

    async def run() -> list[bool]:
        return [*await asyncio.gather(task(), task())]

    assert asyncio.run(run()) == [True, True]
    assert on() == NOTHING


def test_what_has_no_calls_is_not_decorated() -> None:
    class Adder:
        """A class."""

    async def steps() -> AsyncIterator[int]:
        yield 1

    wrong: dict[str, Any] = {
        "function is .*Adder, expected a function": Adder,
        "function is int, expected a function": 3,
        "function is .*steps, expected": steps,
    }
    for message, each in wrong.items():
        with pytest.raises(TypeError, match=message):
            guarded()(each)


# --- what stays


def test_the_first_scope_replaces_and_later_ones_count() -> None:
    """What stays does nothing, and uninstall() restores the very attributes."""
    before = snapshot()
    with guarded("resize", "out", "overlap", "checks"):
        inside = snapshot()
    assert same(inside, snapshot())
    assert not same(before, inside)
    with guarded("out"):
        assert same(inside, snapshot())
    assert on() == NOTHING
    uninstall()
    assert same(before, snapshot())


def test_a_scope_that_is_open_keeps_its_guard() -> None:
    before = snapshot()
    with guarded("resize"):
        with install("resize", "out") as installation:
            assert installation.skipped == {}
        assert on() == {"resize"}
        uninstall()
        assert on() == {"resize"}
    uninstall()
    assert same(before, snapshot())


def test_install_inside_a_scope_outlives_it() -> None:
    with guarded("resize"):
        installation = install("resize")
    assert on() == {"resize"}
    installation.uninstall()
    assert on() == NOTHING
    assert "resize_" not in vars(torch.Tensor)


def test_a_guard_that_is_not_needed_or_does_not_protect_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tried for the first scope, then not until uninstall()."""
    tried: list[str] = []
    monkeypatch.setattr(
        "torchguard.patching.install.SELF_TESTS",
        {"torch": {"out": lambda: tried.append("out") or "out= is another one"}},  # type: ignore[func-returns-value]
    )
    before = snapshot()
    found: list[set[str]] = []

    def enter_three_times() -> None:
        for _ in range(3):
            with guarded("out", "resize"):
                found.append(on())

    with pytest.warns(TorchGuardWarning, match="'out' is off.*out= is another one") as warned:
        enter_three_times()
    assert found == [{"resize"}] * 3
    assert [each.filename for each in warned] == [__file__]
    # Whether it is needed, whether it protects, and once more while no other thread can remove it.
    assert tried == ["out", "out", "out"]
    uninstall()
    assert same(before, snapshot())


# --- Dynamo


def test_code_that_is_compiled_in_a_scope_has_the_graphs_it_has_outside() -> None:
    """Called outside, inside and outside again: compiled at most once more."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.add(x, 1).mul_(2)
        return torch.cat([y, y], out=torch.empty(0))

    bare = torch.add
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend)
    for scope in (guarded("out"), guarded("out", "overlap"), guarded("out", "overlap")):
        compiled(torch.ones(2))
        with scope:
            assert compiled(torch.ones(2)).tolist() == [4, 4, 4, 4]
    assert len(graphs) <= 3
    assert all(graph == graphs[0] for graph in graphs)
    assert bare in graphs[0]
    torch._dynamo.reset()


def test_guarded_inside_of_compiled_code_does_nothing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torchguard.guarded("out"):
            return torch.add(x, 1)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert compiled(torch.ones(1)).tolist() == [2]
    torch._dynamo.reset()
