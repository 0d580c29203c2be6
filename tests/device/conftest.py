"""Tests on the fake device: ``make test-device``. Without it none of them is collected."""

from __future__ import annotations

import os
from pathlib import Path

import fake_device
import pytest

OTHER = "test_other_accelerators.py"
collect_ignore_glob = ["test_*.py"] if "FAKE_DEVICE" not in os.environ else []
if not fake_device.IS_CUDA:
    collect_ignore_glob = [each.name for each in fake_device.HERE.glob("test_*.py")]
    collect_ignore_glob.remove(OTHER)
elif "FAKE_DEVICE" in os.environ:
    collect_ignore_glob = [OTHER]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them like the tests that need a GPU, and skip them where there is no device."""
    for item in items:
        if Path(item.path).parent == fake_device.HERE:
            if fake_device.IS_CUDA:
                item.add_marker(pytest.mark.cuda)
            if not fake_device.is_loaded():
                reason = fake_device.why_not()
                if reason is None:
                    raise pytest.UsageError("the fake device is not loaded: run make test-device")
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def no_races_before() -> None:
    """Let a test see its own races alone."""
    if fake_device.is_loaded():
        fake_device.races()
