"""What tests of the benchmarks need."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the folder that holds ``benchmarks`` on the path."""
    monkeypatch.syspath_prepend(ROOT)
