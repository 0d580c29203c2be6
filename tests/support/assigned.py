"""How an assignment ends, and a tensor to assign to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.extra.numpy as npst
import numpy as np
import torch
from hypothesis import strategies as st


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


def base(requires_grad: bool = True) -> torch.Tensor:
    return torch.arange(12.0).view(3, 4).requires_grad_(requires_grad)


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
