"""After every test torch has to be as it was before torchguard was imported."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

# A compiler's helper processes would take turns on the cores that xdist has filled.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from _pytest._io.saferepr import SafeRepr
from _pytest.faulthandler import fault_handler_stderr_fd_key

from support import child_process
from support.residue import Residue

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

LIMIT = child_process.LIMIT + 60
"""Seconds that a test may take with its fixtures; the processes that it starts end before it."""


def _shown(_: SafeRepr, tensor: torch.Tensor, __: int) -> str:
    with torch._C.DisableTorchFunction():
        return f"<{type(tensor).__name__} of shape {tuple(tensor.shape)} at {id(tensor):#x}>"


# A failing test shows its variables: the elements of a corrupt tensor would kill the process.
for _name in ("Tensor", "Parameter", "Watching", "Recording", "Interrupting", "Wrapper"):
    setattr(SafeRepr, f"repr_{_name}", _shown)

# It writes a page for each operation that fails on a fake tensor.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

# Before anything here imports torchguard.
RESIDUE = Residue()

from support.bucketed import backend  # noqa: E402, F401 - a fixture
from support.dynamo import fresh_dynamo, fresh_reports  # noqa: E402, F401 - fixtures
from support.planted import planted_folder, report, with_planted  # noqa: E402, F401 - fixtures

with contextlib.suppress(ImportError):  # the tests of `python -m benchmarks gpu` need it not
    import hypothesis

    hypothesis.settings.register_profile(
        "ci",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def residue() -> list[str]:
    """Everything that torchguard has left behind, in words; empty if it is clean."""
    import torchguard  # noqa: PLC0415  the snapshot comes first
    from torchguard._torch import patch  # noqa: PLC0415

    found = RESIDUE.now()
    if torchguard.installed():
        found.append(f"still installed: {torchguard.installed()}")
    if patch._table:
        found.append(f"still patched: {sorted(patch._table)}")
    return found


_frozen = 0


def freeze_what_was_imported() -> None:
    """A full collection, of which many tests make one, takes a second with all of torch in it."""
    global _frozen
    if len(sys.modules) > _frozen:
        _frozen = len(sys.modules)
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a test that hangs, with the stacks of all threads: its worker is replaced."""
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    child_process.deadline = time.monotonic() + child_process.LIMIT
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``cuda`` are collected everywhere, and skipped where there is no GPU."""
    if not torch.cuda.is_available():
        reason = f"needs a CUDA GPU: torch.cuda.is_available() is False (torch {torch.__version__})"
        for item in items:
            if item.get_closest_marker("cuda") is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


# What torch does for its logs and for its own tests, without effect on what a test here sees:
# Dynamo measures the guards of each frame that it compiles, after it has flushed the CPU's caches
# (20 ms), and the OpInfo database looks for a unittest.TestCase in all frames of the stack.
_MEASUREMENTS = {
    ("torch._dynamo.guards", "profile_guard_manager"): lambda *_: 0.0,
    ("torch.testing._internal.common_utils", "extract_test_fn"): lambda: None,
}


@pytest.fixture(autouse=True)
def no_residue() -> Iterator[None]:
    """Fail a test that leaves something of torchguard in torch."""
    freeze_what_was_imported()
    for (module, name), measurement in _MEASUREMENTS.items():
        if name in vars(sys.modules.get(module, object)):
            setattr(sys.modules[module], name, measurement)
    yield
    install = sys.modules.get("torchguard.patching.install")
    found = [f"still installed: {install.installed()}"] if install and install.installed() else []
    if install and not found:
        install.uninstall()  # what scopes have replaced
    found += residue()
    if found:  # a transaction that is part of a cycle stands until it is collected
        gc.collect()
        found = residue()
    if found:
        from torchguard._torch import patch  # noqa: PLC0415

        RESIDUE.accept()
        patch._table.clear()
        pytest.fail("torchguard left something in torch: " + "; ".join(found), pytrace=False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell has what it starts in the background ignore SIGINT, and that is inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def default_device() -> Iterator[None]:
    """Forget the default device that a test sets."""
    yield
    torch.set_default_device(None)
    # torch 2.6 remembers the None, and its get_default_device() then fails.
    with contextlib.suppress(AttributeError):
        del torch._GLOBAL_DEVICE_CONTEXT.device_context
