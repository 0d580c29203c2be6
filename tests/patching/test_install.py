"""install() and uninstall(): what they do and undo, all or nothing, guards not needed."""

from __future__ import annotations

import copyreg
import gc
import logging
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torchguard
from support.child_process import output_of
from support.install import out_is_safe, resize_is_safe, same, snapshot
from torchguard import install, installed, uninstall
from torchguard._torch.patch import original as torch_has
from torchguard.errors import TorchGuardWarning
from torchguard.patching.guards import GUARDS, NEWEST_TESTED_TORCH, Guard
from torchguard.patching.install import _warn_if_newer
from torchguard.patching.selftests import SELF_TESTS

# --- installing and undoing


def test_install_guards_resize_and_nothing_else_by_default() -> None:
    """Until the with statement ends, with an error too."""
    assert not resize_is_safe()
    with pytest.raises(ZeroDivisionError), install() as installation:
        assert installation.names == ("resize",)
        assert resize_is_safe()
        assert not out_is_safe()
        raise ZeroDivisionError
    assert not resize_is_safe()


def test_uninstall_restores_every_attribute_or_its_absence() -> None:
    before = snapshot()
    uninstall()  # nothing is installed: it does nothing
    uninstall("out")
    assert same(before, snapshot())
    install("resize", "out")
    assert "resize_" in vars(torch.Tensor)
    uninstall()
    assert same(before, snapshot())
    assert "resize_" not in vars(torch.Tensor)


def test_installations_count_and_may_end_in_any_order() -> None:
    """There is one layer, which stays until the last of them is undone."""
    first = install("resize")
    layer = torch.Tensor.resize_
    second = install("resize", "out", "resize")
    assert repr(second) == "Installation(names=('resize', 'out'), skipped={})"
    assert torchguard.installed() == ("resize", "out")
    assert torch.Tensor.resize_ is layer
    with install("out", "resize") as third:
        assert third.names == ("out", "resize")
        first.uninstall()
        first.uninstall()  # again: it does nothing
        assert torch.Tensor.resize_ is layer
        assert resize_is_safe()
        assert out_is_safe()
    fourth = install("out")
    second.uninstall()
    assert torchguard.installed() == ("out",)
    assert not resize_is_safe()
    fourth.uninstall()
    assert torchguard.installed() == ()


def test_uninstall_by_name_undoes_every_layer_of_that_guard_only() -> None:
    mine = install("resize")
    install("resize", "out")
    uninstall("resize")
    assert torchguard.installed() == ("out",)
    another = install("resize")
    mine.uninstall()  # it was undone by name, and does not undo a later one
    assert "resize" in installed()
    another.uninstall()
    uninstall("out", "resize")
    assert torchguard.installed() == ()


def test_installed_looks_at_the_live_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    with install("resize"):
        assert torchguard.installed() == ("resize",)
        monkeypatch.setattr(torch.Tensor, "set_", torch_has("torch.Tensor.set_"))
        assert torchguard.installed() == ()
        monkeypatch.undo()
        assert torchguard.installed() == ("resize",)


def _structures_of_python() -> dict[str, Any]:
    """What libraries copy, and read by the form that Python's documentation gives."""
    return {
        "warnings.filters": list(warnings.filters),
        "copyreg.dispatch_table": dict(copyreg.dispatch_table),
        "gc.callbacks": list(gc.callbacks),
        "sys.path_hooks": list(sys.path_hooks),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, warnings.showwarning),
        "tracing": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "signals": [signal.getsignal(each) for each in signal.valid_signals()],
        "sys.modules": [n for n, m in sys.modules.items() if not isinstance(m, ModuleType)],
        "sys.meta_path": [f for f in sys.meta_path if not callable(getattr(f, "find_spec", None))],
        "logging": (logging.getLoggerClass(), list(logging.root.filters), logging.root.handlers[:]),
    }


def test_what_others_read_of_python_has_nothing_of_ours() -> None:
    """scikit-learn reads ``pattern`` of each item in ``warnings.filters``."""
    with install("all", only_if_needed=False):
        pass  # imports what it needs
    before = _structures_of_python()
    with install("all", only_if_needed=False):
        assert _structures_of_python() == before
    assert _structures_of_python() == before


# --- unknown names


@pytest.mark.parametrize("function", [install, uninstall])
def test_an_unknown_name_is_refused_with_the_list_and_the_nearest(
    function: Callable[..., Any],
) -> None:
    before = snapshot()
    with pytest.raises(
        ValueError,
        match=rf"^{function.__name__}: there is no guard named 'resise'; did you mean 'resize'\? "
        r"guards are: .*\bout, .*resize",
    ):
        function("resise")
    with pytest.raises(ValueError, match=r"named 'zzz'; guards are: ") as refusal:
        function("zzz")
    assert "did you mean" not in str(refusal.value)
    assert same(before, snapshot())


def test_one_unknown_name_among_good_ones_or_a_list_of_names_installs_nothing() -> None:
    with pytest.raises(ValueError, match="named 'resise'"):
        install("resize", "resise")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"separate arguments: install\('resize', 'out'\)"):
        install(["resize", "out"])  # type: ignore[arg-type]
    assert not installed()


# --- a guard that can't be put in place


def _broken(_: Callable[..., Any]) -> Callable[..., Any]:
    raise ZeroDivisionError("this guard is broken")


def _passing_on(original: Callable[..., Any]) -> Callable[..., Any]:
    def passing_on(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return passing_on


BROKEN: dict[str, Callable[[], dict[str, Any]]] = {
    "a replacement raises midway": lambda: {"torch.relu": _passing_on, "torch.chunk": _broken},
    "the list of replacements raises": lambda: _broken(len),  # type: ignore[dict-item, return-value]
    "a path can't be set": lambda: {
        "torch.relu": _passing_on,
        "torch._C.TensorBase.resize_": _passing_on,
    },
    "there is none of the functions": lambda: {"torch.no_such": _passing_on},
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_guard_that_can_not_be_put_in_place_is_skipped_and_leaves_nothing_behind(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are installed."""
    broken: Any = "broken"
    monkeypatch.setitem(GUARDS, broken, Guard(broken, BROKEN[how]))
    before = snapshot()
    with pytest.warns(TorchGuardWarning, match="the guard 'broken' is off"):
        installation = install("resize", broken, "out")
    assert installation.names == installed() == ("resize", "out")
    assert f"torch {torch.__version__}: " in installation.skipped[broken]
    installation.uninstall()
    assert same(before, snapshot())
    with pytest.raises(torchguard.TorchGuardError, match="'broken'"):
        install("resize", broken, strict=True)
    assert installed() == ()
    assert same(before, snapshot())


def test_a_newer_torch_than_was_tested_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchguard.patching.install.NEWEST_TESTED_TORCH", (2, 5))
    _warn_if_newer.cache_clear()
    with pytest.warns(TorchGuardWarning, match=r"newer than 2\.5.* tested") as warned:
        installations = [install() for _ in range(2)]
    for each in installations:
        each.uninstall()
    assert len(warned) == 1
    assert warned[0].filename == __file__
    monkeypatch.undo()
    _warn_if_newer.cache_clear()
    noxfile = (Path(__file__).parents[2] / "noxfile.py").read_text(encoding="utf-8")
    newest = re.findall(r"TORCH_VERSIONS = .*\"(\d+)\.(\d+)\.\d+\"\)", noxfile)
    assert [tuple(map(int, each)) for each in newest] == [NEWEST_TESTED_TORCH]


# --- several guards on one path


def _noting(name: str, calls: list[str]) -> Callable[..., Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return noting

    return make


@pytest.mark.parametrize("first", ["lower", "upper"])
def test_guards_on_one_path_lie_in_one_order_and_leave_in_any(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("lower", "upper"):
        make = _noting(name, calls)
        monkeypatch.setitem(GUARDS, name, Guard(name, lambda make=make: {"torch.relu": make}))  # type: ignore[misc]

    def called() -> list[str]:
        calls.clear()
        torch.relu(torch.ones(1))
        return list(calls)

    bare = torch.relu
    names: list[Any] = ["lower", "upper"] if first == "lower" else ["upper", "lower"]
    for last in names:
        installations = {name: install(name) for name in names}
        assert called() == ["upper", "lower"]
        assert torch_has("torch.relu") is bare
        (other,) = {*names} - {last}
        installations[other].uninstall()
        assert called() == [last]
        installations[last].uninstall()
        assert torch.relu is bare
    with torchguard.guarded(*names):
        assert called() == ["upper", "lower"]
    assert called() == []
    with install(names[0]):
        assert called() == [names[0]]
    uninstall(*names)
    assert torch.relu is bare


def test_all_is_every_guard() -> None:
    with install("all", only_if_needed=False) as installation:
        assert installation.names == tuple(GUARDS)
        uninstall("all")
        assert installed() == ()
    with torchguard.guarded("all", "resize"):
        assert "overlap" in installed()


# --- only if needed


def test_a_guard_that_this_torch_does_not_need_is_skipped_with_the_reason_unless_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchguard.patching.install.SELF_TESTS", {"torch": {"out": lambda: None}})
    bare = torch.add
    with install("resize", "out") as installation:
        assert installation.names == ("resize",)
        assert installation.skipped == {"out": "its self-test passes on this torch without it"}
        assert torch.add is bare
    with install("out", only_if_needed=False) as installation:
        assert installation.skipped == {}
        assert torch.add is not bare


@pytest.mark.parametrize("on", [install, torchguard.guarded])
@pytest.mark.parametrize("stays", [True, False])
def test_a_guard_that_another_thread_installs_during_the_trial_is_needed(
    on: Any, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[torchguard.Installation] = []
    thread = threading.Thread(target=lambda: others.append(install("out", only_if_needed=False)))

    def tried() -> str | None:
        if thread.ident is not None:
            return SELF_TESTS["torch"]["out"]()
        thread.start()
        thread.join()
        passes = SELF_TESTS["torch"]["out"]()
        if not stays:
            others[0].uninstall()
        return passes

    monkeypatch.setattr("torchguard.patching.install.SELF_TESTS", {"torch": {"out": tried}})
    with on("out"):
        assert installed() == ("out",)
        others[0].uninstall()
        assert out_is_safe()


_DYNAMOS_TABLES = """
    import sys

    def tables():
        from torch._dynamo import trace_rules
        return [
            *(f"{key!s:.60} {kind}" for key, kind in trace_rules.get_torch_obj_rule_map().items()),
            *(f"{each!s:.60}" for each in trace_rules.get_tensor_method()),
        ]

    import torch
    if "before" in sys.argv: tables()
    if len(sys.argv) > 1:
        import torchguard
        torchguard.install("all", only_if_needed=False)
        if "between" in sys.argv: tables()
        if "compiled" in sys.argv: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
        torchguard.uninstall()
    import re
    for each in sorted(re.sub("0x[0-9a-f]+", "", line) for line in tables()):
        # PyTorch wraps it when Dynamo is there, and finds both if the table is filled again.
        if "manual_seed" not in each:
            print(each)
"""


@pytest.mark.parametrize(
    "order", [["between", "compiled"], pytest.param(["before"], marks=pytest.mark.slow)], ids=str
)
def test_dynamos_tables_of_functions_are_the_same(order: list[str]) -> None:
    """Whether Dynamo is imported before the guards or under them."""
    assert output_of(_DYNAMOS_TABLES, *order) == output_of(_DYNAMOS_TABLES)
