"""install() among the patches of others, above ours and below."""

from __future__ import annotations

import functools
import re
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from support.install import locked, resize_is_safe, same, snapshot
from torchguard import install, installed, uninstall
from torchguard._torch import is_wrapped_builtin
from torchguard._torch.patch import original as torch_has
from torchguard.errors import PatchConflictError
from torchguard.patching.guards import GUARDS

if TYPE_CHECKING:
    from collections.abc import Callable


# --- other code patches on top


def on_top(*args: Any, **kwargs: Any) -> Any:
    return torch_has("torch.Tensor.resize_as_")(*args, **kwargs)


@pytest.mark.parametrize("how", ["all", "by name", "by an installation"])
@pytest.mark.parametrize("path", ["Tensor.resize_as_", "resize_as_"])
def test_uninstall_refuses_to_overwrite_a_patch_of_other_code_and_changes_nothing(
    path: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else it is asked to undo; it can be undone when the patch is gone."""
    installation = install("resize", "out")
    undo = {
        "all": uninstall,
        "by name": lambda: uninstall("out", "resize", "setitem"),
        "by an installation": installation.uninstall,
    }[how]
    owner = torch.Tensor if path.startswith("Tensor") else torch
    monkeypatch.setattr(owner, "resize_as_", on_top)
    before = snapshot()
    with pytest.raises(
        PatchConflictError, match=rf"^torch\.{re.escape(path)} was patched .*on_top"
    ):
        undo()
    assert same(before, snapshot())
    assert resize_is_safe()
    monkeypatch.undo()
    assert "resize" in installed()
    undo()
    assert installed() == ()
    assert "resize_" not in vars(torch.Tensor)


def test_a_patch_of_other_code_from_before_is_called_and_comes_back() -> None:
    calls = []

    def theirs(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return torch._C.TensorBase.resize_(self, *args, **kwargs)

    torch.Tensor.resize_ = theirs  # type: ignore[method-assign, assignment]
    try:
        with install("resize"):
            calls.clear()  # install() has tried it
            assert resize_is_safe()
            assert torch.ones(2).resize_(3).shape == (3,)
        assert torch.Tensor.resize_ is theirs
        assert calls == [(50,), (3,)]
    finally:
        del torch.Tensor.resize_


# --- patches of others, below


def wrapped_out(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return timed


def out_is_safe(name: str = "add") -> bool:
    owner, _, short = f"torch.{name}".rpartition(".")
    out = locked(1, 2)
    with pytest.raises(RuntimeError):
        getattr(sys.modules[owner], short)(*(torch.eye(4), 1)[: 1 + (name == "add")], out=out)
    return out.shape == (2,)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("wraps", "add"),
        ("wraps", "nn.functional.logsigmoid"),  # torch.nn.functional has it under another name
        ("mock", "linalg.inv"),
        ("side effect", "special.erf"),
        ("partial", "nn.functional.gelu"),
    ],
)
def test_a_function_that_other_code_has_wrapped_is_guarded_too(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = torch_has(f"torch.{name}")
    wrappers: dict[str, Callable[[], Any]] = {
        "wraps": lambda: wrapped_out(function),
        "mock": lambda: mock.MagicMock(wraps=function),
        "side effect": lambda: mock.MagicMock(side_effect=function),
        "partial": lambda: functools.partial(function),
    }
    monkeypatch.setattr(f"torch.{name}", wrappers[kind]())
    before = snapshot()
    with install("out"):
        assert "out" in installed()
        assert out_is_safe(name)
    assert same(before, snapshot())


def test_functions_that_torch_has_written_in_python_are_no_wrapped_builtins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "norm", functools.wraps(torch.norm)(lambda *_, **__: None))
    guarded = set(GUARDS["out"].replacements())
    for name in ("chain_matmul", "nn.functional.softmax", "nn.functional.adaptive_max_pool2d"):
        assert f"torch.{name}" not in guarded
    assert not any(
        is_wrapped_builtin(namespace, name)
        for namespace in (torch, torch.linalg, torch.special, torch.fft, torch.nn.functional)
        for name in vars(namespace)
        if not name.startswith("_")
    )


@pytest.mark.parametrize("guard", ["out", "resize"])
def test_a_patch_below_ours_may_be_taken_away(guard: Any) -> None:
    """Its undoing puts torch's own in place of ours: that is said, and both ways go on."""
    owner, name = (torch, "add") if guard == "out" else (torch.Tensor, "resize_")
    is_safe = out_is_safe if guard == "out" else resize_is_safe
    bare = snapshot()
    for guard_again in (False, True):
        patcher = mock.patch.object(owner, name, wrapped_out(getattr(owner, name)))
        patcher.start()
        first = install(guard)
        assert is_safe()
        patcher.stop()
        assert guard not in installed()
        if guard_again:
            second = install(guard)
            assert guard in installed()
            assert is_safe()
            first.uninstall()
            assert is_safe()
            second.uninstall()
        else:
            first.uninstall()
        assert guard not in installed()
        assert same(bare, snapshot())
        with install(guard):
            assert is_safe()
        assert same(bare, snapshot())


def test_what_was_deleted_is_installed_again() -> None:
    bare = snapshot()
    install("resize")
    del torch.Tensor.resize_
    with pytest.raises(PatchConflictError, match=r"Tensor\.resize_ is PyTorch's own.*install"):
        uninstall()
    install("resize")
    assert resize_is_safe()
    uninstall()
    assert same(bare, snapshot())


def test_installing_again_adds_nothing_where_other_code_has_patched_on_top(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("out")
    theirs = wrapped_out(torch.add)
    monkeypatch.setattr(torch, "add", theirs)
    install("out")
    assert torch.add is theirs
    assert "out" not in installed()
    assert out_is_safe()
    monkeypatch.undo()
    assert "out" in installed()
    uninstall()
