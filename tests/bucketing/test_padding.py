"""Padding: the data is where it was, the rest is the fill, and nothing else has changed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from torchguard import bucketed
from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.collator import BucketCollator
from torchguard.bucketing.padding import Padded, length_mask, pad_to_bucket, unpad

BUCKETS = Buckets([4, 8, 16])
SIDES: list[Any] = ["left", "right"]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    plain = torch.arange(count, dtype=torch.float32).remainder(2 if dtype == torch.bool else 100)
    if dtype == torch.complex32:
        return torch.complex(plain, plain).to(dtype).reshape(shape)
    return plain.to(dtype).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, which also works for types that can't be compared."""
    whole = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*whole)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_dimension_and_side(dtype: torch.dtype) -> None:
    x = numbers(3, 5, 6, dtype=dtype)
    one = torch.ones((), dtype=torch.float32).to(dtype)
    for dim, side in itertools.product((0, 1, -1, -3), SIDES):
        padded, length = pad_to_bucket(x, dim, BUCKETS, value=1, side=side)
        assert length == x.shape[dim]
        assert padded.shape[dim] == BUCKETS.bucket_for(length)
        assert same(unpad(padded, dim, length, side), x)
        start = 0 if side == "left" else length
        filled = padded.narrow(dim, start, padded.shape[dim] - length).contiguous()
        assert same(filled, one.expand(filled.shape))


def test_an_exact_fit_is_the_tensor_itself_and_unpad_a_view() -> None:
    x = torch.zeros(2, 8)
    assert pad_to_bucket(x, 1, BUCKETS).tensor is x
    assert pad_to_bucket(x, 1, BUCKETS, value="repeat-last").tensor is x
    assert pad_to_bucket(x, 1, BUCKETS) == Padded(x, 8)
    unpad(x, 1, 3, "left").fill_(1)
    assert x.tolist() == [[0] * 5 + [1] * 3] * 2


@pytest.mark.parametrize(
    ("value", "side", "expected"),
    [
        ("repeat-last", "right", [5, 6, 7, 7]),
        ("repeat-last", "left", [5, 5, 6, 7]),
        (-100, "right", [5, 6, 7, -100]),
        (np.int64(-100), "right", [5, 6, 7, -100]),
    ],
)
def test_fills(value: Any, side: Any, expected: list[int]) -> None:
    x = torch.tensor([[5, 6, 7], [5, 6, 7]])
    padded = pad_to_bucket(x, 1, BUCKETS, value=value, side=side).tensor
    assert padded.tolist() == [expected, expected]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.int64, 0.5),
        (torch.int64, 1 << 63),
        (torch.uint8, -1),
        (torch.bool, 2),
        (torch.float32, 1j),
        (torch.float16, 1e6),
        (torch.int32, "half"),
        (torch.int32, None),
        (torch.int32, torch.zeros(1)),
    ],
)
def test_a_fill_that_does_not_fit_is_refused(dtype: torch.dtype, value: Any) -> None:
    with pytest.raises(TypeError, match="pad_to_bucket: value"):
        pad_to_bucket(torch.zeros(100, dtype=dtype), 0, 129, value=value)


@pytest.mark.parametrize("value", [2.0, "repeat-last"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_reach_the_real_part_only(value: Any, side: Any) -> None:
    x = torch.randn(2, 6, requires_grad=True)
    padded = pad_to_bucket(x, 1, BUCKETS, value=value, side=side).tensor
    weights = torch.randn(2, 8)
    (padded * weights).sum().backward()
    assert torch.equal(x.grad, unpad(weights, 1, 6, side))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, "repeat-last"])
@pytest.mark.parametrize("dim", [0, 3])
def test_channels_last_stays_channels_last(value: Any, dim: int) -> None:
    x = torch.randn(3, 5, 6, 7).to(memory_format=torch.channels_last).requires_grad_()
    padded = pad_to_bucket(x, dim, BUCKETS, value=value).tensor
    assert padded.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(unpad(padded, dim, x.shape[dim]), x)
    volume = torch.randn(2, 3, 3, 3, 3).to(memory_format=torch.channels_last_3d)
    padded = pad_to_bucket(volume, 4, 4, value=value).tensor
    assert padded.is_contiguous(memory_format=torch.channels_last_3d)
    plain = pad_to_bucket(torch.randn(3, 5, 6, 7), dim, BUCKETS, value=value).tensor
    assert plain.is_contiguous()


def test_views_empty_tensors_and_scalars() -> None:
    base = torch.arange(24).reshape(4, 6)
    assert torch.equal(pad_to_bucket(base.t(), 0, 8).tensor[:6], base.t())
    assert torch.equal(pad_to_bucket(base[:, ::2], 1, 4).tensor[:, :3], base[:, ::2])
    assert pad_to_bucket(torch.zeros(2, 0), 1, BUCKETS, value=3).tensor.tolist() == [[3] * 4] * 2
    assert pad_to_bucket(torch.zeros(0, 3), 1, BUCKETS).tensor.shape == (0, 4)
    with pytest.raises(ValueError, match="nothing to repeat in dim 1"):
        pad_to_bucket(torch.zeros(2, 0), 1, BUCKETS, value="repeat-last")
    with pytest.raises(IndexError, match="Dimension"):
        pad_to_bucket(torch.tensor(1.0), 0, BUCKETS)


def test_bad_arguments_are_named() -> None:
    x = torch.zeros(2, 5)
    for call, error, message in [
        (lambda: pad_to_bucket([1], 0, BUCKETS), TypeError, "x is of type list"),  # type: ignore[arg-type]
        (lambda: pad_to_bucket(x, 2, BUCKETS), IndexError, "Dimension out of range"),
        (lambda: pad_to_bucket(x, 1, Buckets([4])), ValueError, "x has 5 in dim 1, more than 4"),
        (lambda: pad_to_bucket(x, 1, 4), ValueError, "x has 5 in dim 1, more than 4"),
        (lambda: pad_to_bucket(x, 1, {8}), TypeError, r"buckets is \{8\}, expected"),  # type: ignore[arg-type]
        (lambda: pad_to_bucket(x, 1, []), ValueError, "Buckets: "),
        (lambda: pad_to_bucket(x, 1, 8, side="top"), ValueError, "side is 'top'"),  # type: ignore[arg-type]
        (lambda: unpad(x, 1, 6), ValueError, "length is 6, but x of shape"),
        (lambda: unpad(x, 1, 1, "top"), ValueError, "side is 'top'"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(error, match=message):
            call()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("buckets", [[16, 8], (8, 16), range(8, 17, 8)])
def test_a_list_of_sizes_is_taken_as_buckets(buckets: Any) -> None:
    """By pad_to_bucket, compiled or not, by BucketCollator and by bucketed."""
    x = torch.ones(2, 9)
    assert pad_to_bucket(x, 1, buckets).tensor.shape == (2, 16)
    options: Any = {"fullgraph": True, "backend": "eager", "dynamic": False}
    compiled = torch.compile(lambda x: pad_to_bucket(x, 1, buckets).tensor, **options)
    assert compiled(x).shape == (2, 16)
    for each in (buckets, {"t": buckets}):
        collate = BucketCollator(each, {"ids": {1: "t"}})
        assert collate([{"ids": torch.ones(9)}])["ids"].shape == (1, 16)
        double = bucketed(lambda x: 2 * x, dims={"x": {1: "t"}}, buckets=each)
        assert double(x).shape == (2, 9)
        assert double.stats().hits == {(16,): 1}


@pytest.mark.parametrize(("value", "side"), [(-1, "left"), (0.5, "right"), ("repeat-last", "left")])
def test_compiles_in_one_graph(value: Any, side: Any) -> None:
    def padded(x: torch.Tensor) -> torch.Tensor:
        return pad_to_bucket(x, 1, BUCKETS, value=value, side=side).tensor * 2

    torch._dynamo.reset()
    compiled = torch.compile(padded, fullgraph=True, backend="eager", dynamic=False)
    for length in (3, 8):
        x = torch.randn(2, length)
        assert torch.equal(compiled(x), padded(x))


# Masks.


@pytest.mark.parametrize(
    "empty", [[], (), range(0), np.array([], np.int64), torch.empty(0, dtype=torch.int64)]
)
def test_a_length_mask_of_no_sequences(empty: Any) -> None:
    expected = torch.arange(3) < torch.empty(0, 1)
    for side in SIDES:
        found = length_mask(empty, 3, side=side)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_length_masks() -> None:
    for lengths in ([0, 2, 4], torch.tensor([0, 2, 4])):
        assert length_mask(lengths, 4).int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1] * 4]
        left = length_mask(lengths, 4, side="left")
        assert left.int().tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [1] * 4]
    small = length_mask(torch.tensor([10], dtype=torch.uint8), 300, side="left")
    assert small.sum() == 10  # 300 - 10 does not fit uint8


@pytest.mark.parametrize(
    ("lengths", "error"),
    [([5], ValueError), ([-1], ValueError), ([1.5], TypeError), ([True], TypeError),
     (torch.tensor([1.5]), TypeError), (torch.tensor([[1]]), ValueError)],
)  # fmt: skip
def test_bad_lengths_are_refused(lengths: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="lengths"):
        length_mask(lengths, 4)
