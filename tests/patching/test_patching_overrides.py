"""Tensor subclasses, modes and torch's own tables know a patched function as before."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import torchguard
from support.child_process import output_of
from torchguard import install

if TYPE_CHECKING:
    from collections.abc import Callable


# --- subclasses and modes


class Dispatching(torch.Tensor):
    """The pattern of torch's notes on extending torch: a table of functions."""

    table: dict[Any, str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.table:
            return cls.table[func]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def dispatch_table() -> dict[Any, str]:
    return {
        torch.add: "add",
        torch.norm: "norm",
        torch.nn.functional.gelu: "gelu",
        torch.Tensor.resize_: "resize_",
        torch.nn.functional.normalize: "normalize",
        torch.resize_as_: "torch.resize_as_",
    }


def table_of_originals() -> dict[Any, str]:
    """What docs/patching.md tells those to write who look functions up by identity."""
    return {
        torchguard.get_original(path): name.removeprefix("Tensor.").removeprefix("nn.functional.")
        for name in (
            "add",
            "norm",
            "nn.functional.gelu",
            "Tensor.resize_",
            "nn.functional.normalize",
        )
        for path in (f"torch.{name}",)
    } | {torchguard.get_original("torch.resize_as_"): "torch.resize_as_"}


def dispatched() -> list[Any]:
    tensor: Any = torch.ones(3).as_subclass(Dispatching)
    return [
        torch.add(tensor, 1),
        torch.add(torch.ones(3), tensor, out=torch.empty(3)),
        torch.norm(tensor),
        torch.nn.functional.gelu(tensor),
        tensor.resize_(2),
        torch.nn.functional.normalize(tensor),
        torch.resize_as_(tensor, torch.ones(3)),
    ]


EXPECTED = ["add", "add", "norm", "gelu", "resize_", "normalize", "torch.resize_as_"]


def test_a_dispatch_table_built_before_goes_on_working() -> None:
    Dispatching.table = dispatch_table()
    assert dispatched() == EXPECTED
    with install("resize", "out"):
        assert dispatched() == EXPECTED


def test_a_dispatch_table_of_originals_works_when_it_is_built_while_installed() -> None:
    with install("resize", "out"):
        Dispatching.table = table_of_originals()
        assert dispatched() == EXPECTED


def test_a_dispatch_table_of_originals_works_after_uninstall() -> None:
    with install("resize", "out"):
        Dispatching.table = table_of_originals()
    assert dispatched() == EXPECTED


class Listening(torch.Tensor):
    calls: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(torch.overrides.resolve_name(func) or getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class ListeningMode(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(getattr(func, "__name__", "?"))
        return func(*args, **(kwargs or {}))


def calls_of_everyday_code(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = make(torch.ones(4))
    tensor.resize_(2)
    tensor.resize_(9)
    tensor.resize_as_(torch.ones(3))
    tensor.set_(torch.ones(5))  # type: ignore[call-overload]
    torch.add(tensor, 1, out=torch.empty(0))
    torch.add(torch.ones(5), 1, out=tensor)
    for failing in (
        lambda: tensor.resize_(-1),
        lambda: torch.index_select(torch.ones(5), 0, torch.tensor([9]), out=tensor),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            failing()  # type: ignore[no-untyped-call]


def test_subclasses_and_modes_see_no_call_more_or_less() -> None:
    torch.overrides.resolve_name(torch.add)

    def listen() -> tuple[list[str], list[str]]:
        Listening.calls = []
        calls_of_everyday_code(lambda tensor: tensor.as_subclass(Listening))
        mode = ListeningMode()
        with mode:
            calls_of_everyday_code(lambda tensor: tensor)
        # What the test itself makes does not count.
        return [name for name in Listening.calls if "as_subclass" not in name], mode.calls

    bare = listen()
    assert "resize_" in str(bare[0])
    with install("resize", "out"):
        assert listen() == bare


def test_a_subclass_with_its_own_resize_is_asked_first() -> None:
    class Counting(torch.Tensor):
        count = 0

        def resize_(self, *size: Any, **options: Any) -> Any:
            type(self).count += 1
            return super().resize_(*size, **options)

    with install("resize"):
        tensor = torch.from_numpy(np.ones(2)).as_subclass(Counting)
        with pytest.raises(RuntimeError):
            tensor.resize_(99)
        assert Counting.count == 1
        assert tuple(tensor.shape) == (2,)


# --- tables of torch that know functions by identity


TABLES = """
import sys, torch, torchguard
from importlib import import_module

def facts():
    # Each of these fills a table of torch that is kept for the rest of the process.
    yield "overridable", sorted(
        (getattr(owner, "__name__", type(owner).__name__), function.__name__)
        for owner, functions in torch.overrides.get_overridable_functions().items()
        for function in functions if hasattr(function, "__name__")
    )
    some = [torchguard.get_original("torch." + n) for n in ("add", "norm", "Tensor.resize_", "cat")]
    yield "names", [torch.overrides.resolve_name(function) for function in some]
    yield "methods", torch.overrides.is_tensor_method_or_property(some[2])
    zeros = torchguard.get_original("torch.zeros")
    yield "ignored", zeros in torch.overrides.get_ignored_functions()
    yield "dummies", [f in torch.overrides.get_testing_overrides() for f in some[:2]]
    with torch.device("meta"):
        makers = torch.zeros, torch.empty, torch.ones, torch.rand, torch.arange
        yield "device", [make(2).device.type for make in makers]
    import_module("torch._dynamo")  # torch 2.8 would import it inside the mode, and fail
    from torch._prims.context import TorchRefsMode
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func)); return func(*args, **(kwargs or {}))
    names = []
    with Seen(), TorchRefsMode():
        torch.logaddexp(torch.ones(2), torch.ones(2))
    yield "references", names

def show(when):
    for name, fact in facts():
        print(when, name, len(fact) if name == "overridable" else fact)

order = sys.argv[1]
if order == "bare":
    show("first"); show("then")
elif order == "installed, then not":
    installation = torchguard.install("resize", "out"); show("first")
    installation.uninstall(); show("then")
elif order == "not, then installed":
    show("first"); torchguard.install("resize", "out"); show("then")
"""


@pytest.fixture(scope="module")
def tables_on_bare_torch() -> str:
    """Fill torch's tables of functions in a process without guards, once for both orders."""
    return output_of(TABLES, "bare")


@pytest.mark.parametrize("order", ["installed, then not", "not, then installed"])
def test_torchs_tables_of_functions_are_the_same_whenever_they_are_filled(
    order: str, tables_on_bare_torch: str
) -> None:
    assert "'meta', 'meta', 'meta'" in tables_on_bare_torch
    assert _facts(output_of(TABLES, order)) == _facts(tables_on_bare_torch)


def _facts(text: str) -> list[str]:
    """Leave out TorchRefsMode: its table, filled while installed, holds replacements."""
    return [line for line in text.splitlines() if " references " not in line]


# --- warnings


def test_torchs_warning_about_a_resized_output_is_still_given() -> None:
    """It names the line in torchguard that called torch: docs/patching.md says so."""

    def given() -> list[tuple[type[Warning], str]]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            torch.add(torch.ones(2), 1, out=torch.ones(3))
            torch.range(0, 3)
        return [(each.category, str(each.message).partition("(")[0]) for each in warned]

    bare = given()
    assert len(bare) == 2
    with install("out"):
        assert given() == bare
