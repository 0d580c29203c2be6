"""bucketed(): outputs are sliced to the sizes they have without padding."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from support.bucketed import double, in_time, leak, same, wrap


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    values: torch.Tensor
    name: str


# Functions whose outputs have other sizes than their inputs, each padding-proof.
SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "L": lambda x: x * 2,
    "L - 1": lambda x: x[1:] - 1,
    "2 L": lambda x: x.repeat_interleave(2),
    "(L - 1) // 2": lambda x: x.unfold(0, 3, 2).sum(-1) if x.shape[0] > 2 else x[:0],
    "dict": lambda x: {"a": x + 1, "b": [x[:-1], None, "text"]},
    "constant": lambda x: x.new_zeros(16),
    "named tuple": lambda x: Pair(x, x + 1),
    "dataclass": lambda x: Record(x, "name"),
    "return type": lambda x: x.cummax(0),  # torch.return_types.cummax
}


class TestDerived:
    @pytest.mark.parametrize("name", SIZES)
    def test_are_cut_to_the_size_they_have_without_padding(self, name: str) -> None:
        """And come back as what they were."""
        function = SIZES[name]
        wrapped = wrap(function)
        for length in (3, 4, 5, 7, 8, 11, 16):
            x = torch.arange(1.0, length + 1)
            same(wrapped(x), function(x))

    def test_of_a_size_that_hangs_on_another_argument(self) -> None:
        """Both give 4 at the size of the bucket, and 2 and 3 at that of the call."""

        def half(x: torch.Tensor, more: int) -> torch.Tensor:
            return x[: (x.shape[0] + more) // 2]

        x = torch.arange(5)
        by_number = wrap(half)
        by_tensor = wrap(lambda x, other: half(x, other.shape[0]))
        by_part = wrap(lambda x, other: half(x, other["up"]))
        same_container = wrap(lambda batch: half(batch["x"], batch["up"]), dims=({"x": {0: "t"}},))
        for up in (0, 1, 0):
            expected = half(x, up)
            same(by_number(x, bool(up)), expected)
            same(by_tensor(x, torch.ones(up)), expected)
            same(by_part(x, {"up": bool(up)}), expected)
            same(same_container({"x": x, "up": bool(up)}), expected)

    def test_of_a_size_that_hangs_on_something_outside(self) -> None:
        dropped = 0
        wrapped = wrap(lambda x: x[dropped:])
        x = torch.arange(5)
        for dropped in (0, 1, 0, 2):
            assert torch.equal(wrapped(x), x[dropped:])

    def test_whose_formula_holds_for_some_sizes_only(self) -> None:
        wrapped = wrap(
            lambda x: x[:3] if x.shape[0] > 6 else x, buckets=[16], check_padding="never"
        )
        assert wrapped(torch.arange(7)).shape == wrapped(torch.arange(9)).shape == (3,)
        with pytest.raises(ValueError, match="which has no part of the shape"):
            wrapped(torch.arange(5))  # 5 of 3

    def test_a_number_that_is_a_size_is_refused(self) -> None:
        assert "is 8 with padding and 5 without" in leak(
            lambda x: (x, x.shape[1]), torch.ones(2, 5)
        )
        assert in_time(lambda x, n: (x, n))(torch.ones(2, 5), 3)[1] == 3


class Kind(enum.Enum):
    ONE = 1


class Cache:
    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys


@pytest.mark.parametrize(
    "hide",
    [
        *(Cache, torch.Tensor.numpy, lambda x: {x}, lambda x: [{"a": x.numpy()}]),
        lambda x: (row for row in x),
    ],
)
def test_what_may_hide_memory_is_refused(hide: Any) -> None:
    with pytest.raises(TypeError, match=r"output\[1\]\S* is of type \w+, which may hold"):
        wrap(lambda x: (x, hide(x * 2)))(torch.ones(5))


@pytest.mark.parametrize(
    "value",
    [
        *(None, "text", np.float32(2), Kind.ONE, range(2), slice(2)),
        *(torch.float32, torch.strided, torch.channels_last),
    ],
    ids=str,
)
def test_what_holds_no_tensor_is_returned(value: Any) -> None:
    assert wrap(lambda x: (x, value))(torch.ones(5))[1] is value


def test_a_fast_path_of_torch_says_what_to_write() -> None:
    """nn.TransformerEncoder makes nested tensors, and asks for a bug report without data."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()

    def encode(x: torch.Tensor, padding: torch.Tensor) -> Any:
        return encoder(x, src_key_padding_mask=padding)

    options: Any = {"mask": {"padding": "padding"}}
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        with pytest.raises(ValueError, match="can't be derived") as error:
            in_time(encode, **options)(x)
        assert "say it in outputs=, here perhaps outputs={1: 't'}" in str(error.value)
        assert "issue" not in str(error.value)
        found = in_time(encode, outputs={1: "t"}, **options)(x)
        torch.testing.assert_close(found, encoder(x), rtol=1e-4, atol=1e-5)


def test_a_size_by_data_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="say it in outputs="):
        wrap(lambda x: x.nonzero())(torch.ones(5))


# ---- outputs=; B batch, t length, E experts ----


class TestDeclared:
    def test_in_the_structure_of_the_output(self) -> None:
        def model(x: torch.Tensor) -> dict[str, Any]:
            return {"half": x[:, ::2], "both": (x * 2, x.mT), "other": x[:, :1]}

        wrapped = in_time(
            model,
            outputs={"half": {1: lambda t: (t + 1) // 2}, "both": ((None, "t", None), {-1: "t"})},
        )
        x = torch.randn(3, 5, 2)
        same(wrapped(x), model(x))

    @pytest.mark.parametrize(
        ("declared", "error", "message"),
        [
            ({0: "t"}, ValueError, "outputs says that dimension 0 of output is 8 for t = 8, but"),
            ({3: "t"}, ValueError, "outputs names dimension 3 of output"),
            ({1: lambda t: 2 * t}, ValueError, "dimension 1 of output is 16 for t = 8"),
            ({1: lambda t: 8 if t == 8 else 9}, ValueError, "gives 9 for .*, expected 0 to 8"),
            ({1: "u"}, TypeError, "outputs has 'u' for dimension 1 of output, expected one of t"),
        ],
    )
    def test_what_does_not_fit_is_named(
        self, declared: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            in_time(double, outputs=declared)(torch.randn(3, 5, 2))

    def test_rows_of_a_batch_in_one_dim_are_refused(self) -> None:
        """(B, t, E) as (B * t, E): what is real is not one piece."""
        leak(lambda x: x.flatten(0, 1) * 2, torch.randn(3, 5, 2))
