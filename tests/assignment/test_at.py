"""``at(t)[index]``: numpy's ``ufunc.at`` and JAX's modes, gradients, compiled in one graph."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.assigned import INDICES, base, plain
from torchguard import at

UFUNCS: dict[str, Any] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "mul": np.multiply,
    "divide": np.divide,
    "power": np.power,
    "min": np.minimum,
    "max": np.maximum,
}
Array = NDArray[Any]
BEYOND = 3  # how far an index is out of bounds at most
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "set": lambda _, value: value,
    "add": torch.add,
    "multiply": torch.mul,
    "max": torch.maximum,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", [name for name in INDICES if name != "matrix of integers"])
def test_each_index_is_read_as_torch_does(name: str, operation: str) -> None:
    """None of these indices names an element twice."""
    t = base(requires_grad=False)
    index = INDICES[name]

    def update() -> torch.Tensor:
        return plain(t, index, OPERATIONS[operation](t[index], torch.tensor(4.25)))

    try:
        expected = update()
    except Exception as error:  # noqa: BLE001
        with pytest.raises(type(error)):
            getattr(at(t)[index], operation)(4.25)
    else:
        assert torch.equal(getattr(at(t)[index], operation)(4.25), expected)


@st.composite
def selections(draw: st.DrawFn, *, beyond: int = 0) -> tuple[Array, Any]:
    """An array and an index into it: integers and slices, or arrays and slices.

    Not integers beside arrays: numpy takes those integers for arrays, torch does not.
    """
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    array = np.arange(1.0, np.prod(shape) + 1).reshape(shape)
    spread = draw(st.sampled_from([None, (), (3,), (2, 2), (0,)]))
    items: list[Any] = []
    for size in shape[: draw(st.integers(1, len(shape)))]:
        rows = st.integers(-size - beyond, size - 1 + beyond)
        if draw(st.booleans()):
            items.append(slice(draw(st.integers(-size, size)), None, draw(st.integers(1, 2))))
        elif spread is None or spread == ():
            items.append(draw(rows))
        else:
            count = int(np.prod(spread))
            drawn = draw(st.lists(rows, min_size=count, max_size=count))
            items.append(np.array(drawn, dtype=np.int64).reshape(spread))
    return array, tuple(items)


def forms(index: Any) -> list[Any]:
    """The same index of arrays, of tensors, and of lists where they have one dimension."""

    def each(change: Callable[[Array], Any]) -> tuple[Any, ...]:
        return tuple(change(i) if isinstance(i, np.ndarray) else i for i in index)

    found = [index, each(torch.as_tensor)]
    if all(i.ndim == 1 and i.size for i in index if isinstance(i, np.ndarray)):
        found.append(each(lambda i: i.tolist()))
    scalars = tuple(torch.tensor(i) if isinstance(i, int) else i for i in index)
    return [*found, scalars]


def with_mode(array: Array, index: Any, mode: str) -> tuple[Array, Any, Any]:
    """The array with NaN around it, the index into that, and where the array stands in it."""
    around, items, inside = list[tuple[int, int]](), list[Any](), list[slice]()
    rest = [slice(None)] * (array.ndim - len(index))
    for item, size in zip((*index, *rest), array.shape, strict=True):
        far = 0 if isinstance(item, slice) or mode == "clip" else BEYOND
        around.append((far, far))
        inside.append(slice(far, far + size))
        if not isinstance(item, slice):
            rows = np.where(np.asarray(item) < 0, np.asarray(item) + size, item)
            rows = np.clip(rows, 0, size - 1) if mode == "clip" else rows + far
            item = rows if isinstance(item, np.ndarray) else int(rows)  # noqa: PLW2901
        items.append(item)
    return np.pad(array, around, constant_values=np.nan), tuple(items), tuple(inside)


def values_for(shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    return (np.arange(count) % 3 + 1.0).reshape(shape)


@settings(max_examples=150, deadline=None)
@given(selections(), st.sampled_from(sorted(UFUNCS)), st.booleans())
def test_each_operation_is_numpys_at(case: tuple[Array, Any], operation: str, lone: bool) -> None:
    """Indices given twice, negative ones and empty ones included."""
    array, index = case
    values: Any = 2.0 if lone else values_for(array[index].shape)
    expected = array.copy()
    UFUNCS[operation].at(expected, index, values)
    for form in forms(index):
        t = torch.as_tensor(array)
        found = getattr(at(t)[form], operation)(values)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
        assert np.array_equal(t.numpy(), array)


@settings(max_examples=150, deadline=None)
@given(
    selections(beyond=BEYOND),
    st.sampled_from(["set", "add", "multiply", "min", "divide", "power", "apply", "get"]),
    st.sampled_from(["drop", "fill", "clip"]),
)
def test_modes_are_those_of_jax(case: tuple[Array, Any], operation: str, mode: Any) -> None:
    """Dropped, filled with NaN, or moved to the nearest row."""
    array, index = case
    expected, place, inside = with_mode(array, index, mode)
    read = np.copy(expected[place])
    # Which of several values stays is not specified.
    values = 7.0 if operation == "set" else values_for(np.shape(read)) + 1
    with np.errstate(invalid="ignore"):
        if operation == "set":
            expected[place] = values
        elif operation == "apply":
            np.multiply.at(expected, place, -2)
        elif operation != "get":
            UFUNCS[operation].at(expected, place, values)
    for form in forms(index):
        t = torch.as_tensor(array)
        np.testing.assert_array_equal(at(t)[form].get(mode=mode).numpy(), read)
        if operation == "get":
            continue
        given: Any = (lambda x: -2 * x) if operation == "apply" else torch.as_tensor(values)
        found = getattr(at(t)[form], operation)(given, mode=mode)
        np.testing.assert_allclose(found.numpy(), expected[inside], rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [(torch.int8, -128), (torch.uint8, 255), (torch.bool, 1), (torch.int64, -(2**63))],
)
def test_what_is_read_out_of_bounds_is_jaxs_fill(dtype: torch.dtype, fill: int) -> None:
    t = torch.zeros(3, dtype=dtype)
    assert at(t)[[0, 3, -4]].get(mode="fill").tolist() == [0, fill, fill]
    assert at(t)[[0, 3]].get(mode="fill", fill_value=1).tolist() == [0, 1]


GRADIENTS = ("set", "add", "subtract", "multiply", "divide", "power", "min", "max")


@pytest.mark.parametrize("mode", [None, "drop", "clip"])
@pytest.mark.parametrize("operation", GRADIENTS)
def test_gradients_of_both_sides_where_an_index_is_given_twice(operation: str, mode: Any) -> None:
    torch.manual_seed(0)
    t = (torch.rand(4, 3, dtype=torch.double) + 0.5).requires_grad_()
    values = (torch.rand(3, 3, dtype=torch.double) + 0.5).requires_grad_()
    rows = [2, 0, 3] if operation == "set" else [2, 2, 0] if mode is None else [2, 2, -1]
    if mode is not None:
        rows[-1] = 9

    def update(t: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = getattr(at(t)[rows], operation)(values, mode=mode)
        return out

    assert torch.autograd.gradcheck(update, (t, values))


def test_gradients_of_what_is_left_alone_are_no_nan() -> None:
    t = torch.tensor([-2.0, 0.0, 3.0], requires_grad=True)
    power = torch.tensor([2.0, 1.0], requires_grad=True)
    out = at(t)[[2, 2]].power(power)
    assert out.tolist() == [-2.0, 0.0, 9.0]
    found = torch.autograd.grad(out.sum(), (t, power))
    assert found[0].tolist() == [1.0, 1.0, 6.0]
    assert found[1].isfinite().all()


def test_apply_has_a_gradient_and_counts() -> None:
    t = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    out = at(t)[[0, 0, 2]].apply(torch.square)
    assert out.tolist() == [1.0, 2.0, 9.0]
    assert torch.autograd.grad(out.sum(), t)[0].tolist() == [4.0, 1.0, 6.0]
    assert at(t)[t > 1.5].apply(torch.neg).tolist() == [1.0, -2.0, -3.0]
    assert at(t)[[]].apply(torch.neg).tolist() == [1.0, 2.0, 3.0]
    assert at(torch.ones(2, 3).t())[[0]].apply(torch.neg).stride() == (1, 3)


@pytest.mark.parametrize("index", [slice(2), 0, ..., None, torch.tensor(0), [0, 1]], ids=str)
def test_a_function_that_writes_its_argument_leaves_the_tensor(index: Any) -> None:
    start = torch.tensor([-1.0, 2.0, -3.0])
    for t in (start, start.clone().requires_grad_()):
        out = at(t)[index].apply(torch.relu_, unique_indices=True)
        expected = at(t)[index].apply(torch.relu, unique_indices=True)
        assert out.tolist() == expected.tolist()
        assert t.tolist() == [-1.0, 2.0, -3.0]
        if t.requires_grad:
            gradients = [torch.autograd.grad(each.sum(), t)[0].tolist() for each in (out, expected)]
            assert gradients[0] == gradients[1]


COMPILED: dict[str, Callable[..., torch.Tensor]] = {
    **{name: lambda t, i, v, name=name: getattr(at(t)[i], name)(v) for name in GRADIENTS},
    "add to columns": lambda t, i, v: at(t)[:, 1:].add(v[0, :2]),
    "add to one row": lambda t, i, v: at(t)[i[0]].add(v[0]),
    "set one element": lambda t, i, v: at(t)[i[0], 1].set(v[0, 0]),
    "set, drop": lambda t, i, v: at(t)[i + 2].set(v, mode="drop"),
    "add, clip": lambda t, i, v: at(t)[i + 2].add(v, mode="clip"),
    "one row, drop": lambda t, i, v: at(t)[i[0] + 9].add(v[0], mode="drop"),
    "get": lambda t, i, v: at(t)[i].get() + v,
    "get of one row": lambda t, i, v: at(t)[i[0]].get() + v,
    "get, fill": lambda t, i, v: at(t)[:, i + 1].get(mode="fill", fill_value=2.0),
    "apply": lambda t, i, v: at(t)[1:].apply(torch.sin),
    "apply, unique": lambda t, i, v: at(t)[i].apply(torch.sin, unique_indices=True),
    "list": lambda t, i, v: at(t)[[0, 0, 2]].mul([[2.0], [3.0], [4.0]]),
    "array": lambda t, i, v: at(t)[np.array([0, 2])].add(np.array([1.0, 2.0, 3.0])),
}


def test_each_is_compiled_in_one_graph() -> None:
    """Each with a weight of its own: a wrong gradient of one of them shows in the sum."""

    def each_of_them(t: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> Any:
        return [function(t, index, value) for function in COMPILED.values()]

    torch.compiler.reset()
    compiled = torch.compile(each_of_them, backend="aot_eager", fullgraph=True, dynamic=True)
    results = []
    for function in (each_of_them, compiled):
        t = torch.arange(1.0, 13.0, dtype=torch.double).reshape(4, 3).requires_grad_()
        value = torch.full((2, 3), 2.0, dtype=torch.double, requires_grad=True)
        outs = function(t, torch.tensor([0, 2]), value)
        loss = sum((k + 1) * out.sin().sum() for k, out in enumerate(outs))
        results.append(
            (dict(zip(COMPILED, outs, strict=True)), torch.autograd.grad(loss, (t, value)))
        )
    torch.testing.assert_close(*results)


def test_what_can_not_be_had_says_what_to_write() -> None:
    t, index = torch.ones(4), torch.tensor([0, 0])
    with pytest.raises(NotImplementedError, match="unique_indices=True"):
        torch.func.vmap(lambda t: at(t)[index].apply(torch.sin))(t.reshape(1, 4))
    compiled = torch.compile(lambda t: at(t)[index].apply(torch.neg), backend="eager")
    assert torch.equal(compiled(t), t)  # twice, outside of the graph
    with pytest.raises(TypeError, match=r"at\(t.double\(\)\)\[index\].divide"):
        at(t.long())[0].divide(2)
    with pytest.raises(ValueError, match='mode is \'wrap\'; expected "clip", "drop", "fill"'):
        at(t)[[0]].add(1.0, mode="wrap")  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="dimension 0 has no elements to clip to"):
        at(torch.ones(0))[[1]].add(1.0, mode="clip")
    with pytest.raises(TypeError, match=r"expected a list of integers.*write a tensor"):
        at(t)[[[0], [1]]].add(1.0, mode="drop")
    assert at(torch.ones(0))[[1]].add(1.0, mode="drop").tolist() == []


def test_values_and_indices_from_numpy_and_lists() -> None:
    t = torch.zeros(3)
    assert at(t)[np.array([0, 2])].set([1, 2]).tolist() == [1.0, 0.0, 2.0]
    assert at(t)[np.array([0, 2], dtype=np.uint8)].add(np.float32(1)).tolist() == [1.0, 0.0, 1.0]
    assert at(t)[np.array([True, False, True])].set(np.array([1, 2])).tolist() == [1.0, 0.0, 2.0]
    with pytest.raises(IndexError):
        at(t)[np.array([0.5])].add(1.0)
    assert at(t)[np.int64(1)].add(np.int64(4)).tolist() == [0.0, 4.0, 0.0]
    assert at(t)[0].get().data_ptr() == t.data_ptr()  # a view, as in torch


def test_a_method_without_an_index_is_told_where_the_index_goes() -> None:
    x: Any = at(torch.ones(3))
    with pytest.raises(AttributeError, match=r"write at\(x\)\[index\]\.set\(\.\.\.\)"):
        x.set(1)
    with pytest.raises(AttributeError, match="'At' object has no attribute 'sett'"):
        x.sett(1)
    copied = copy.deepcopy(x)  # asks for names that are not there
    assert copied[0].set(2).tolist() == [2, 1, 1]


def test_its_repr_is_what_was_written() -> None:
    t = torch.zeros(2, 3)
    assert repr(at(t)) == "at(<float32 tensor of shape (2, 3)>)"
    assert repr(at(t)[0, 1:]) == "at(<float32 tensor of shape (2, 3)>)[0, 1:]"
    assert repr(at(t)[[0, 0]]) == "at(<float32 tensor of shape (2, 3)>)[[0, 0]]"


@pytest.mark.parametrize(
    "index", [0, slice(2), torch.tensor([0, 2]), [0, 2], torch.tensor([True, False, True])]
)
@pytest.mark.parametrize("value", [torch.tensor(2), torch.tensor([[1, 2], [3, 4]])])
@pytest.mark.parametrize("mode", [None, "promise_in_bounds"])
def test_a_tensor_of_another_dtype_becomes_that_of_t(index: Any, value: Any, mode: Any) -> None:
    """A plain assignment raises where the index is no view."""
    t = torch.zeros(3, 2)
    value = value[0] if isinstance(index, int) and value.dim() else value
    expected = t.clone()
    expected[index] = value.float()
    for update in (at(t)[index].set, at(t)[index].add):
        result = update(value, mode=mode)
        assert result.dtype == t.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("mode", [None, "clip", "drop"])
def test_of_two_ellipses_the_first_takes_the_dimensions(mode: Any) -> None:
    t = torch.zeros(2, 3)
    expected = t.clone()
    expected[..., 1, ...] = 5
    for row in (1, torch.tensor(1)):
        assert torch.equal(at(t)[..., row, ...].set(5, mode=mode), expected)
        assert torch.equal(at(t)[..., row, ...].add(5, mode=mode), expected)
        with pytest.raises(IndexError):
            at(t[None])[..., row, ..., 1].add(5, mode=mode)


def test_memory_format_dtype_and_errors_are_those_of_an_assignment() -> None:
    t = torch.zeros(3, 4).t()
    assert at(t)[[0, 2]].add(1.0).stride() == t.stride()
    assert at(torch.zeros(3, dtype=torch.int64))[[0]].add(1.9).tolist() == [1, 0, 0]
    with pytest.raises(IndexError, match=r"at\(\)\.add: t is of shape \(4, 3\)"):
        at(t)[[9]].add(1.0)


def test_divide_leaves_the_elements_that_are_not_named() -> None:
    t = torch.tensor([complex(math.inf, 0), 1 + 0j], requires_grad=True)
    result = at(t)[[1, 1]].divide(2)
    assert result.tolist() == [complex(math.inf, 0), 0.25]
    result.abs().sum().backward()
    assert t.grad is not None
    assert t.grad[1] == 0.25
