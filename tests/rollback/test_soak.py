"""Failures over and over, and in many threads: nothing leaks, and torch is as it was."""

from __future__ import annotations

import gc
import random
import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchguard

pytestmark = pytest.mark.slow

HUGE = 2**58  # elements: no machine has the memory
MIB = 2**20


def resident() -> int:
    """Return the bytes of memory the process has in use; the peak where that can't be read."""
    gc.collect()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fail() -> None:
    """Fail in each way that takes a snapshot, with a tensor of 1 MiB; all are as they were."""
    tensor = torch.ones(512, 512)
    stuck = torch.from_numpy(np.ones((512, 512), dtype=np.float32))
    shared = torch.ones(512, 512).share_memory_()
    calls: tuple[Any, ...] = (
        lambda: tensor.resize_(HUGE),
        lambda: stuck.resize_(HUGE),
        lambda: shared.resize_(10**6),
        lambda: tensor.set_(stuck.untyped_storage(), 0, (HUGE,), (1,)),
        lambda: torch.add(torch.ones(10**6), 1, out=stuck),
    )
    for call in calls:
        with torchguard.guarded(), pytest.raises((RuntimeError, IndexError)):
            call()
    with pytest.raises(RuntimeError), torchguard.rollback_on_error(tensor, data=True):
        tensor.zero_().resize_(HUGE)
    for each in (tensor, stuck, shared):
        assert each.shape == (512, 512)
        assert each.sum() == 512 * 512


def test_failures_leave_no_memory_behind() -> None:
    with torchguard.install("resize", "out"):
        fail()  # everything is loaded and warm
        before = resident()
        for _ in range(40):
            fail()
        assert resident() - before < 32 * MIB  # allocators keep some of the peak


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
