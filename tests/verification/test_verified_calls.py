"""Which calls of a compiled graph are checked: new sizes, and calls from many threads."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.child_process import output_of
from support.miscompiling import spoiling, verified_backend, wrong
from torchguard import MiscompilationWarning
from torchguard.verification.check import GraphCheck

pytestmark = pytest.mark.usefixtures("fresh_reports")


# --- sizes


def from_size(size: int) -> Any:
    """Make a backend that is wrong for inputs of so many elements and more."""

    def spoil(outputs: list[Any], given: list[Any]) -> Any:
        large = max(value.numel() for value in given if isinstance(value, torch.Tensor)) >= size
        return [outputs[0] + 1, *outputs[1:]] if large else outputs

    return spoiling(spoil)


def test_sizes_that_are_new_to_a_graph_are_checked_again() -> None:
    """Right for small sizes, wrong from one on: that call is right, with one warning."""
    wrong_from = 2000
    backend = verified_backend(from_size(wrong_from))
    compiled = torch.compile(lambda x: (x * 2,), backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (4, 5, 3, *range(wrong_from - 2, wrong_from + 3), 4, 3000):
            assert compiled(torch.ones(size))[0].tolist() == [2] * size
    assert [warning.category for warning in caught] == [MiscompilationWarning]
    _, dynamic = backend.stats().graphs
    assert (dynamic.status, dynamic.runs) == ("mismatched", "eager")


def test_an_integer_of_the_program_and_inner_dims_are_sizes_too() -> None:
    def spoil(outputs: list[Any], given: list[Any]) -> Any:
        seven = any(type(value) is int and value == 7 for value in given)
        return [outputs[0] + 1] if seven else outputs

    backend = verified_backend(spoiling(spoil))
    compiled = torch.compile(lambda x, n: (x * n,), backend=backend)
    for shape, n in (((2, 3), 4), ((2, 5), 6), ((2, 6), 5)):
        compiled(torch.ones(shape), n)
    with pytest.warns(MiscompilationWarning):
        assert compiled(torch.ones(2, 6), 7)[0].tolist() == [[7] * 6] * 2
    assert compiled(torch.ones(2, 7), 6)[0].tolist() == [[6] * 7] * 2


def test_sizes_after_the_first_256_are_trusted_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert GraphCheck.MOST == 256
    monkeypatch.setattr(GraphCheck, "MOST", 10)
    backend = verified_backend("aot_eager")
    compiled = torch.compile(lambda x: x.sin(), backend=backend)
    for size in range(2, 12):
        compiled(torch.ones(size))
    _, dynamic = backend.stats().graphs
    assert (dynamic.status, dynamic.checks, dynamic.reason) == ("verified", 9, "")
    for size in (12, 30, 31, 3):
        compiled(torch.ones(size))
    assert (dynamic.status, dynamic.checks) == ("verified", 10)
    assert dynamic.reason == "trusted with sizes after the first 10 checks"


# --- threads


def test_a_call_during_a_check_runs_eagerly_and_does_not_wait() -> None:
    checking, go_on = threading.Event(), threading.Event()

    def slow(outputs: list[Any], _: list[Any]) -> Any:
        checking.set()
        assert go_on.wait(60)
        return [outputs[0] + 1]

    backend = verified_backend(spoiling(slow))
    compiled = torch.compile(lambda x: (x * 2,), backend=backend)
    seen: list[Any] = []

    def call() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen.append(compiled(torch.ones(3))[0].tolist())

    first = threading.Thread(target=call)
    first.start()
    assert checking.wait(60)
    assert compiled(torch.ones(3))[0].tolist() == [2, 2, 2]
    assert seen == []
    go_on.set()
    first.join(60)
    assert seen == [[2, 2, 2]]
    assert [graph.runs for graph in backend.stats().graphs] == ["eager"]


@torch.library.custom_op("verified_calls::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """An operator of the user that draws, which no tag says."""
    return torch.rand_like(x)


noise.register_fake(torch.empty_like)


@pytest.mark.parametrize("last", [lambda x: x * 2, torch.rand_like, noise])
def test_random_numbers_of_another_thread_are_not_those_of_the_graph(
    last: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """The RNG state is the whole process's: threads that compile move it and set it back."""
    stop, is_random = threading.Event(), last in (torch.rand_like, noise)

    def draw() -> None:
        while not stop.is_set():
            torch.rand(1)

    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(100):
            x = x + 1
        return (last(x),)

    backend = verified_backend(wrong)
    compiled = torch.compile(function, backend=backend, dynamic=False)
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for rows in range(1000, 1004):  # a graph each
                as_eager = compiled(torch.zeros(rows))[0].tolist() == rows * [200.0]
                assert as_eager or is_random
    finally:
        stop.set()
        thread.join(60)
    expected = "unverified" if is_random else "mismatched"
    assert {graph.status for graph in backend.stats().graphs} == {expected}


def test_the_handler_of_a_warning_may_call_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(lambda x: (x * 2,), backend=verified_backend(wrong))
    seen: list[Any] = []

    def show(_: object, category: type[Warning], *__: Any, **___: Any) -> None:
        if category is not MiscompilationWarning:
            return  # Python 3.12 warns of a fork beside threads, for one
        thread = threading.Thread(target=lambda: seen.append(compiled(torch.ones(3))[0].tolist()))
        thread.start()
        thread.join(60)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        assert compiled(torch.ones(3))[0].tolist() == [2, 2, 2]
    assert seen == [[2, 2, 2]]


def test_tensors_that_the_graph_owns_are_not_seen_while_a_check_swaps_them() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    checking, go_on = threading.Event(), threading.Event()

    def slow(outputs: list[Any], _: list[Any]) -> Any:
        checking.set()
        go_on.wait(1)
        return outputs

    graph = torch.fx.Graph()
    owned = graph.get_attr("weight")
    graph.output((graph.call_method("add_", (owned, graph.placeholder("x"))),))
    module = torch.fx.GraphModule({"weight": weight}, graph)
    checked = verified_backend(spoiling(slow))(module, [torch.ones(1)])

    def call() -> None:
        with torch.no_grad():
            checked(torch.ones(1))

    threads = [threading.Thread(target=call) for _ in range(2)]
    threads[0].start()
    assert checking.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert weight.tolist() == [2]


THREADS = """
    import collections, threading, warnings
    import torch
    from torchguard import verified

    warnings.simplefilter("ignore")
    seen = collections.Counter()
    scope = {}
    # Long enough for another thread to call while this is compiled once more.
    lines = ["def f(q):", "    q[1:] = q[:-1].clone()", "    r = q * 2"]
    lines += [*(f"    r = r + {i}" for i in range(100)), "    return r"]
    exec("\\n".join(lines), scope)
    function, checked = scope["f"], verified()(scope["f"])
    start = threading.Barrier(8)

    def work(number):
        start.wait()
        for rows in (20, 20, 20, 7, 9, 9, 30, 31, 32, 20, 20, 20):
            queue, same = (torch.arange(3.0 * rows).view(rows, 3) + number for _ in "ab")
            want = function(same)
            try:
                got = checked(queue)
            except Exception as error:
                seen[f"{type(error).__name__}: {error}"] += 1
                continue
            right = torch.equal(want, got) and torch.equal(same, queue)
            seen["right" if right else "wrong"] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(dict(seen))
    if set(seen) != {"right"}:
        print(checked.stats())
"""


@pytest.mark.skipif(
    not hasattr(torch.compiler, "_compile_session_context")
    and not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_tls"),
    reason="plain torch.compile raises too while another thread compiles",
)
@pytest.mark.slow
def test_eight_threads_that_begin_together_get_right_results_and_no_exception() -> None:
    """Of a shift of rows, which inductor compiles wrong for some sizes.

    https://github.com/pytorch/pytorch/issues/197829
    """
    assert output_of(THREADS) == "{'right': 96}\n"
