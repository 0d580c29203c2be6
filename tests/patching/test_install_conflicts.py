"""install() among the patches of others, above ours and below."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from support.install import resize_is_safe, same, snapshot
from torchguard import install, installed, uninstall
from torchguard._torch.patch import original as torch_has
from torchguard.errors import PatchConflictError

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


def wrapped_out(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return timed


@pytest.mark.parametrize("guard_again", [False, True])
def test_a_patch_below_ours_may_be_taken_away(guard_again: bool) -> None:
    """Its undoing puts PyTorch's own in place of ours: installed() says so."""
    bare = snapshot()
    patcher = mock.patch.object(torch.Tensor, "resize_", wrapped_out(torch.Tensor.resize_))
    patcher.start()
    first = install("resize")
    assert resize_is_safe()
    patcher.stop()
    assert "resize" not in installed()
    if guard_again:
        second = install("resize")
        assert "resize" in installed()
        assert resize_is_safe()
        first.uninstall()
        assert resize_is_safe()
        second.uninstall()
    else:
        first.uninstall()
    assert installed() == ()
    assert same(bare, snapshot())
    with install("resize"):
        assert resize_is_safe()


def test_installing_again_adds_nothing_where_other_code_has_patched_on_top(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("out")
    theirs = wrapped_out(torch.add)
    monkeypatch.setattr(torch, "add", theirs)
    install("out")
    assert torch.add is theirs
    assert "out" not in installed()
    monkeypatch.undo()
    assert "out" in installed()
    uninstall()
