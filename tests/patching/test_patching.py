"""A patched function is read, pickled, copied, and known to torch's own tables as before."""

from __future__ import annotations

import copy
import inspect
import pickle
import pkgutil
import pydoc
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from support.child_process import output_of
from support.ways import outcome_of
from torchguard import install
from torchguard._torch import patch
from torchguard.patching.guards import GUARDS

# Read while nothing is installed: a guard looks for builtins of torch.
PATHS = [path for guard in GUARDS.values() for path in guard.replacements() if patch.exists(path)]


def live(path: str) -> Any:
    # torch.optim deletes the names of its modules, so attributes alone do not lead there.
    return pkgutil.resolve_name(path)


# --- names, signatures, docstrings


def shown(function: Any) -> list[Any]:
    """What inspection tells of a function, and by which name."""
    try:
        signature = str(inspect.signature(function))
    except ValueError:  # most builtins have none
        signature = ""
    kinds = BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
    tests = inspect.isbuiltin, inspect.isfunction, inspect.ismethoddescriptor, inspect.isroutine
    text = pydoc.render_doc(function, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    return [
        *(function.__name__, function.__qualname__, function.__doc__, function.__class__),
        *(signature, repr(function), hash(function), text.partition("in module")[0]),
        *(isinstance(function, kind) for kind in kinds),
        *(test(function) for test in tests),
    ]


def test_what_torch_shows_of_a_function_is_shown_of_what_is_patched() -> None:
    assert len(PATHS) > 300
    with install("all", only_if_needed=False):
        for path in PATHS:
            function, bare = live(path), patch.original(path)
            assert function is not bare
            assert function == bare
            assert bare == function
            assert shown(function) == shown(bare)


def test_a_replacement_is_bound_where_the_original_is() -> None:
    """As the attribute of a class a builtin is called as it is, a function with the object."""

    def bound() -> list[Any]:
        own: Any = type(
            "Own", (), {"add": torch.add, "norm": torch.norm, "add_": torch.Tensor.add_}
        )

        add_ = torch.ones(1).add_
        return [
            own().add(torch.ones(1), 1).item(),
            type(outcome_of(lambda: own().norm(torch.ones(1))).error),
            type(outcome_of(lambda: own().add_(torch.ones(1), 1)).error),
            (add_.__name__, add_.__doc__, add_ == torch.ones(1).add_, callable(add_)),
            pickle.loads(pickle.dumps(add_))(1).item(),  # noqa: S301
        ]

    bare = bound()
    with install("out", "overlap"):
        assert bound() == bare


# --- pickle, copy, save


def test_a_function_is_pickled_by_its_name() -> None:
    """Loaded after uninstall() it is torch's own, also where there is no torchguard."""
    with install("all", only_if_needed=False):
        patched = {path: live(path) for path in PATHS}
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            pickled = pickle.dumps(patched, protocol)
            assert b"torchguard" not in pickled
            loaded = pickle.loads(pickled)  # noqa: S301
            assert all(loaded[path] is function for path, function in patched.items())
        assert all(copy.deepcopy(function) is function for function in patched.values())
    for path, function in pickle.loads(pickled).items():  # noqa: S301
        assert function is live(path) is patch.original(path)
    for path, function in patched.items():
        assert pickle.loads(pickle.dumps(function)) is live(path)  # noqa: S301


# --- tables of torch that know functions by identity


TABLES = """
import sys, torch, torchguard
from torchguard._torch import patch

def facts():
    # Each of these fills a table of torch that is kept for the rest of the process.
    yield sorted(
        (getattr(owner, "__name__", type(owner).__name__), function.__name__)
        for owner, functions in torch.overrides.get_overridable_functions().items()
        for function in functions if hasattr(function, "__name__")
    )
    some = [patch.original("torch." + n) for n in ("add", "norm", "Tensor.resize_", "cat")]
    yield [torch.overrides.resolve_name(function) for function in some]
    yield torch.overrides.is_tensor_method_or_property(some[2])
    zeros = patch.original("torch.zeros")
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
