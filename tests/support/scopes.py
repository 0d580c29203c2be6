"""The scopes under which a test of guarded() runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from torchguard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


GUARDED_ONLY: tuple[tuple[str, Callable[[], AbstractContextManager[Any]]], ...] = (
    ("guarded", guarded),
    ("guarded, all four", lambda: guarded("resize", "out", "overlap", "checks")),
)


each_scope = pytest.mark.parametrize(
    "scope", [scope for _, scope in GUARDED_ONLY], ids=[name for name, _ in GUARDED_ONLY]
)
