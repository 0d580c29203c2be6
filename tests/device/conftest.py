"""Tests on the fake device: ``make test-device``. Without it none of them is collected."""

from __future__ import annotations

import os
from pathlib import Path

import fake_device
import pytest

collect_ignore_glob = [] if "FAKE_DEVICE" in os.environ else ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them like the tests that need a GPU, and skip them where there is no device."""
    for item in items:
        if Path(item.path).parent == fake_device.HERE:
            if fake_device.IS_CUDA:
                item.add_marker(pytest.mark.cuda)
            if not fake_device.is_loaded():
                item.add_marker(pytest.mark.skip(reason=str(fake_device.why_not())))


@pytest.fixture(autouse=True)
def no_races_before() -> None:
    """Let a test see its own races alone."""
    if fake_device.is_loaded():
        fake_device.races()
