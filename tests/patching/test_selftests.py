"""Each guard's self-test says whether the guard protects, whatever the program has switched on."""

from __future__ import annotations

import contextlib
import pickle
import random
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchguard
from support.install import resize_is_safe
from support.modes import DispatchMode, FunctionMode
from torchguard.errors import TorchGuardWarning
from torchguard.patching.guards import GUARDS
from torchguard.patching.selftests import SELF_TESTS

FIRST, *WAITING = SELF_TESTS.values()
LATER = [(tests, name) for tests in WAITING for name in tests]


def test_every_guard_has_a_self_test() -> None:
    assert set(GUARDS) == {name for tests in SELF_TESTS.values() for name in tests}


@pytest.mark.parametrize("name", FIRST)
def test_it_names_what_is_not_protected_until_the_guard_is_installed(name: str) -> None:
    test = FIRST[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's of read-only arrays
        reason = test()
    assert reason is not None
    with torchguard.install(name, only_if_needed=False):  # type: ignore[arg-type]
        assert test() is None
    assert test() is not None


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("tests", "name"), LATER)
def test_those_that_wait_for_dynamo_do_so_too(tests: Mapping[str, Any], name: str) -> None:
    test = tests[name]
    assert test() is not None
    counted = {key: dict(value) for key, value in torch._dynamo.utils.counters.items()}
    with torchguard.install(name, only_if_needed=False):  # type: ignore[arg-type]
        assert test() is None
    assert {key: dict(value) for key, value in torch._dynamo.utils.counters.items()} == counted


@contextlib.contextmanager
def _switched(switch: Callable[[Any], None], inside: Any, outside: Any) -> Iterator[None]:
    switch(inside)
    yield
    switch(outside)


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "a default device": lambda: torch.device("meta"),
    "a default dtype": lambda: _switched(
        torch.set_default_dtype, torch.float16, torch.get_default_dtype()
    ),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "deterministic algorithms": lambda: _switched(torch.use_deterministic_algorithms, True, False),
    "detect_anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "a function mode": FunctionMode,
    "a dispatch mode": DispatchMode,
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_no_setting_of_torch_makes_a_needed_guard_look_unneeded(surroundings: str) -> None:
    tried: Any = [name for name, guard in GUARDS.items() if guard.tried_by_self_test]
    with SURROUNDINGS[surroundings](), torchguard.install(*tried) as installation:
        assert installation.skipped == {}


def _states() -> bytes:
    numbers = torch.default_generator.get_state().tolist()
    return pickle.dumps((numbers, np.random.get_state(), random.getstate()))  # noqa: NPY002


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.filterwarnings("error")
def test_it_does_so_in_any_surroundings_and_changes_nothing(name: str) -> None:
    """With warnings as errors; what it does is no event."""
    test, happened = FIRST[name], torchguard.events()
    with torchguard.install(name, only_if_needed=False):  # type: ignore[arg-type]
        for label, surroundings in SURROUNDINGS.items():
            before = _states()
            with surroundings():
                assert test() is None, label
            assert _states() == before, label
        found: list[str | None] = []
        thread = threading.Thread(target=lambda: found.append(test()))
        thread.start()
        thread.join()
        assert found == [None]
    assert torchguard.events() == happened


@pytest.mark.parametrize("name", ["save", "load"])
def test_files_are_tried_in_a_temporary_folder_that_is_removed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one nothing is tried: a guard is not taken off because the disk is full."""
    monkeypatch.chdir("/proc" if Path("/proc").is_dir() else tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with torchguard.install(name):  # type: ignore[arg-type]
        assert FIRST[name]() is None
        assert list(tmp_path.iterdir()) == []
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        assert FIRST[name]() is None
    assert FIRST[name]() is not None  # nor left out because it is


# --- a guard that is in place and does not protect is removed, and says so


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The self-test of "resize" fails; returns what was tried, in order."""
    tried: list[str] = []

    def trying(name: str, answer: str | None) -> Callable[[], str | None]:
        return lambda: tried.append(name) or answer  # type: ignore[func-returns-value]

    tests = {"resize": trying("resize", "resize_ is another one"), "out": trying("out", None)}
    monkeypatch.setattr("torchguard.patching.install.SELF_TESTS", {"torch": tests})
    return tried


def test_a_guard_that_does_not_protect_is_skipped_with_a_warning(failing: list[str]) -> None:
    """The other guards are installed."""
    with pytest.warns(TorchGuardWarning, match="'resize' is off.*resize_ is another one") as seen:
        installation = torchguard.install("resize", "out", only_if_needed=False)
    with installation:
        assert failing == ["resize", "resize", "out"]  # what fails is tried once more
        assert installation.names == torchguard.installed() == ("out",)
        reason = f"torch {torch.__version__}: resize_ is another one"
        assert installation.skipped == {"resize": reason}
        assert not resize_is_safe()
    assert seen[0].filename == __file__
    assert torchguard.events()[-1].kind == "guard_skipped"


def test_a_guard_of_a_function_that_raises_another_error_does_not_protect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def renamed(*_: Any) -> None:
        raise AttributeError("it has gone")

    monkeypatch.setattr(torch.Tensor, "resize_", renamed)
    with pytest.warns(TorchGuardWarning, match="the guard raises AttributeError: it has gone"):
        installation = torchguard.install("resize")
    assert installation.names == ()
    assert "AttributeError" in installation.skipped["resize"]


@pytest.mark.usefixtures("failing")
def test_strict_raises_and_installs_nothing() -> None:
    with pytest.raises(
        torchguard.TorchGuardError, match=r"'resize': torch .*resize_ is another one"
    ):
        torchguard.install("out", "resize", strict=True)
    assert torchguard.installed() == ()
