"""bucketed(): which dims of which inputs are padded, fill values, true sizes and masks."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from torch import nn

from support.bucketed import Counting, wrap


class Name(str, enum.Enum):
    TIME = "t"


class TestInputs:
    def test_nest_and_share_names(self) -> None:
        def mixed(batch: dict[str, Any], extra: list[torch.Tensor], scale: float) -> Any:
            return batch["a"]["b"] * extra[0] * scale

        wrapped = wrap(mixed, dims={"batch": {"a": {"b": {1: "t"}}}, "extra": [{0: "t"}, None]})
        batch: dict[str, Any] = {"a": {"b": torch.ones(2, 5)}, "other": "text"}
        extra = [torch.arange(5.0), torch.ones(3)]
        assert torch.equal(wrapped(batch, extra, 2.0), mixed(batch, extra, 2.0))
        assert batch["a"]["b"].shape == (2, 5)  # the caller's own is left alone

    def test_take_the_forms_of_export(self) -> None:
        dim = torch.export.Dim("t")
        x, y = torch.ones(2, 5), torch.ones(2, 5)
        forms: tuple[Any, ...] = (
            {"x": {1: dim}, "y": {1: dim}},
            ({1: "t"}, {-1: "t"}),
            [{1: Name.TIME}, {1: Name.TIME}],
        )
        for dims in forms:
            assert torch.equal(wrap(lambda x, y: x + y, dims=dims)(x, y=y), x + y)

    def test_several_axes(self, backend: Counting) -> None:
        def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x[:, None] * y

        wrapped = wrap(
            outer,
            dims={"x": {0: "a"}, "y": {0: "b"}},
            buckets={"a": [4, 8], "b": [4, 8]},
            compile={"backend": backend},
        )
        for a, b in ((3, 3), (3, 7), (7, 3), (5, 5), (2, 2), (5, 6)):
            x, y = torch.randn(a), torch.randn(b)
            assert torch.equal(wrapped(x, y), outer(x, y))
        assert len(backend.graphs) == 4  # one per combination
        assert wrapped.stats().hits == {(4, 4): 2, (4, 8): 1, (8, 4): 1, (8, 8): 2}

    def test_fills_are_what_the_padding_holds(self) -> None:
        seen: list[Any] = []

        wrapped = wrap(
            lambda a, b, c: seen.extend((a, b, c)),
            dims={name: {0: "t"} for name in "abc"},
            fill={"a": -100, "b": "repeat-last", "c": 3},
            check_padding="never",
        )
        wrapped(*[torch.tensor([0, 1, 5])] * 3)
        assert [each.tolist() for each in seen] == [[0, 1, 5, last] for last in (-100, 5, 3)]

    @pytest.mark.parametrize("fill", [0, "repeat-last"])
    def test_sizes_0_and_1_run_as_any_other(self, fill: Any, backend: Counting) -> None:
        linear = nn.Linear(2, 2)

        def project(x: torch.Tensor) -> Any:
            return (linear(x),)

        wrapped = wrap(project, buckets=[1, 4], fill={"x": fill}, compile={"backend": backend})
        for length in (0, 1, 2, 1, 0, 4):
            x = torch.randn(length, 2)
            torch.testing.assert_close(wrapped(x), project(x))
        assert len(backend.graphs) == 2

    def test_a_write_to_a_padded_input_would_be_lost_and_is_refused(self) -> None:
        x = torch.zeros(3)
        with pytest.raises(ValueError, match="writes to its input x"):
            wrap(lambda x: x.add_(1))(x)
        assert x.tolist() == [0, 0, 0]


class TestTrueSizes:
    def test_are_passed(self, backend: Counting) -> None:
        def mean(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            real = torch.arange(x.shape[0]) < n
            return (x * real).sum() / n

        wrapped = wrap(mean, lengths="n", compile={"backend": backend})
        for length in range(1, 17):
            x = torch.randn(length)
            torch.testing.assert_close(wrapped(x), x.mean())
        assert len(backend.graphs) == 3

    def test_that_are_written_to_are_not_spoiled_for_the_next_call(self) -> None:
        wrapped = wrap(lambda x, n: n.add_(1).clone(), lengths="n", check_padding="never")
        assert [int(wrapped(torch.ones(3))) for _ in range(3)] == [4, 4, 4]


class TestMasks:
    def test_are_made_or_extended(self) -> None:
        def masked(x: torch.Tensor, m: torch.Tensor | None = None) -> torch.Tensor:
            return x.sum(1) if m is None else (x * m).sum(1)

        wrapped = wrap(masked, dims={"x": {1: "t"}}, mask="m")
        x = torch.randn(2, 5)
        torch.testing.assert_close(wrapped(x), masked(x))
        torch.testing.assert_close(wrapped(x, None), masked(x))
        mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        torch.testing.assert_close(wrapped(x, mask), masked(x, mask))
        torch.testing.assert_close(wrapped(x, m=mask.bool()), masked(x, mask))
