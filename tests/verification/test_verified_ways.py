"""The ways to verify: a decorator, a backend, install(), and each of them with bucketed."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.child_process import output_of
from support.miscompiling import (
    inputs,
    one_value,
    spoiling,
    stats,
    verified_backend,
    workload,
    wrong,
)
from torchguard import (
    Buckets,
    MiscompilationWarning,
    bucketed,
    install,
    verification_report,
    verified,
)

pytestmark = pytest.mark.usefixtures("fresh_reports")


def test_a_function_or_a_module_stays_what_it_was_and_has_stats() -> None:
    @verified(backend="aot_eager", fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        """Twice x."""
        return x * 2

    assert (double.__name__, double.__doc__) == ("double", "Twice x.")
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert stats(double).verified == 1
    original = nn.Linear(3, 2)
    keys = list(original.state_dict())
    module: nn.Module = verified(backend="aot_eager")(original)
    assert module is original
    assert type(original) is nn.Linear
    assert list(module.state_dict()) == keys
    module(torch.ones(1, 3))
    assert stats(module).verified == 1


def test_two_backends_are_counted_apart_and_the_process_counts_both_in_a_table() -> None:
    before = len(verification_report().graphs)
    one, other = verified_backend(spoiling(one_value)), verified_backend("aot_eager")
    with pytest.warns(MiscompilationWarning):
        torch.compile(workload, backend=one)(*inputs())
    torch.compile(lambda x: x + 2, backend=other)(torch.ones(1))
    assert len(one.stats().graphs) == len(other.stats().graphs) == 1
    assert len(verification_report().graphs) == before + 2
    shown = str(one.stats())
    assert "workload (" in shown
    assert "mismatched  eager" in shown
    assert shown.splitlines()[-1].startswith("1 graphs: 0 verified, 1 mismatched, 0 unverified; ")


def test_the_report_of_an_instance_that_runs_graphs_of_another_says_so() -> None:
    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    first, second = (verified(backend="aot_eager")(Doubling()) for _ in range(2))
    for each in (first, second):
        each(torch.ones(2))
    told = ["for another instance of this code" in str(stats(each)) for each in (first, second)]
    assert told == [len(stats(each).graphs) == 0 for each in (first, second)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calls": 0}, "calls is 0, expected a number of 1 or more"),
        ({"on_mismatch": "panic"}, "expected 'fallback' or 'raise' or 'warn'"),
        ({"max_bytes": -1}, "max_bytes is -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verified_backend(**options)
    with pytest.raises(ValueError, match=message):
        verified(**options)


def test_install_leaves_other_backends_alone_and_refuses_what_torch_does() -> None:
    before = len(verification_report().graphs)
    with install("verified"):
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
    assert len(verification_report().graphs) == before
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        verified_backend(options={"no_such_option": 1})
    with install("verified"), pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(lambda x: x, options={"no_such_option": 1})


# --- with inductor: the three everyday lines


def shift(x: torch.Tensor) -> None:
    x[1:] = x[:-1].clone()


def swap(x: torch.Tensor, y: torch.Tensor) -> None:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


def write_and_copy(x: torch.Tensor) -> torch.Tensor:
    x[2] = 5.0
    return x.clone()


EVERYDAY: list[Any] = [shift, swap, write_and_copy]


def outcome_of(function: Callable[..., Any], count: int) -> list[Any]:
    given = [torch.arange(4.0) + 10 * i for i in range(count)]
    result = function(*given)
    if result is not None:
        result.add_(1)  # it must alias nothing
    return [value.tolist() for value in given] + [None if result is None else result.tolist()]


def by_install(function: Any) -> Any:
    with install("verified"):
        return torch.compile(function)


WAYS: dict[str, Callable[[Any], Any]] = {
    "decorator": verified(),
    "backend": lambda function: torch.compile(function, backend=verified_backend("inductor")),
    "install": by_install,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchguard.MiscompilationWarning")
def test_everyday_lines_are_wrong_bare_and_right_each_way() -> None:
    """Each line by the decorator; by the other ways the one that bare torch compiles wrong."""

    def is_right(function: Any, way: Callable[[Any], Any]) -> bool:
        torch._dynamo.reset()
        count = function.__code__.co_argcount
        return outcome_of(way(function), count) == outcome_of(function, count)

    first = next(function for function in EVERYDAY if not is_right(function, torch.compile))
    for name, way in WAYS.items():
        for function in EVERYDAY if name == "decorator" else [first]:
            before = len(verification_report().graphs)
            assert is_right(function, way), (name, function.__name__)
            assert len(verification_report().graphs) == before + 1, name


def test_the_backend_is_found_by_name_with_no_import(tmp_path: Path) -> None:
    information = tmp_path / "torchguard_runtime-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: x\nVersion: 0\n")
    project = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text()
    group = project.partition("[project.entry-points.torch_dynamo_backends]\n")[2]
    line = group.partition("\n")[0].replace('"', "")
    (information / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{line}\n")
    printed = output_of(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch._dynamo
        print("torchguard" in sys.modules)
        found = torch._dynamo.lookup_backend("torchguard")
        from torchguard.verification.backend import backend
        print(found is backend)
        """,
        fresh=True,  # the server of processes may have imported torchguard
    )
    assert printed.splitlines() == ["False", "True"]


def test_what_is_verified_already_is_returned_as_it_is() -> None:
    checked = verified(backend="aot_eager")(lambda x: x * 2)
    assert verified()(checked) is checked
    for options in ({"calls": 2}, {"backend": "eager"}):
        with pytest.raises(TypeError, match="verified already, with other options"):
            verified(**options)(checked)
    module = verified(backend="aot_eager")(torch.nn.Linear(2, 2))
    module(torch.ones(1, 2))
    assert verified()(module) is module
    module(torch.ones(1, 2))
    assert len(stats(module).graphs) == 1
    with torchguard.install("verified"):
        compiled = torch.compile(lambda x: x * 2)
    assert verified()(compiled) is compiled
    assert stats(compiled).graphs == ()


def _pickled(module: torch.nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))  # noqa: S301 - its own bytes


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_a_copy_of_a_module_is_not_compiled_and_has_no_graphs(copied: Any) -> None:
    """As torch has it; ``verified()``, with inductor, can be pickled too."""
    module = verified()(torch.nn.Linear(2, 2))
    other = copied(module)
    assert stats(other).graphs == ()
    assert other(torch.ones(1, 2)).shape == (1, 2)
    assert stats(other).graphs == ()


async def _asynchronous(x: torch.Tensor) -> torch.Tensor:
    return x


def _compiled_in_place() -> nn.Module:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda: 3, {}, "expected a function or a module, got int"),
        (lambda: "aot_eager", {}, r"for a backend write verified\(backend='aot_eager'\)"),
        (lambda: _asynchronous, {}, "_asynchronous is async"),
        (lambda: torch.compile(double), {}, "double was compiled already; pass the function"),
        (_compiled_in_place, {}, "Linear was compiled already"),
        (
            lambda: bucketed(double, **IN_BUCKETS, compile={"backend": "eager"}),
            {"backend": "aot_eager"},
            "keeps the backend, mode and options",
        ),
    ],
)
def test_what_can_not_be_compiled_or_keeps_its_settings_is_refused(
    function: Any, options: dict[str, Any], message: str
) -> None:
    for decorate in (lambda given: verified(given, **options), verified(**options)):
        with pytest.raises(TypeError, match=message):
            decorate(function())  # type: ignore[no-untyped-call]


# --- with bucketed, in either order: every bucket's graph is checked


IN_BUCKETS: dict[str, Any] = {"dims": {"x": {0: "t"}}, "buckets": Buckets([4, 8])}
LENGTHS = (3, 6, 2)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * 2


MAKERS: dict[str, Callable[[Any], Any]] = {
    "inside": lambda backend: bucketed(verified(backend=backend)(double), **IN_BUCKETS),
    "around": lambda backend: verified(backend=backend)(bucketed(double, **IN_BUCKETS)),
    "around a module": lambda b: verified(backend=b)(bucketed(Scaled(), **IN_BUCKETS)),
    "around settings": lambda backend: verified()(
        bucketed(double, **IN_BUCKETS, compile={"backend": backend})
    ),
}


@pytest.mark.parametrize("how", MAKERS)
def test_each_buckets_graph_is_checked_and_what_is_wrong_replaced(how: str) -> None:
    make = MAKERS[how]
    right = make("aot_eager")
    before = len(verification_report().graphs)
    for length in LENGTHS:
        assert right(torch.ones(length)).tolist() == [2] * length
    graphs = verification_report().graphs[before:]
    assert [(graph.status, graph.runs) for graph in graphs] == [("verified", "aot_eager")] * 2
    assert right.stats().hits == {(4,): 2, (8,): 1}

    torch._dynamo.reset()
    spoiled = make(wrong)
    before = len(verification_report().graphs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in LENGTHS:
            assert spoiled(torch.ones(length)).tolist() == [2] * length
    kinds = [warning.category for warning in caught]
    assert kinds.count(MiscompilationWarning) == 2
    assert [graph.status for graph in verification_report().graphs[before:]] == ["mismatched"] * 2


def test_a_module_that_is_verified_is_not_compiled_again() -> None:
    with pytest.raises(ValueError, match="compiled already"):
        bucketed(verified(backend="aot_eager")(Scaled()), **IN_BUCKETS, compile=True)
