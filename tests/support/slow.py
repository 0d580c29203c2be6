"""Sweeps of which ``make test`` runs a few cases, and ``make test-all`` every one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def slow_except(
    values: Iterable[Any], *quick: str, name: Callable[[Any], str] = str
) -> list[ParameterSet]:
    """Return the parameters of a sweep, all of them slow except those with these names."""
    values = {name(value): value for value in values}
    assert values.keys() >= {*quick}, {*quick} - values.keys()
    return [
        pytest.param(
            *(value if type(value) is tuple else (value,)),
            marks=[] if each in quick else pytest.mark.slow,
        )
        for each, value in values.items()
    ]
