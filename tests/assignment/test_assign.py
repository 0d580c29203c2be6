"""sliced_assign: every index and value is as plain assignment."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings

from support.assigned import INDICES, assignments, base, outcome, plain, same
from torchguard import sliced_assign, sliced_assign_

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore")


VALUES: dict[str, Callable[[], Any]] = {
    "number": lambda: 2.5,
    "int": lambda: 3,
    "0-d": lambda: torch.tensor(5.0, requires_grad=True),
    "integers": lambda: torch.tensor(7),
    "float64": lambda: torch.tensor(5.0, dtype=torch.float64, requires_grad=True),
    "row": lambda: torch.tensor([[1.0]], requires_grad=True),
    "wrong shape": lambda: torch.ones(7, 5, requires_grad=True),
    "a list": lambda: [1.0],
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_every_index_and_value_is_as_plain_assignment(index: Any) -> None:
    """Values of the selection's own shape among them."""
    values = [make() for make in VALUES.values()]
    with contextlib.suppress(IndexError, TypeError):
        values.append(torch.randn(base()[index].shape, requires_grad=True))
    for value, wants in itertools.product(values, (False, True)):
        expected = outcome(plain, base(wants), index, value)
        assert same(outcome(sliced_assign, base(wants), index, value), expected)


def written(t: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Assign in place to a copy, so that ``t`` can be used again."""
    out = t.clone()
    assert sliced_assign_(out, index, value) is out
    return out


@settings(max_examples=300)
@given(assignments())
def test_what_hypothesis_draws_is_as_plain_assignment(case: tuple[torch.Tensor, Any, Any]) -> None:
    """In place too."""
    expected = outcome(plain, *case)
    assert same(outcome(sliced_assign, *case), expected)
    assert same(outcome(written, *case), expected)
