"""Tensor subclasses, modes and torch's own tables know a patched function as before."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import torchguard
from support.child_process import output_of
from support.modes import FunctionMode
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


def table_of_originals() -> dict[Any, str]:
    """What docs/patching.md tells those to write who look functions up by identity."""
    names = "add", "norm", "nn.functional.gelu", "Tensor.resize_", "nn.functional.normalize"
    table = {torchguard.get_original(f"torch.{name}"): name.rpartition(".")[2] for name in names}
    return table | {torchguard.get_original("torch.resize_as_"): "torch.resize_as_"}


def assert_dispatched() -> None:
    tensor: Any = torch.ones(3).as_subclass(Dispatching)
    assert [
        torch.add(tensor, 1),
        torch.add(torch.ones(3), tensor, out=torch.empty(3)),
        torch.norm(tensor),
        torch.nn.functional.gelu(tensor),
        tensor.resize_(2),
        torch.nn.functional.normalize(tensor),
        torch.resize_as_(tensor, torch.ones(3)),
    ] == ["add", "add", "norm", "gelu", "resize_", "normalize", "torch.resize_as_"]


def test_a_dispatch_table_works_whenever_it_is_built() -> None:
    Dispatching.table = {
        torch.add: "add",
        torch.norm: "norm",
        torch.nn.functional.gelu: "gelu",
        torch.Tensor.resize_: "resize_",
        torch.nn.functional.normalize: "normalize",
        torch.resize_as_: "torch.resize_as_",
    }
    assert_dispatched()
    with install("resize", "out"):
        assert_dispatched()
        Dispatching.table = table_of_originals()
        assert_dispatched()
    assert_dispatched()


class Listening(torch.Tensor):
    calls: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(torch.overrides.resolve_name(func) or getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


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

    def listen() -> tuple[list[str], list[Any]]:
        Listening.calls = []
        calls_of_everyday_code(lambda tensor: tensor.as_subclass(Listening))
        mode = FunctionMode(lambda func, *_: getattr(func, "__name__", "?"))
        with mode:
            calls_of_everyday_code(lambda tensor: tensor)
        # What the test itself makes does not count.
        return [name for name in Listening.calls if "as_subclass" not in name], mode.seen

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

def facts():
    # Each of these fills a table of torch that is kept for the rest of the process.
    yield sorted(
        (getattr(owner, "__name__", type(owner).__name__), function.__name__)
        for owner, functions in torch.overrides.get_overridable_functions().items()
        for function in functions if hasattr(function, "__name__")
    )
    some = [torchguard.get_original("torch." + n) for n in ("add", "norm", "Tensor.resize_", "cat")]
    yield [torch.overrides.resolve_name(function) for function in some]
    yield torch.overrides.is_tensor_method_or_property(some[2])
    zeros = torchguard.get_original("torch.zeros")
    yield zeros in torch.overrides.get_ignored_functions()
    yield [f in torch.overrides.get_testing_overrides() for f in some[:2]]
    with torch.device("meta"):
        makers = torch.zeros, torch.empty, torch.ones, torch.rand, torch.arange
        yield [make(2).device.type for make in makers]

for step in sys.argv[1:]:
    getattr(torchguard, step)(*["resize", "out"][: 2 * (step == "install")])
    print(list(facts()))
"""


def test_torchs_tables_of_functions_are_the_same_whenever_they_are_filled() -> None:
    """First on bare torch and then with the guards, and the other way round."""
    printed = output_of(TABLES, "uninstall", "install") + output_of(TABLES, "install", "uninstall")
    assert "'meta', 'meta', 'meta'" in printed
    assert len(printed.splitlines()) == 4
    assert len(set(printed.splitlines())) == 1


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
