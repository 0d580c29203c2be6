"""sliced_assign: every index and value is as plain assignment."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from torch.testing._internal.common_methods_invocations import op_db

from support.assigned import INDICES, assignments, base, outcome, plain, same
from torchguard import sliced_assign, sliced_assign_
from torchguard.assignment.assign import _dims_selected

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
    for make, wants in itertools.product(VALUES.values(), (False, True)):
        value = make()
        expected = outcome(plain, base(wants), index, value)
        assert same(outcome(sliced_assign, base(wants), index, value), expected)


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_a_value_of_the_selections_own_shape(index: Any) -> None:
    try:
        shape = base()[index].shape
    except Exception:  # noqa: BLE001
        return
    value = torch.randn(shape, requires_grad=True)
    assert same(outcome(sliced_assign, base(), index, value), outcome(plain, base(), index, value))


@settings(max_examples=400)
@given(assignments())
def test_what_hypothesis_draws_is_as_plain_assignment(
    case: tuple[torch.Tensor, Any, Any],
) -> None:
    assert same(outcome(sliced_assign, *case), outcome(plain, *case))


def written(t: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """Assign in place to a copy, so that ``t`` can be used again."""
    out = t.clone()
    assert sliced_assign_(out, index, value) is out
    return out


@settings(max_examples=150)
@given(assignments())
def test_in_place_is_as_plain_assignment(case: tuple[torch.Tensor, Any, Any]) -> None:
    assert same(outcome(written, *case), outcome(plain, *case))


# --- the OpInfo database


Call = tuple[torch.Tensor, Any, Any]


def _op_samples(name: str) -> list[Any]:
    op = next(op for op in op_db if op.name == name)
    return list(op.sample_inputs("cpu", torch.float64, requires_grad=False))


def _getitem_calls() -> list[Call]:
    return [(s.input, s.args[0], torch.tensor(0.5).double()) for s in _op_samples("__getitem__")]


def _index_put_calls() -> list[Call]:
    return [
        (s.input, tuple(s.args[0]), s.args[1])
        for s in _op_samples("index_put")
        if not (s.kwargs.get("accumulate") or (len(s.args) > 2 and s.args[2]))
    ]


def _slice_scatter_calls() -> list[Call]:
    calls = []
    for s in _op_samples("slice_scatter"):
        given = dict(zip(("src", "dim", "start", "end", "step"), s.args, strict=False)) | s.kwargs
        part = slice(given.get("start"), given.get("end"), given.get("step", 1))
        dim = given.get("dim", 0) % s.input.dim()
        calls.append((s.input, (*[slice(None)] * dim, part), given["src"]))
    return calls


@pytest.mark.parametrize("make", [_getitem_calls, _index_put_calls, _slice_scatter_calls])
def test_every_sample_of_torchs_own_database(make: Callable[[], list[Call]]) -> None:
    calls = make()
    assert calls
    for given_t, index, given_value in calls:
        t, value = (x.detach().clone().requires_grad_() for x in (given_t, given_value))
        assert same(outcome(sliced_assign, t, index, value), outcome(plain, t, index, value))


def test_the_samples_equal_the_operators_themselves() -> None:
    for s, call in zip(_op_samples("slice_scatter"), _slice_scatter_calls(), strict=True):
        assert torch.equal(sliced_assign(*call), torch.slice_scatter(s.input, *s.args, **s.kwargs))
    for t, index, value in _index_put_calls():
        assert torch.equal(sliced_assign(t, index, value), t.index_put(index, value))


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
    t, value = torch.zeros(3, 4, requires_grad=True), torch.ones((), requires_grad=True)
    node = sliced_assign(t, index, value).grad_fn
    assert node is not None
    assert node.name() == "IndexPutBackward0"
    before = node.next_functions[0][0]
    assert before is not None
    assert before.name() == "torch::autograd::AccumulateGrad"


@pytest.mark.parametrize("index", GATHERS.values(), ids=GATHERS)
def test_the_dimensions_an_index_selects_are_known_beforehand(index: Any) -> None:
    # On a CPU index_put drops leading dimensions of the value by itself; deterministic
    # algorithms on a GPU do not, and there the value must be kept from it.
    t = torch.zeros(3, 4)
    items = index if isinstance(index, tuple) else (index,)
    assert _dims_selected(t, items) == t[index].dim()


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
