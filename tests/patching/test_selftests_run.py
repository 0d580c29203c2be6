"""A guard that is in place and does not protect is taken off again, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import torchguard
from support.install import resize_is_safe

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The self-test of "resize" fails; returns what was tried, in order."""
    tried: list[str] = []

    def trying(name: str, answer: str | None) -> Callable[[], str | None]:
        return lambda: tried.append(name) or answer  # type: ignore[func-returns-value]

    tests = {"resize": trying("resize", "resize_ is another one"), "out": trying("out", None)}
    monkeypatch.setattr("torchguard.patching.install.SELF_TESTS", tests)
    return tried


def test_a_guard_that_does_not_protect_is_skipped_with_a_warning(failing: list[str]) -> None:
    """The other guards are installed."""
    with pytest.warns(RuntimeWarning, match="'resize' is off.*resize_ is another one") as seen:
        installation = torchguard.install("resize", "out")
    with installation:
        assert failing == ["resize", "resize", "out"]  # what fails is tried once more
        assert installation.names == torchguard.installed() == ("out",)
        reason = f"torch {torch.__version__}: resize_ is another one"
        assert installation.skipped == {"resize": reason}
        assert not resize_is_safe()
    assert seen[0].filename == __file__
    assert torchguard.events()[-1].kind == "guard_skipped"


def test_a_self_test_that_raises_does_not_protect(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = {"resize": lambda: str(1 // 0)}
    monkeypatch.setattr("torchguard.patching.install.SELF_TESTS", tests)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        assert torchguard.install().names == ()


@pytest.mark.usefixtures("failing")
def test_strict_raises_and_installs_nothing() -> None:
    with pytest.raises(
        torchguard.TorchGuardError, match=r"'resize': torch .*resize_ is another one"
    ):
        torchguard.install("out", "resize", strict=True)
    assert torchguard.installed() == ()
