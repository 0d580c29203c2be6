"""The scopes under which a test of guarded() runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.kinds import locked
from support.ways import outcome_of
from torchguard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


GUARDED_ONLY: tuple[tuple[str, Callable[[], AbstractContextManager[Any]]], ...] = (
    ("guarded", guarded),
    ("guarded(data=True)", lambda: guarded(data=True)),
)


each_scope = pytest.mark.parametrize(
    "scope", [scope for _, scope in GUARDED_ONLY], ids=[name for name, _ in GUARDED_ONLY]
)


def is_on() -> bool:
    """Whether a failing operation is undone here, on this thread."""
    tensor = locked([1.0])
    assert outcome_of(lambda: tensor.resize_(100)).error is not None
    return tensor.shape == (1,)
