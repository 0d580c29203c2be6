"""PyTorch's own warnings under guards: the same lines, filters and counts as without them."""

from __future__ import annotations

import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchguard

FILE = "program.py"
PROGRAM = """
import torch

x, mask = torch.arange(4.0), torch.tensor([1, 0, 1, 0], dtype=torch.uint8)
one, table = torch.ones(1), torch.zeros(2, 2)
x[mask]
x[mask]
for _ in range(2):
    x[mask] = torch.tensor([5.0, 6.0])
x.index_put((mask,), torch.ones(2))
for _ in range(2):
    torch.add(x, 1, out=torch.ones(3))
torch.add(x, 1, out=torch.ones(3)), torch.std(one)
torch.std(one)
one.std()
x.copy_(torch.ones(4, dtype=torch.complex64))
x[0] = torch.tensor(1j)
one.expand(4).index_put((torch.tensor([0]),), one)
torch.zeros(1).expand(4).index_put_((torch.tensor([0]),), one)
torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), one, (1, 1))
table.scatter(0, torch.tensor([[0, 1]]), table, reduce="add")
table.index_reduce_(0, torch.tensor([0]), table[:1].clone(), "prod")
torch.linalg.vector_norm(x, out=torch.ones(2))
float(torch.tensor(1 + 0j))
"""
CODE = compile(PROGRAM, FILE, "exec")

FILTERS: dict[str, Callable[[], object]] = {
    "default": lambda: warnings.simplefilter("default"),
    "always": lambda: warnings.simplefilter("always"),
    "ignore": lambda: warnings.simplefilter("ignore"),
    "ignored in the program": lambda: warnings.filterwarnings("ignore", module="program"),
    "one line": lambda: warnings.filterwarnings("ignore", lineno=7),
    "one text": lambda: warnings.filterwarnings("ignore", message="indexing with dtype"),
    "error": lambda: warnings.simplefilter("error"),
}


@pytest.fixture(autouse=True)
def _warned_always() -> Iterator[None]:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # also of what PyTorch says once in a process
    yield
    torch.set_warn_always(before)


def shown(code: Any = CODE) -> tuple[list[tuple[Any, ...]], str]:
    """Run the program with the filters that there are; return what it shows, and its error."""
    error = ""
    with warnings.catch_warnings(record=True) as found:
        try:
            exec(code, {"__name__": "program"})  # noqa: S102
        except Warning as warning:
            lines = [each.lineno for each in traceback.extract_tb(warning.__traceback__)]
            error = f"{lines[1]} {warning}"
    return [(each.filename, each.lineno, each.category, str(each.message)) for each in found], error


@pytest.mark.parametrize("name", FILTERS)
def test_a_warning_of_pytorch_is_shown_as_without_guards(name: str) -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        FILTERS[name]()
        expected = shown()
        with torchguard.install("all", only_if_needed=False):
            found = shown()
        again = shown()
    assert found == expected
    assert again == expected
    places = [each[:2] for each in expected[0]]
    if name == "default":
        assert (FILE, 6) in places
        assert (FILE, 7) in places
        assert len(places) > 12


def test_threads_are_shown_their_own_lines() -> None:
    programs = [compile("\n" * n + PROGRAM, FILE, "exec") for n in range(0, 4000, 1000)]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        expected = [each for code in programs for each in shown(code)[0]]
        with (
            torchguard.install("out", "overlap", "checks"),
            warnings.catch_warnings(record=True) as found,
        ):
            threads = [
                threading.Thread(target=exec, args=(code, {"__name__": "program"}))
                for code in programs
            ]
            for each in threads:
                each.start()
            for each in threads:
                each.join(60)
    lines = sorted((each.lineno, str(each.message)) for each in found)
    assert lines == sorted((each[1], each[3]) for each in expected)


def test_filters_are_those_before_once_no_guard_is_in_place() -> None:
    torchguard.uninstall()
    before = list(warnings.filters)
    with torchguard.install("resize"), torchguard.install("out"):
        assert len(warnings.filters) == len(before) + 1
        # Pools hand the filters of a process to its workers.
        copies = pickle.loads(pickle.dumps(warnings.filters))  # noqa: S301
        assert len(copies) == len(warnings.filters)
    assert warnings.filters == before
