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


# --- one operator where index_put is the assignment


GATHERS: dict[str, Any] = {
    "integers": torch.tensor([2, 0]),
    "a table of integers": torch.tensor([[2, 0], [1, 1]]),
    "a mask of rows": torch.tensor([True, False, True]),
    "a mask of elements": torch.eye(3, 4, dtype=torch.bool),
    "rows and columns": (torch.tensor([2, 0]), torch.tensor([[3], [1]])),
    "a mask and columns": (torch.tensor([True, False, True]), torch.tensor([3, 1])),
}


@pytest.mark.parametrize("index", GATHERS.values(), ids=GATHERS)
def test_tensors_as_index_cost_no_node_more_than_index_put(index: Any) -> None:
    """But for a value with a dimension more than the selection.

    On a CPU index_put drops leading dimensions of the value by itself; deterministic algorithms on
    a GPU do not, and there the value must be kept from it.
    """
    t = torch.zeros(3, 4, requires_grad=True)
    dims = t[index].dim()
    for more in (-dims, 0, 1):
        value = torch.ones([1] * (dims + more), requires_grad=True)
        node = sliced_assign(t, index, value).grad_fn
        assert node is not None
        assert node.name() == "IndexPutBackward0"
        before = node.next_functions[0][0]
        assert before is not None
        assert (before.name() == "torch::autograd::AccumulateGrad") == (more < 1)


@pytest.mark.parametrize("index", GATHERS.values(), ids=GATHERS)
@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.conj, torch.Tensor.t, torch.neg])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1), (2,), (1, 2), (2, 1), (5,)])
def test_a_value_of_any_rank_lands_where_an_assignment_puts_it(
    index: Any, kind: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    t = torch.arange(12.0).reshape(3, 4)
    if kind is torch.conj:
        t = torch.complex(t, t)
    if kind is torch.Tensor.t:
        t = t.t().contiguous()
    t = kind(t)
    value = torch.rand(shape, dtype=t.dtype, requires_grad=True)
    bare = outcome(plain, t, index, value)
    assert same(outcome(sliced_assign, t, index, value), bare)
