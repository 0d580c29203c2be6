"""sliced_assign is the assignment to a copy: values, dtype, memory format, gradients, errors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.testing._internal.common_methods_invocations import op_db

from torchguard import at, sliced_assign, sliced_assign_
from torchguard.assignment.assign import _dims_selected
from torchguard.assignment.index import describe_index, is_basic, parts_of, positions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.filterwarnings("ignore")


def plain(t: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    out = t.clone()
    out[index] = value
    return out


def outcome(assign: Callable[..., torch.Tensor], t: torch.Tensor, index: Any, value: Any) -> Any:
    """Everything the result is, and both gradients; or the class and message of the error."""
    t, value = (
        each.detach().clone().requires_grad_(each.requires_grad)
        if isinstance(each, torch.Tensor) and each.is_leaf
        else each
        for each in (t, value)
    )
    try:
        out = assign(t, index, value)
    except Exception as error:  # noqa: BLE001
        return type(error), str(error)
    leaves = [x for x in (t, value) if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients: Sequence[Any] = ()
    if out.requires_grad:
        weights = torch.arange(out.numel()).to(out.dtype).view(out.shape)
        try:
            gradients = torch.autograd.grad((out * weights).sum().abs(), leaves, allow_unused=True)
        except RuntimeError as error:  # of a real value in a complex tensor, in some cases
            gradients = (str(error),)
    return out, out.dtype, out.stride(), out.requires_grad, gradients


def same(left: Any, right: Any) -> bool:
    if isinstance(left[0], type):
        return left[0] is right[0] and (left[1] in right[1] or right[1] in left[1])
    return (
        left[1:4] == right[1:4]
        and torch.equal(left[0], right[0])
        and len(left[4]) == len(right[4])
        and all(
            torch.equal(x, y)
            if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
            else x == y
            for x, y in zip(left[4], right[4], strict=True)
        )
    )


# t is (3, 4)
INDICES: dict[str, Any] = {
    "int": 1,
    "negative int": -1,
    "numpy int": np.int64(2),
    "slice": slice(1, 3),
    "slice with a step": slice(None, None, 2),
    "open slice": slice(1, None),
    "empty slice": slice(2, 2),
    "slice beyond the end": slice(1, 100),
    "ellipsis": Ellipsis,
    "ellipsis and int": (Ellipsis, 1),
    "none": None,
    "none in the middle": (slice(None), None, 2),
    "true": True,
    "false": False,
    "mask": torch.tensor([True, False, True]),
    "mask of the whole": torch.arange(12).view(3, 4) % 5 == 0,
    "mask without a hit": torch.zeros(3, 4, dtype=torch.bool),
    "mask of the second dim": (slice(None), torch.tensor([True, False, True, True])),
    "mask and int": (torch.tensor([True, False, True]), 0),
    "mask and none": (torch.tensor([True, False, True]), None),
    "list of booleans": [True, False, True],
    "numpy mask": np.array([True, False, True]),
    "int64": torch.tensor([0, 2]),
    "int32": torch.tensor([0, 2], dtype=torch.int32),
    "int16": torch.tensor([0, 2], dtype=torch.int16),
    "int8": torch.tensor([0, 2], dtype=torch.int8),
    "uint8": torch.tensor([1, 0, 1], dtype=torch.uint8),
    "negative integers": torch.tensor([-1, -3]),
    "matrix of integers": torch.tensor([[0, 1], [1, 2]]),
    "0-d": torch.tensor(1),
    "0-d, negative": torch.tensor(-1),
    "0-d of the second dim": (slice(None), torch.tensor(1)),
    "0-d and integers": (torch.tensor(1), torch.tensor([0, 2])),
    "integers and 0-d": (torch.tensor([0, 1]), torch.tensor(-1)),
    "two 0-d": (torch.tensor(1), torch.tensor(2)),
    "0-d mask": torch.tensor(True),
    "list": [0, 2],
    "empty list": [],
    "no integers": torch.tensor([], dtype=torch.int64),
    "array": np.array([2, 0]),
    "range": range(2),
    "tuple with a range": (slice(None), range(2)),
    "tuple of lists": ([0, 1], [1, 2]),
    "outer": (torch.tensor([[0], [2]]), torch.tensor([0, 1])),
    "separated": (torch.tensor([0, 1]), None, torch.tensor([1, 2])),
    "empty tuple": (),
    "too many": (0, 0, 0),
    "out of bounds": 7,
    "integers out of bounds": torch.tensor([0, 7]),
    "wrong mask": torch.tensor([True, False]),
    "a float": 1.5,
    "a string": "x",
}

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


def base(requires_grad: bool = True) -> torch.Tensor:
    return torch.arange(12.0).view(3, 4).requires_grad_(requires_grad)


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


@st.composite
def assignments(draw: st.DrawFn) -> tuple[torch.Tensor, Any, Any]:
    """A tensor, an index into it (as numpy reads it) and a value that may broadcast, or not."""
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    basic = npst.basic_indices(shape, allow_newaxis=True)
    choices: list[st.SearchStrategy[Any]] = [basic]
    if shape and 0 not in shape:
        choices.append(npst.integer_array_indices(shape, dtype=np.dtype(np.int64)))
        choices.append(npst.arrays(np.bool_, shape[: draw(st.integers(1, len(shape)))]))
    index = draw(st.one_of(choices))
    index = tuple(map(_torch_item, index)) if isinstance(index, tuple) else _torch_item(index)
    t = torch.arange(float(np.prod(shape, dtype=int))).reshape(shape)
    if draw(st.booleans()) and t.dim() > 1:
        t = t.transpose(0, -1).contiguous().transpose(0, -1)
    t = t.to(draw(st.sampled_from([torch.float32, torch.float64, torch.complex64])))
    try:
        selected = tuple(t[index].shape)
    except Exception:  # noqa: BLE001
        selected = ()
    value_shape = draw(
        st.one_of(
            st.just(selected),
            st.just(tuple(1 if draw(st.booleans()) else size for size in selected)),
            st.just(selected[1:]),
            npst.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3),
        )
    )
    value = torch.arange(1.0, 1 + float(np.prod(value_shape, dtype=int))).reshape(value_shape) * 10
    if draw(st.booleans()):
        value = value.to(draw(st.sampled_from([torch.float64, torch.int64, torch.float16])))
    if value.is_floating_point():
        value.requires_grad_(draw(st.booleans()))
    return t.requires_grad_(draw(st.booleans())), index, value


def _torch_item(item: Any) -> Any:
    return torch.from_numpy(item) if isinstance(item, np.ndarray) and item.ndim else item


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


# --- memory format, aliases, dtypes, devices


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.complex64])
def test_the_result_has_the_dtype_of_the_tensor(dtype: torch.dtype) -> None:
    t = torch.zeros(3, dtype=dtype)
    assert same(outcome(sliced_assign, t, 1, 1), outcome(plain, t, 1, 1))
    assert sliced_assign(t, 1, torch.tensor(1.7)).dtype is dtype


def test_memory_format_is_that_of_clone() -> None:
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert sliced_assign(image, 0, 1.0).is_contiguous(memory_format=torch.channels_last)
    assert sliced_assign(torch.zeros(3, 4).t(), 0, 1.0).stride() == (1, 4)


def test_a_value_that_overlaps_the_target_is_read_before_it_is_written() -> None:
    t = torch.arange(5.0)
    assert sliced_assign(t, slice(1, None), t[:-1]).tolist() == [0, 0, 1, 2, 3]
    assert t.tolist() == [0, 1, 2, 3, 4]


def test_the_input_is_not_changed_and_shares_nothing() -> None:
    t = torch.zeros(3)
    out = sliced_assign(t, slice(0, 0), 1.0)
    assert out.data_ptr() != t.data_ptr()
    assert t._version == 0


def test_duplicates_store_the_last_value_with_deterministic_algorithms() -> None:
    index = torch.tensor([0] * 100 + [1])
    value = torch.arange(101.0)
    torch.use_deterministic_algorithms(True)
    try:
        assert sliced_assign(torch.zeros(2), index, value).tolist() == [99, 100]
    finally:
        torch.use_deterministic_algorithms(False)


def test_in_place_every_alias_sees_it_and_a_leaf_refuses() -> None:
    t = torch.zeros(2, 3)
    view = t[1]
    assert sliced_assign_(t, (1, slice(0, 2)), torch.tensor([1.0, 2.0])) is t
    assert view.tolist() == [1, 2, 0]
    leaf = torch.zeros(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        sliced_assign_(leaf, 0, 1.0)
    with torch.no_grad():
        assert sliced_assign_(leaf, 0, 1.0)[0] == 1


def test_meta_tensors_and_devices() -> None:
    meta = torch.zeros(3, device="meta")
    assert sliced_assign(meta, slice(0, 1), 1.0).device.type == "meta"
    assert outcome(sliced_assign, base(), 0, torch.zeros(4, device="meta"))[0] in {
        outcome(plain, base(), 0, torch.zeros(4, device="meta"))[0]
    }


@pytest.mark.cuda
def test_indices_on_the_cpu_for_a_tensor_on_a_gpu() -> None:
    t = torch.zeros(3, 4, device="cuda")
    for index in (torch.tensor([0, 2]), torch.tensor([True, False, True]), [0, 2], slice(1, 2)):
        out = sliced_assign(t, index, torch.tensor(1.0))
        assert torch.equal(out, plain(t, index, torch.tensor(1.0)))


# --- errors carry the call


def test_the_error_carries_index_and_shapes() -> None:
    t = torch.zeros(3, 4)
    with pytest.raises(IndexError) as caught:
        sliced_assign(t, (slice(None), torch.tensor([0, 9])), torch.ones(2))
    assert str(caught.value).startswith(
        "sliced_assign: t is of shape (3, 4), index is (:, <int64 tensor of shape (2,)>), "
        "value is of shape (2,): "
    )
    with pytest.raises(RuntimeError, match=r"t is of shape \(3, 4\), index is 1, value is of"):
        sliced_assign_(t, 1, torch.ones(5))


def test_indices_are_described_briefly() -> None:
    assert describe_index((0, None, ..., slice(1, None, 2))) == "(0, None, ..., 1::2)"
    assert describe_index(np.zeros(2, dtype=bool)) == "<bool array of shape (2,)>"
    assert len(describe_index(list(range(1000)))) <= 200


# --- derivatives and transformations

FORMULATIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "slice": (slice(0, 2), (2, 3)),
    "integers": (torch.tensor([0, 2]), (2, 3)),
    "mask": (torch.tensor([True, False, True]), (2, 3)),
    "mixed": ((slice(None), [0, 2]), (3, 2)),
}


@pytest.mark.parametrize("name", FORMULATIONS)
def test_gradcheck_and_gradgradcheck(name: str) -> None:
    index, shape = FORMULATIONS[name]
    t = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    value = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def assign(t: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sliced_assign(t, index, value).sin()

    assert torch.autograd.gradcheck(assign, (t, value), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(assign, (t, value))


def looped(function: Any, in_dims: tuple[int | None, ...], *args: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [
            function(*[x if d is None else x[k] for x, d in zip(args, in_dims, strict=True)])
            for k in range(4)
        ]
    )


UNDER_VMAP: dict[str, Callable[..., torch.Tensor]] = {
    "integers": sliced_assign,
    "slice": lambda t, i, v: sliced_assign(t, slice(0, 2), v) + i.sum(),
    "mixed": lambda t, i, v: sliced_assign(t, (i, slice(0, 2)), v[:, :2]),
    "add": lambda t, i, v: at(t)[i].add(v),
    "multiply": lambda t, i, v: at(t)[i].multiply(v),
    "max": lambda t, i, v: at(t)[i].max(v),
    "add to a slice": lambda t, i, v: at(t)[0:2].add(v) + i.sum(),
}
DIMS = [dims for dims in itertools.product((0, None), repeat=3) if 0 in dims]


@pytest.mark.parametrize("name", UNDER_VMAP)
def test_vmap_of_any_argument_equals_a_loop(name: str) -> None:
    torch.manual_seed(0)
    t, value = torch.randn(4, 3, 3), torch.randn(4, 2, 3)
    index = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]])
    for dims in DIMS:
        args = [x if d == 0 else x[0] for x, d in zip((t, index, value), dims, strict=True)]
        found = vmap(UNDER_VMAP[name], in_dims=dims)(*args)
        assert torch.equal(found, looped(UNDER_VMAP[name], dims, *args)), dims


@pytest.mark.parametrize("name", FORMULATIONS)
def test_functional_gradients_where_only_the_value_is_tracked(name: str) -> None:
    index, shape = FORMULATIONS[name]
    t, value = torch.randn(3, 3), torch.randn(shape)
    found = grad(lambda value: sliced_assign(t, index, value).sin().sum())(value)
    assert torch.allclose(found, value.cos())
    tangent = jvp(lambda value: sliced_assign(t, index, value).sum(), (value,), (value,))[1]
    assert torch.allclose(tangent, value.sum())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return sliced_assign(t, torch.tensor([0, 2]), self.weight)


def test_functional_call_and_per_sample_gradients() -> None:
    model, batch = Model(), torch.zeros(4, 3, 3)

    def loss(parameters: dict[str, torch.Tensor], t: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional_call(model, parameters, (t,))
        return out.sin().sum()

    parameters = {"weight": torch.full((2, 3), 2.0)}
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, batch)["weight"]
    assert torch.allclose(found, parameters["weight"].cos().expand(4, 2, 3))


# --- at


def test_set_and_get_are_assignment_and_indexing() -> None:
    t = base(requires_grad=False)
    assert torch.equal(at(t)[1, 2:].set(9.0), plain(t, (1, slice(2, None)), 9.0))
    assert torch.equal(at(t)[[0, 2]].get(), t[[0, 2]])
    assert at(t)[0].get().data_ptr() == t.data_ptr()


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "multiply": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_each_operation_is_as_reading_and_assigning(index: Any, operation: str) -> None:
    """None of these indices names an element twice, so the order does not matter."""

    def expected(t: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
        value = torch.as_tensor(value).to(t.dtype)
        return plain(t, index, OPERATIONS[operation](t[index], value))

    def found(t: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
        out: torch.Tensor = getattr(at(t)[index], operation)(value)
        return out

    if isinstance(index, torch.Tensor) and index.dim() == 2 and index.dtype is torch.int64:
        return  # the matrix of integers names row 1 twice
    for value in (4.25, torch.tensor([[4.25]], requires_grad=True)):
        left, right = outcome(found, base(), index, value), outcome(expected, base(), index, value)
        if isinstance(right[0], type):
            assert left[0] is right[0]
            continue
        assert torch.equal(left[0], right[0])
        for x, y in zip(left[4], right[4], strict=True):
            # Where nothing is selected, one of them may have no gradient, the other zeros.
            torch.testing.assert_close(
                torch.zeros(()) if x is None else x.sum(), torch.zeros(()) if y is None else y.sum()
            )


def test_duplicates_are_applied_every_time_as_in_jax() -> None:
    t, index = torch.tensor([1.0, 2.0, 3.0]), [0, 0, 2]
    value = torch.tensor([5.0, -7.0, 0.5])
    assert at(t)[index].add(value).tolist() == [-1.0, 2.0, 3.5]
    assert at(t)[index].multiply(value).tolist() == [-35.0, 2.0, 1.5]
    assert at(t)[index].min(value).tolist() == [-7.0, 2.0, 0.5]
    assert at(t)[index].max(value).tolist() == [5.0, 2.0, 3.0]
    assert t.tolist() == [1.0, 2.0, 3.0]


def test_at_keeps_memory_format_and_dtype() -> None:
    t = torch.zeros(3, 4).t()
    assert at(t)[[0, 2]].add(1.0).stride() == t.stride()
    assert at(torch.zeros(3, dtype=torch.int64))[[0]].add(1.9).tolist() == [1, 0, 0]
    with pytest.raises(IndexError, match=r"at\(\)\.add: t is of shape \(4, 3\)"):
        at(t)[[9]].add(1.0)


@settings(max_examples=200)
@given(assignments())
def test_positions_say_where_the_selected_elements_stand(
    case: tuple[torch.Tensor, Any, Any],
) -> None:
    t, index, _ = case
    try:
        selected = t.detach()[index]
    except Exception as error:  # noqa: BLE001
        with pytest.raises(type(error)):
            positions(t, index)
        return
    assert torch.equal(t.detach().reshape(-1)[positions(t, index)], selected)
    if is_basic(index) and selected.numel() and t.numel():
        assert selected._base is not None


def test_parts_of_an_index() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    parts = parts_of((0, ..., None, mask, slice(1, 2)), 6)
    assert parts is not None
    assert [(part.dim, part.dims) for part in parts] == [(0, 1), (1, 2), (3, 0), (3, 2), (5, 1)]
    assert parts_of((0, 0), 1) is None
    assert parts_of([0, 1], 2) is None
