"""bucketed(): outputs are sliced to the sizes they have without padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.bucketed import LADDER, same
from torchguard import Buckets, bucketed

# Functions whose outputs have other sizes than their inputs, each padding-proof.
SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "L": lambda x: x * 2,
    "L - 1": lambda x: x[1:] - 1,
    "2 L": lambda x: x.repeat_interleave(2),
    "(L - 1) // 2": lambda x: x.unfold(0, 3, 2).sum(-1) if x.shape[0] > 2 else x[:0],
    "a number": lambda x: (x[:2] * 3, x.shape[0]),
    "dict": lambda x: {"a": x + 1, "b": [x[:-1], None, "text"]},
    "constant": lambda x: x.new_zeros(16),
}


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    values: torch.Tensor
    name: str


class TestOutputs:
    @pytest.mark.parametrize("name", SIZES)
    def test_are_cut_to_the_size_they_have_without_padding(self, name: str) -> None:
        function = SIZES[name]
        wrapped = bucketed(function, dims=({0: "t"},), buckets=LADDER)
        for length in (3, 4, 5, 7, 8, 11, 16):
            x = torch.arange(1.0, length + 1)
            same(wrapped(x), function(x))

    def test_come_back_as_what_they_were(self) -> None:
        def pair(x: torch.Tensor) -> Pair:
            return Pair(x, x + 1)

        def record(x: torch.Tensor) -> Record:
            return Record(x, "name")

        def largest(x: torch.Tensor) -> Any:
            return x.cummax(0)  # torch.return_types.cummax

        x = torch.arange(5.0)
        for function in (pair, record, largest):
            same(bucketed(function, dims={"x": {0: "t"}}, buckets=LADDER)(x), function(x))

    def test_a_model_dimension_equal_to_a_bucket_is_not_cut(self) -> None:
        linear = nn.Linear(3, 8)  # 8 features, and 8 is a bucket

        def project(x: torch.Tensor) -> Any:
            return linear(x)

        wrapped = bucketed(project, dims={"x": {0: "t"}}, buckets=LADDER)
        assert wrapped(torch.ones(8, 3)).shape == (8, 8)
        assert wrapped(torch.ones(5, 3)).shape == (5, 8)

    def test_of_a_size_that_depends_on_data_are_an_error_that_says_what_to_write(self) -> None:
        def found(x: torch.Tensor) -> torch.Tensor:
            return x.nonzero()

        wrapped = bucketed(found, dims={"x": {0: "t"}}, buckets=LADDER)
        with pytest.raises(ValueError, match=r"Say it in outputs="):
            wrapped(torch.ones(5))

    def test_of_a_size_that_hangs_on_another_argument(self) -> None:
        def half(x: torch.Tensor, up: bool) -> torch.Tensor:
            return x[: (x.shape[0] + up) // 2]

        wrapped = bucketed(half, dims={"x": {0: "t"}}, buckets=LADDER)
        x = torch.arange(5)  # both give 4 at the size of the bucket
        for up in (True, False, True):
            assert torch.equal(wrapped(x, up), half(x, up))

    def test_of_a_size_that_depends_on_what_dims_does_not_name(self) -> None:
        def by_tensor(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return x[: (x.shape[0] + other.shape[0]) // 2]

        def by_part(x: torch.Tensor, other: dict[str, bool]) -> torch.Tensor:
            return x[: (x.shape[0] + other["up"]) // 2]

        x = torch.arange(5)  # both give 4 at the size of the bucket
        one = bucketed(by_tensor, dims={"x": {0: "t"}}, buckets=LADDER)
        other = bucketed(by_part, dims={"x": {0: "t"}}, buckets=LADDER)
        same_container = bucketed(
            lambda batch: by_part(batch["x"], batch), dims=({"x": {0: "t"}},), buckets=LADDER
        )
        for up in (0, 1, 0):
            length = (5 + up) // 2
            assert one(x, torch.ones(up)).shape == (length,)
            assert other(x, {"up": bool(up)}).shape == (length,)
            assert same_container({"x": x, "up": bool(up)}).shape == (length,)

    def test_of_a_size_that_hangs_on_something_outside(self) -> None:
        dropped = 0
        wrapped = bucketed(lambda x: x[dropped:], dims=({0: "t"},), buckets=LADDER)
        x = torch.arange(5)
        for dropped in (0, 1, 0, 2):
            assert torch.equal(wrapped(x), x[dropped:])

    def test_of_size_1_that_lose_a_dim_are_no_guess(self) -> None:
        wrapped = bucketed(
            lambda x: x.squeeze(0), dims=({0: "t"},), buckets=LADDER, check_padding="never"
        )
        assert wrapped(torch.ones(2, 3)).shape == (2, 3)
        with pytest.raises(ValueError, match="which has no part of the shape"):
            wrapped(torch.ones(1, 3))

    def test_whose_formula_holds_for_some_sizes_only(self) -> None:
        def capped(x: torch.Tensor) -> torch.Tensor:
            return x[:3] if x.shape[0] > 6 else x

        wrapped = bucketed(
            capped, dims={"x": {0: "t"}}, buckets=Buckets([16]), check_padding="never"
        )
        assert wrapped(torch.arange(7)).shape == wrapped(torch.arange(9)).shape == (3,)
        with pytest.raises(ValueError, match="which has no part of the shape"):
            wrapped(torch.arange(5))  # 5 of 3

    def test_of_an_empty_input_that_the_function_does_not_take(self) -> None:
        wrapped = bucketed(lambda x: x + 0 * x.amax(0), dims=({0: "t"},), buckets=LADDER)
        assert wrapped(torch.ones(0)).shape == (0,)

    def test_can_be_declared(self) -> None:
        def halves(x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"half": x[::2], "same": x}

        wrapped = bucketed(
            halves,
            dims={"x": {0: "t"}},
            buckets=LADDER,
            outputs={"half": {0: lambda t: (t + 1) // 2}, "same": {0: "t"}},
        )
        x = torch.arange(7)
        same(wrapped(x), halves(x))

    def test_a_wrong_declaration_is_an_error(self) -> None:
        wrapped = bucketed(lambda x: x[1:], dims=({0: "t"},), buckets=LADDER, outputs={0: "t"})
        with pytest.raises(ValueError, match="outputs says that dimension 0 of output is 8"):
            wrapped(torch.ones(5))

    def test_that_hide_tensors_are_refused(self) -> None:
        class Cache:
            def __init__(self, keys: torch.Tensor) -> None:
                self.keys = keys

        wrapped = bucketed(lambda x: (x, Cache(x)), dims=({0: "t"},), buckets=LADDER)
        with pytest.raises(TypeError, match=r"output\[1\] is of type Cache, which holds tensors"):
            wrapped(torch.ones(5))

    @settings(max_examples=30)
    @given(
        length=st.integers(0, 16),
        side=st.sampled_from(["left", "right"]),
        batch=st.integers(1, 3),
    )
    def test_equal_those_without_padding(self, length: int, side: Any, batch: int) -> None:
        wrapped = bucketed(
            lambda x: (x.relu(), x.sum(0)),
            dims=({1: "t"},),
            buckets=LADDER,
            side=side,
        )
        x = torch.randn(batch, length)
        found = wrapped(x)
        assert torch.equal(found[0], x.relu())
        torch.testing.assert_close(found[1], x.sum(0))
