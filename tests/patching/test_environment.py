"""``TORCHGUARD`` and ``TORCHGUARD_GUARDS``: guards are switched off, or chosen, from outside."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import torchguard
from support.install import resize_is_safe
from torchguard import _environment as environment


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHGUARD", "off")
    environment._say_so.cache_clear()


@pytest.mark.usefixtures("off")
def test_off_leaves_pytorch_alone_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchguard")
    with torchguard.install("resize", strict=True) as installation:
        assert not resize_is_safe()
        assert installation.names == ()
        assert installation.skipped == {"resize": "TORCHGUARD=off in the environment"}
    with torchguard.guarded():
        assert not resize_is_safe()
    assert torchguard.installed() == ()
    assert [entry.levelname for entry in caplog.records] == ["INFO"]


@pytest.mark.parametrize("value", ["0", "false", "No", "OFF"])
def test_off_has_the_names_that_people_type(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHGUARD", value)
    with torchguard.install("resize"):
        assert torchguard.installed() == ()


@pytest.mark.usefixtures("off")
def test_functions_that_are_called_work_all_the_same() -> None:
    tensor = torch.from_numpy(np.zeros(4))
    with pytest.raises(RuntimeError):
        torchguard.safe_resize_(tensor, 5, 5)
    assert tuple(tensor.shape) == (4,)


def test_the_environment_names_the_guards_of_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHGUARD_GUARDS", "resize, out")
    with torchguard.install() as installation:
        assert installation.names == ("resize", "out")
    with torchguard.install("out") as installation:
        assert installation.names == ("out",)


def test_wrong_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHGUARD_GUARDS", "resise")
    with pytest.raises(ValueError, match=r"TORCHGUARD_GUARDS: .*'resise'; did you mean 'resize'"):
        torchguard.install()
    monkeypatch.delenv("TORCHGUARD_GUARDS")
    monkeypatch.setenv("TORCHGUARD", "of")
    with pytest.raises(ValueError, match="TORCHGUARD is 'of'"):
        torchguard.install()
