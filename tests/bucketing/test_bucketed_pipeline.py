"""The parts of bucketed(), each by itself: a spec, and the shape of a call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from torchguard.bucketing.decorator.shape import Call, Shape, shape_of
from torchguard.bucketing.decorator.spec import Spec

OPTIONS: dict[str, Any] = {
    "dims": {"x": {1: "t"}}, "buckets": [8, 16], "fill": None, "lengths": None, "mask": None,
    "outputs": None, "side": "right", "check_padding": "first", "compile": None,
}  # fmt: skip


def spec_of(function: Any, **options: Any) -> Spec:
    return Spec.of(function, {**OPTIONS, **options}, bound=False)  # type: ignore[typeddict-item]


def function(x: torch.Tensor, mask: Any = None, **_: Any) -> torch.Tensor:
    return x * 2


def looked_at(*args: Any, state: Any = (True, False, False, False), **kwargs: Any) -> Shape:
    spec = spec_of(function)
    return shape_of(spec, Call.of(spec, (), args, kwargs), state)


def test_a_spec_is_frozen_and_knows_no_call() -> None:
    spec = spec_of(function)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.side = "left"  # type: ignore[misc]
    with pytest.raises(TypeError, match="mask names 'other'"):
        spec_of(lambda x: x, mask="other")


NAN = [
    lambda: float("nan"),
    lambda: np.float64("nan"),
    lambda: complex(float("nan"), 1),
    lambda: {float("nan"), 2.0},
    lambda: [float("nan"), {"a": slice(float("nan"))}],
    lambda: torch.nn.Threshold(float("nan"), 0.0),
]


@pytest.mark.parametrize("make", NAN)
def test_the_shape_of_equal_calls_is_equal(make: Any) -> None:
    """And has one hash, so that it can be a key; a NaN is not equal to itself."""
    one, other = (looked_at(torch.ones(2, 5), make()) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert (one.sizes, one.buckets, str(one)) == ({"t": 5}, {"t": 8}, "t: 5 -> 8 in x")


@pytest.mark.parametrize(
    "other",
    [
        lambda: looked_at(torch.ones(2, 6)),
        lambda: looked_at(torch.ones(3, 5)),
        lambda: looked_at(torch.ones(2, 5).double()),
        lambda: looked_at(torch.ones(2, 5, requires_grad=True)),
        lambda: looked_at(torch.ones(2, 5), 1),
        lambda: looked_at(torch.ones(2, 5), more=np.ones(3)),
        lambda: looked_at(torch.ones(2, 5), state=(False, False, False, False)),
    ],
)
def test_the_shape_of_another_call_is_another(other: Any) -> None:
    shape = looked_at(torch.ones(2, 5))
    assert shape != other()
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.real = (6,)  # type: ignore[misc]
