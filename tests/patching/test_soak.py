"""Failures over and over, and in many threads: nothing leaks, and torch is as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import torchguard

SHARED = torchguard.guarded()


def at_random(seed: int) -> None:
    """Do what one thread of the storm does."""
    choose = random.Random(seed)  # noqa: S311
    for _ in range(40):
        tensor = torch.from_numpy(np.zeros(4))
        way = choose.choice(["resize", "resize and out", "guarded", "helper", "uninstall"])
        with pytest.raises(RuntimeError):
            if way == "helper":
                torchguard.safe_resize_(tensor, 5, 5)
            elif way == "uninstall":
                # Takes "out" away from whoever has it; their resizes do not need it.
                torchguard.install("out", only_if_needed=False)
                torchguard.uninstall("out")
                torchguard.safe_resize_(tensor, 5, 5)
            elif way == "guarded":
                with SHARED, torchguard.guarded("resize", "out"):
                    tensor.resize_(5, 5)
            else:
                with torchguard.install(*way.split(" and ")):  # type: ignore[arg-type]
                    tensor.resize_(5, 5)
        assert tensor.shape == (4,), way


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads interrupt each other far more often than they do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_that_install_uninstall_and_enter_scopes_leave_torch_as_it_was() -> None:
    """The fixture ``no_residue`` compares torch with what it was."""
    at_random(8)  # while a thread imports a module of torch, the guards of all are off
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(at_random, range(8)))
    assert torchguard.installed() == ()
