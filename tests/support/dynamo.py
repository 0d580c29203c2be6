"""Dynamo as it is before anything was compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchguard.verification import report


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget what was compiled, before the test and after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_dynamo: None
) -> Iterator[None]:
    """Forget what was compiled, and said; what ``verified`` writes goes to a folder of the test."""
    del fresh_dynamo
    monkeypatch.setattr(report, "_unverified", set())
    monkeypatch.setenv("TORCHGUARD_REPRODUCERS", str(tmp_path / "reproducers"))
    # torch's own warning, of Python 3.13.0, would be counted with those of a wrong graph.
    known = hasattr(torch._dynamo.config, "issue_3_13_0_warning")
    with torch._dynamo.config.patch({"issue_3_13_0_warning": False} if known else {}):
        yield
