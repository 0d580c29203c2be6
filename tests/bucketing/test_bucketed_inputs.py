"""bucketed(): which dims of which inputs are padded, fill values, true sizes and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.bucketed import LADDER, Counting, double
from torchguard import Buckets, bucketed


class TestInputs:
    def test_nest_and_share_names(self) -> None:
        def mixed(batch: dict[str, Any], extra: list[torch.Tensor], scale: float) -> Any:
            return batch["a"]["b"] * extra[0] * scale

        wrapped = bucketed(
            mixed,
            dims={"batch": {"a": {"b": {1: "t"}}}, "extra": [{0: "t"}, None]},
            buckets=LADDER,
        )
        batch: dict[str, Any] = {"a": {"b": torch.ones(2, 5)}, "other": "text"}
        extra = [torch.arange(5.0), torch.ones(3)]
        assert torch.equal(wrapped(batch, extra, 2.0), mixed(batch, extra, 2.0))
        assert batch["a"]["b"].shape == (2, 5)  # the caller's own is left alone

    def test_take_the_forms_of_export(self) -> None:
        dim = torch.export.Dim("t")

        def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

        x, y = torch.ones(2, 5), torch.ones(2, 5)
        forms: tuple[Any, ...] = (
            {"x": {1: dim}, "y": {1: dim}},
            {"x": (None, "t"), "y": [None, "t"]},
            ({1: "t"}, {-1: "t"}),
        )
        for dims in forms:
            assert torch.equal(bucketed(add, dims=dims, buckets=LADDER)(x, y=y), x + y)

    def test_several_axes(self, backend: Counting) -> None:
        def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x[:, None] * y

        wrapped = bucketed(
            outer,
            dims={"x": {0: "a"}, "y": {0: "b"}},
            buckets={"a": Buckets([4, 8]), "b": Buckets([4, 8])},
            compile={"backend": backend},
        )
        for a, b in ((3, 3), (3, 7), (7, 3), (5, 5), (2, 2), (5, 6)):
            x, y = torch.randn(a), torch.randn(b)
            assert torch.equal(wrapped(x, y), outer(x, y))
        assert len(backend.graphs) == 4  # one per combination
        assert wrapped.stats().hits == {(4, 4): 2, (4, 8): 1, (8, 4): 1, (8, 8): 2}

    def test_sizes_that_disagree_are_named(self) -> None:
        wrapped = bucketed(lambda x, y: x, dims={"x": {0: "t"}, "y": {1: "t"}}, buckets=LADDER)
        with pytest.raises(ValueError, match="axis 't' is 3 in x and 4 in y"):
            wrapped(torch.ones(3), torch.ones(1, 4))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dims": {"z": {0: "t"}}}, "dims names 'z'"),
            ({"fill": {"z": 1}}, "fill names 'z'"),
            ({"buckets": {"u": LADDER}}, "buckets names 'u'"),
            ({"buckets": {}}, "no buckets for 't'"),
            ({"buckets": None}, "no buckets"),
            ({"buckets": 8}, "buckets of 't' is 8, expected Buckets, a list of sizes"),
            ({"side": "up"}, "side is 'up'"),
            ({"overflow": "ignore"}, "overflow is 'ignore'"),
            ({"check_padding": "often"}, "check_padding is 'often'"),
            ({"mask": "m"}, "mask names 'm'"),
            ({"lengths": {"u": "x"}}, "names axis 'u'"),
            ({"compile": "inductor"}, "compile is 'inductor'"),
            ({"dims": {"x": {0: 3}}}, "expected the name of an axis"),
        ],
    )
    def test_a_wrong_declaration_says_so(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            bucketed(double, **{"dims": {"x": {0: "t"}}, "buckets": LADDER, **options})

    @pytest.mark.parametrize("value", [3, "text", [torch.ones(3)]])
    def test_something_else_than_declared_says_so(self, value: Any) -> None:
        with pytest.raises((TypeError, KeyError), match="x"):
            bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER)(value)

    def test_fills_are_what_the_padding_holds(self) -> None:
        seen: dict[str, torch.Tensor] = {}

        def keep(a: Any, b: Any, c: Any, d: Any) -> None:
            seen.update(a=a, b=b, c=c, d=d)

        wrapped = bucketed(
            keep,
            dims={name: {0: "t"} for name in "abcd"},
            buckets=LADDER,
            fill={"a": -100, "b": "repeat-last", "c": "arange", "d": lambda x, n: n},
            check_padding="never",
        )
        wrapped(*[torch.tensor([0, 1, 5])] * 4)
        last = {name: int(value[3]) for name, value in seen.items()}
        assert last == {"a": -100, "b": 5, "c": 3, "d": 1}

    @pytest.mark.parametrize("fill", [0, "repeat-last", "arange"])
    def test_sizes_0_and_1_run_as_any_other(self, fill: Any, backend: Counting) -> None:
        linear = nn.Linear(2, 2)

        def project(x: torch.Tensor) -> Any:
            return linear(x), x.shape[0]

        wrapped = bucketed(
            project,
            dims={"x": {0: "t"}},
            buckets=Buckets([1, 4]),
            fill={"x": fill},
            compile={"backend": backend},
        )
        for length in (0, 1, 2, 1, 0, 4):
            x = torch.randn(length, 2)
            found, expected = wrapped(x), project(x)
            torch.testing.assert_close(found, expected)
        assert len(backend.graphs) == 2

    def test_a_fill_that_the_dtype_cannot_hold_is_refused(self) -> None:
        wrapped = bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER, fill={"x": -1})
        wrapped(torch.ones(3))
        with pytest.raises(TypeError, match="does not fit"):
            wrapped(torch.ones(3, dtype=torch.uint8))

    def test_the_true_size_is_passed(self, backend: Counting) -> None:
        def mean(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            real = torch.arange(x.shape[0]) < n
            return (x * real).sum() / n

        wrapped = bucketed(
            mean, dims={"x": {0: "t"}}, buckets=LADDER, lengths="n", compile={"backend": backend}
        )
        for length in range(1, 17):
            x = torch.randn(length)
            torch.testing.assert_close(wrapped(x), x.mean())
        assert len(backend.graphs) == 3

    def test_a_true_size_that_is_written_to_is_not_spoiled_for_the_next_call(self) -> None:
        def count(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return n.add_(1).clone()

        wrapped = bucketed(
            count, dims={"x": {0: "t"}}, buckets=LADDER, lengths="n", check_padding="never"
        )
        assert [int(wrapped(torch.ones(3))) for _ in range(3)] == [4, 4, 4]

    def test_a_mask_is_made_or_extended(self) -> None:
        def masked(x: torch.Tensor, m: torch.Tensor | None = None) -> torch.Tensor:
            return x.sum(1) if m is None else (x * m).sum(1)

        wrapped = bucketed(masked, dims={"x": {1: "t"}}, buckets=LADDER, mask="m")
        x = torch.randn(2, 5)
        torch.testing.assert_close(wrapped(x), masked(x))
        torch.testing.assert_close(wrapped(x, None), masked(x))
        mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        torch.testing.assert_close(wrapped(x, mask), masked(x, mask))
        torch.testing.assert_close(wrapped(x, m=mask.bool()), masked(x, mask))

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("real", [True, True, True, False]),
            ("padding", [False, False, False, True]),
            ("additive", [0.0, 0.0, 0.0, -float("inf")]),
        ],
    )
    def test_masks_of_each_kind(self, kind: Any, expected: list[Any]) -> None:
        seen: list[Any] = []

        def keep(x: torch.Tensor, m: Any = None) -> None:
            seen.append(m.tolist())

        wrapped = bucketed(
            keep, dims={"x": {1: "t"}}, buckets=LADDER, mask={"m": kind}, check_padding="never"
        )
        wrapped(torch.ones(2, 3))
        assert seen == [[expected, expected]]

    def test_a_write_to_a_padded_input_would_be_lost_and_is_refused(self) -> None:
        def write(x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

        x = torch.zeros(3)
        with pytest.raises(ValueError, match="writes to its input x"):
            bucketed(write, dims={"x": {0: "t"}}, buckets=LADDER)(x)
        assert x.tolist() == [0, 0, 0]
