"""bucketed(): pads, runs, cuts back, and what reaches the compiler is static."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import importlib
import inspect
import json
import pickle
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from torchguard import Buckets, PaddingLeakError, RecompileError, bucketed, no_recompile

perturbed = importlib.import_module("torchguard.equivalence.perturb").perturbed

LADDER = Buckets([4, 8, 16])


class Counting:
    """A backend that runs graphs as they are and keeps the shapes of their inputs."""

    def __init__(self) -> None:
        self.graphs: list[list[tuple[Any, ...]]] = []
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        assert not any(isinstance(value, torch.SymInt) for value in inputs)
        shapes = [tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor)]
        assert not any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)
        self.graphs.append(shapes)

        def run(*given: Any) -> Any:
            self.calls += 1
            return graph.forward(*given)

        return run


@pytest.fixture
def backend() -> Counting:
    torch.compiler.reset()
    return Counting()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class TestWhatReachesTheCompiler:
    @pytest.mark.parametrize("count", [1, 20, 64])
    def test_is_one_static_graph_per_bucket(self, count: int, backend: Counting) -> None:
        buckets = Buckets.multiples_of(4, 4 * count)
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=buckets, compile={"backend": backend}
        )
        for length in range(1, 4 * count + 1):
            x = torch.arange(length)
            assert torch.equal(wrapped(x), 2 * x)
        assert sorted(backend.graphs) == [[(size,)] for size in buckets]
        assert backend.calls == wrapped.stats().calls == 4 * count
        assert wrapped.stats().graphs == count

    def test_would_be_symbolic_without_it(self) -> None:
        torch.compiler.reset()
        symbolic = []

        def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            symbolic.append(any(isinstance(value, torch.SymInt) for value in inputs))
            return graph.forward

        compiled = torch.compile(lambda x: x * 2, backend=note)
        for bucket in LADDER:
            compiled(torch.ones(bucket))
        assert any(symbolic)

    def test_is_static_around_what_is_compiled_already(self, backend: Counting) -> None:
        compiled = torch.compile(double, backend=backend)
        wrapped = bucketed(compiled, dims={"x": {0: "t"}}, buckets=Buckets.multiples_of(4, 80))
        for length in range(1, 81):
            wrapped(torch.ones(length))
        assert len(backend.graphs) == 20

    def test_two_wrappers_of_one_function_share_no_limit(self, backend: Counting) -> None:
        for _ in range(3):
            wrapped = bucketed(
                double,
                dims={"x": {0: "t"}},
                buckets=Buckets.multiples_of(4, 24),
                compile={"backend": backend},
            )
            for length in range(1, 25):
                wrapped(torch.ones(length))
        assert len(backend.graphs) == 18
        assert backend.calls == 72

    def test_is_static_behind_a_graph_break(self, backend: Counting) -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        def outer(x: torch.Tensor) -> torch.Tensor:
            return inner(x) + 1

        wrapped = bucketed(
            outer,
            dims={"x": {0: "t"}},
            buckets=Buckets.multiples_of(4, 48),
            compile={"backend": backend},
        )
        for length in range(1, 49):
            assert torch.equal(wrapped(torch.ones(length)), torch.full((length,), 5.0))
        calls = backend.calls
        wrapped(torch.ones(48))
        per_call = backend.calls - calls
        assert per_call >= 2
        assert calls == 48 * per_call

    def test_is_static_where_another_dim_changes(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {1: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        for batch in range(2, 14):  # more than the limit of 8
            wrapped(torch.ones(batch, 3))
        assert backend.calls == len(backend.graphs) == 12

    def test_is_static_behind_a_graph_break_in_another_mode_too(self, backend: Counting) -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            torch._dynamo.graph_break()
            return y * 2

        wrapped = bucketed(
            lambda x: inner(x) + 1,
            dims=({0: "t"},),
            buckets=Buckets.multiples_of(4, 48),
            compile={"backend": backend},
        )
        lengths = range(4, 49, 4)
        for length in lengths:
            wrapped(torch.ones(length))
        calls = backend.calls
        with torch.no_grad():  # all buckets share the code of inner, and with it the limit of 8
            for length in lengths:
                wrapped(torch.ones(length))
        assert backend.calls == 2 * calls

    @pytest.mark.parametrize(
        "others", [list(range(20)), [torch.ones(size + 2) for size in range(20)]]
    )
    def test_never_runs_uncompiled_when_something_else_differs(
        self, others: list[Any], backend: Counting
    ) -> None:
        def scale(x: torch.Tensor, other: Any) -> torch.Tensor:
            return x * (other if isinstance(other, int) else other.sum())

        wrapped = bucketed(
            scale, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        x = torch.randn(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for other in others:
                torch.testing.assert_close(wrapped(x, other), scale(x, other))
        said = [str(each.message) for each in caught if each.filename == __file__]
        assert len(said) == 1
        assert "compiled 9 times for t: 3 -> 4 in x, because other differs" in said[0]
        assert backend.calls == len(backend.graphs) == wrapped.stats().graphs == 20

    def test_dynamic_compilation_is_refused(self) -> None:
        with pytest.raises(ValueError, match="dynamic"):
            bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"dynamic": True})
        compiled = torch.compile(double, dynamic=True, backend="eager")
        with pytest.raises(ValueError, match="dynamic=True"):
            bucketed(compiled, dims={"x": {0: "t"}}, buckets=LADDER)

    def test_compiling_twice_is_refused(self) -> None:
        with pytest.raises(ValueError, match="compiled already"):
            bucketed(
                torch.compile(double, backend="eager"),
                dims={"x": {0: "t"}},
                buckets=LADDER,
                compile=True,
            )

    def test_a_call_inside_a_compiled_function_breaks_its_graph(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )

        @torch.compile(backend="eager", dynamic=False)
        def outer(x: torch.Tensor) -> Any:
            return wrapped(x + 1) + 1

        assert torch.equal(outer(torch.ones(3)), torch.full((3,), 5.0))
        assert backend.graphs == [[(4,)]]


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


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif dataclasses.is_dataclass(expected):
        for each in dataclasses.fields(expected):
            same(getattr(found, each.name), getattr(expected, each.name))
    else:
        assert found == expected


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

    def test_of_a_size_that_hangs_on_something_nobody_named(self) -> None:
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
        with pytest.raises(TypeError, match=r"output\[1\] is a Cache, which holds tensors"):
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


class TestOverflow:
    def test_is_an_error_that_names_axis_size_and_argument(self) -> None:
        wrapped = bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER)
        with pytest.raises(ValueError, match="axis 't' is 17 in x, but the largest bucket is 16"):
            wrapped(torch.ones(17))

    @pytest.mark.parametrize("overflow", ["eager", "grow", "dynamic"])
    def test_or_runs_all_the_same(self, overflow: Any) -> None:
        torch.compiler.reset()
        graphs = []

        def note(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        wrapped = bucketed(
            double,
            dims={"x": {0: "t"}},
            buckets=LADDER,
            overflow=overflow,
            compile={"backend": note},
        )
        for length in (17, 20, 31, 3):
            x = torch.arange(length)
            assert torch.equal(wrapped(x), 2 * x)
        assert len(graphs) == {"eager": 1, "grow": 2, "dynamic": 2}[overflow]
        stats = wrapped.stats()
        assert stats.overflowed == (0 if overflow == "grow" else 3)
        assert stats.hits == ({(4,): 1, (32,): 3} if overflow == "grow" else {(4,): 1})

    @pytest.mark.parametrize("overflow", ["eager", "grow", "dynamic"])
    def test_makes_the_masks_and_lengths_that_the_function_insists_on(self, overflow: Any) -> None:
        def total(x: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return (x * m).sum(1) / n

        wrapped = bucketed(
            total,
            dims={"x": {1: "t"}},
            buckets=LADDER,
            mask="m",
            lengths="n",
            overflow=overflow,
            compile={"backend": "eager"},
        )
        for length in (5, 20, 21):
            x = torch.randn(2, length)
            torch.testing.assert_close(wrapped(x), x.mean(1))


class Net(nn.Module):
    steps: torch.Tensor
    name: str

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.steps += 1
        return self.dropout(self.linear(x))

    def other(self) -> str:
        return "other"


def wrapped_net(**options: Any) -> tuple[Net, Any]:
    net = Net()
    return net, bucketed(net, dims={"x": {0: "t"}}, buckets=LADDER, **options)


class TestModules:
    def test_share_everything_with_what_they_wrap(self) -> None:
        net, wrapped = wrapped_net()
        assert isinstance(wrapped, Net)
        assert wrapped.linear is net.linear
        assert wrapped.other() == "other"
        assert list(wrapped.state_dict()) == list(net.state_dict())
        wrapped.eval()
        assert not net.training
        wrapped.to(torch.float64)
        assert net.linear.weight.dtype == torch.float64
        wrapped.load_state_dict(net.state_dict())
        wrapped.name = "new"
        assert net.name == "new"
        with pytest.raises(AttributeError):
            _ = wrapped.missing

    def test_keep_the_signature_of_forward(self) -> None:
        net, wrapped = wrapped_net()
        assert inspect.signature(wrapped.forward) == inspect.signature(net.forward)

    def test_compiled_already_take_sizes_above_the_buckets(self, backend: Counting) -> None:
        net = nn.Linear(3, 3)
        seen = []
        net.register_forward_hook(lambda *_: seen.append(1))
        wrapped = bucketed(
            torch.compile(net, backend="eager"),
            dims={"input": {0: "t"}},
            buckets=LADDER,
            overflow="dynamic",
        )
        for length in (17, 20, 30):
            x = torch.randn(length, 3)
            torch.testing.assert_close(wrapped(x), functional.linear(x, net.weight, net.bias))
        assert len(seen) == 3
        assert wrapped.stats().overflowed == 3

    def test_hooks_see_real_sizes(self) -> None:
        net, wrapped = wrapped_net()
        seen = []
        net.register_forward_hook(lambda _, args, out: seen.append((args[0].shape, out.shape)))
        wrapped(torch.ones(5, 3))
        assert seen == [((5, 3), (5, 3))]

    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_can_be_copied(self, how: str) -> None:
        net, wrapped = wrapped_net()
        wrapped.eval()
        copied = (
            copy.deepcopy(wrapped) if how == "deepcopy" else pickle.loads(pickle.dumps(wrapped))  # noqa: S301
        )
        x = torch.ones(5, 3)
        assert torch.equal(copied(x), wrapped(x))
        assert copied.linear.weight is not net.linear.weight
        assert copied.stats().calls == 1

    def test_compiled_already(self, backend: Counting) -> None:
        net = Net().eval()
        compiled = torch.compile(net, backend=backend)
        wrapped = bucketed(compiled, dims={"x": {0: "t"}}, buckets=Buckets.multiples_of(2, 24))
        for length in range(1, 25):
            x = torch.randn(length, 3)
            torch.testing.assert_close(wrapped(x), net(x))
        assert len(backend.graphs) == 12
        copied = copy.deepcopy(wrapped)
        torch.testing.assert_close(copied(x), wrapped(x))
        with pytest.raises(TypeError, match="can't be pickled"):
            pickle.dumps(wrapped)

    def test_train_and_eval_are_checked_on_their_own(self) -> None:
        norm = nn.BatchNorm1d(3).eval()
        wrapped = bucketed(norm, dims={"input": {2: "t"}}, buckets=LADDER)
        wrapped(torch.randn(2, 3, 5))
        wrapped.train()
        with pytest.raises(PaddingLeakError, match="BatchNorm in training mode"):
            wrapped(torch.randn(2, 3, 5))

    def test_of_a_module_compiled_in_place_each_bucket_is_compiled_so(self) -> None:
        net = Net().eval()
        net.compile(backend="eager", fullgraph=True)
        wrapped: Any = bucketed(net, dims={"x": {0: "t"}}, buckets=LADDER)
        for length in (5, 6, 9):
            torch.testing.assert_close(wrapped(torch.ones(length, 3)), net(torch.ones(length, 3)))
        assert wrapped.stats().graphs == len(wrapped.stats().hits)
        with pytest.raises(ValueError, match="compiled already"):
            bucketed(net, dims={"x": {0: "t"}}, buckets=LADDER, compile=True)

    def test_are_freed(self) -> None:
        net, wrapped = wrapped_net()
        wrapped(torch.ones(5, 3))
        reference = weakref.ref(net)
        del net, wrapped
        gc.collect()
        assert reference() is None


class TestMethods:
    def test_each_instance_has_graphs_of_its_own(self, backend: Counting) -> None:
        class Scale:
            def __init__(self, factor: float) -> None:
                self.factor = factor

            @bucketed(
                dims={"x": {0: "t"}},
                buckets=Buckets.multiples_of(2, 12),
                compile={"backend": backend},
            )
            def run(self, x: torch.Tensor) -> torch.Tensor:
                """Scale."""
                return x * self.factor

        for factor in (2.0, 3.0, 4.0):
            scale = Scale(factor)
            for length in range(1, 13):
                assert torch.equal(scale.run(torch.ones(length)), torch.full((length,), factor))
            assert scale.run.stats().calls == 12
        assert len(backend.graphs) == 18
        assert Scale.run.__doc__ == "Scale."
        reference = weakref.ref(scale)
        del scale
        torch.compiler.reset()
        gc.collect()
        assert reference() is None

    def test_a_function_keeps_its_name_and_can_be_pickled(self) -> None:
        assert at_module_level.__name__ == "at_module_level"
        assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level  # noqa: S301


@bucketed(dims={"x": {0: "t"}}, buckets=LADDER)
def at_module_level(x: torch.Tensor) -> torch.Tensor:
    return x + 1


class TestVerification:
    def test_gradients_are_compared(self) -> None:
        class Leaky(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x * 1

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> Any:
                return gradient, ctx.saved_tensors[0].mean()

        weight = torch.ones((), requires_grad=True)
        apply: Any = Leaky.apply
        wrapped = bucketed(lambda x: apply(x, weight), dims=({0: "t"},), buckets=LADDER)
        x = torch.randn(5)
        with torch.no_grad():
            wrapped(x)
        with pytest.raises(PaddingLeakError, match="the gradient of parameter 0"):
            wrapped(x)

    def test_gradients_of_inputs_are_compared_too(self) -> None:
        class Leaky(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> Any:
                return gradient / gradient.shape[0]

        wrapped = bucketed(
            Leaky.apply,
            dims=({0: "t"},),
            buckets=LADDER,
        )
        with pytest.raises(PaddingLeakError, match="the gradient of argument 0"):
            wrapped(torch.randn(5, requires_grad=True))

    def test_another_filler_finds_what_zeros_hide(self) -> None:
        def largest(x: torch.Tensor) -> torch.Tensor:
            return x.amax(0)

        x = torch.tensor([1.0, -2.0, 3.0])
        with pytest.raises(PaddingLeakError, match="with other data, where x is negative"):
            bucketed(largest, dims={"x": {0: "t"}}, buckets=LADDER)(x)
        said = bucketed(largest, dims={"x": {0: "t"}}, buckets=LADDER, fill={"x": 0})
        torch.testing.assert_close(said(x), torch.tensor(3.0))

    def test_leaves_everything_as_it_was(self) -> None:
        net, wrapped = wrapped_net()
        net.linear.weight.grad = torch.ones(3, 3)
        x = torch.randn(5, 3, requires_grad=True)
        state = {name: value.clone() for name, value in net.state_dict().items()}
        versions = {name: value._version for name, value in net.state_dict().items()}
        random_state = torch.get_rng_state()
        wrapped.verify(x)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert {name: value._version for name, value in net.state_dict().items()} == versions
        for name, value in net.state_dict().items():
            assert torch.equal(value, state[name]), name
        assert torch.equal(net.linear.weight.grad, torch.ones(3, 3))
        assert net.linear.bias.grad is None
        assert x.grad is None
        assert wrapped.stats().calls == 0

    def test_random_numbers_of_python_and_numpy_are_held_fixed_too(self) -> None:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * random.random() * float(np.random.rand())  # noqa: S311, NPY002

        wrapped = bucketed(scaled, dims={"x": {0: "t"}}, buckets=LADDER)
        before = random.getstate(), np.random.get_state(legacy=True)  # noqa: NPY002
        wrapped.verify(torch.ones(3))
        assert random.getstate() == before[0]
        with np.printoptions(threshold=1000):
            assert str(np.random.get_state(legacy=True)) == str(before[1])  # noqa: NPY002

    @pytest.mark.parametrize("how", ["closure", "argument", "attribute", "list"])
    def test_training_is_checked_on_its_own_wherever_the_module_is(self, how: str) -> None:
        norm = nn.BatchNorm1d(3).eval()
        options: dict[str, Any] = {"buckets": LADDER}

        class Trainer:
            def __init__(self) -> None:
                self.model = norm

            @bucketed(dims={"x": {2: "t"}}, **options)  # type: ignore[untyped-decorator]
            def loss(self, x: torch.Tensor) -> Any:
                return self.model(x)

        models = [norm]
        calls: dict[str, Callable[[torch.Tensor], Any]] = {
            "closure": bucketed(lambda x: 1 * norm(x), dims=({2: "t"},), **options),
            "attribute": Trainer().loss,
            "list": bucketed(lambda x: 1 * models[0](x), dims=({2: "t"},), **options),
        }
        applied = bucketed(lambda model, x: 1 * model(x), dims=(None, {2: "t"}), **options)
        calls["argument"] = lambda x: applied(norm, x)
        x = torch.randn(2, 3, 5)
        torch.testing.assert_close(calls[how](x), norm(x))
        norm.train()
        with pytest.raises(PaddingLeakError, match="BatchNorm in training mode"):
            calls[how](x)

    def test_a_leak_is_found_again_and_counts_as_no_call(self, backend: Counting) -> None:
        wrapped = bucketed(
            lambda x: x.mean(), dims=({0: "t"},), buckets=LADDER, compile={"backend": backend}
        )
        for _ in range(2):
            with pytest.raises(PaddingLeakError):
                wrapped(torch.randn(3))
        assert (wrapped.stats().calls, backend.graphs) == (0, [])

    def test_dropout_is_no_leak(self) -> None:
        _, wrapped = wrapped_net()
        for length in (3, 5, 11):
            wrapped(torch.randn(length, 3)).sum().backward()

        def attend(x: torch.Tensor) -> torch.Tensor:
            """x (B, T, D): which elements are dropped depends on T."""
            dropped = functional.dropout(x, 0.5) * torch.rand_like(x)
            return dropped * functional.scaled_dot_product_attention(
                x[:, :1], x[:, :1], x[:, :1], dropout_p=0.5
            )

        attending = bucketed(attend, dims={"x": {1: "t"}}, buckets=LADDER)
        for length in (3, 5, 11):
            attending(torch.randn(2, length, 3))

    def test_leaves_what_the_function_notes_and_its_gradients(self) -> None:
        class Noting(nn.Linear):
            seen = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.seen += 1
                self.last = x
                out = super().forward(x)
                out.detach().requires_grad_().square().sum().backward()
                functional.linear(x, self.weight).sum().backward()
                return out.detach()

        net = Noting(3, 3)
        wrapped: Any = bucketed(net, dims={"x": {0: "t"}}, buckets=LADDER)
        wrapped.verify(torch.randn(5, 3))
        assert net.seen == 0
        assert not hasattr(net, "last")
        assert net.weight.grad is None

    def test_a_jump_within_the_rounding_error_is_no_leak(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sum of three is 1 + 2**-23; padded to four, its halves are others and give 1."""
        x = torch.tensor([1.0, 2.0**-24, 2.0**-24])

        class Jumping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return jumping(x, self.weight)

        def jumping(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            half = x.shape[0] // 2
            scaled = weight * (x[:half].sum() + x[half:].sum())
            return torch.relu(scaled - 1) + scaled  # the gradient of weight is 1, or 2

        module, held = Jumping(), torch.ones((), requires_grad=True)
        expanded = torch.ones(1).expand(3).requires_grad_()  # nobody can write to it in place
        module.weight.grad = torch.ones(())
        ways: list[tuple[Any, tuple[Any, ...]]] = [
            (module, (x,)),
            (lambda x: jumping(x, held) + expanded.sum() * 0, (x,)),
            (jumping, (x, torch.ones((), requires_grad=True))),
        ]
        before = [(t, t.detach().clone(), t._version) for t in (module.weight, held)]
        padded = functools.partial(bucketed, dims={"x": {0: "t"}}, buckets=LADDER, fill={"x": 0.0})
        for function, call in ways:
            padded(function).verify(*call)
        for tensor, values, version in before:
            assert torch.equal(tensor, values)
            assert tensor._version == version
        assert torch.equal(module.weight.grad, torch.ones(()))
        assert held.grad is None
        # What other processes may be writing is not touched.
        module.weight.detach().share_memory_()
        with pytest.raises(PaddingLeakError, match="gradient of weight"):
            padded(module).verify(x)
        leak_check = importlib.import_module("torchguard.bucketing.decorator.leak_check")
        monkeypatch.setattr(leak_check, "_TURNS", 1)
        for function, call in ways[1:]:
            with pytest.raises(PaddingLeakError):
                padded(function).verify(*call)

    def test_weights_in_the_same_memory_are_as_before(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.flat = nn.Parameter(torch.ones(6))
                self.first = nn.Parameter(self.flat.detach()[:3])
                self.again = nn.Parameter(self.flat.detach())

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (x * self.first).mean() + self.flat.sum() + self.again.sum()

        net = Tied()
        saved = (net.flat * net.again.detach()).sum()
        versions = [each._version for each in net.parameters()]
        wrapped: Any = bucketed(net, dims={"x": {0: "t"}}, buckets=LADDER)
        with pytest.raises(PaddingLeakError):
            wrapped.verify(torch.randn(5, 3))
        assert torch.equal(net.flat, torch.ones(6))
        assert [each._version for each in net.parameters()] == versions
        saved.backward()  # which needs the weights as they were

    def test_a_leak_of_the_first_run_alone_is_one_where_there_are_no_weights(self) -> None:
        seen = []

        def once(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[0])
            return x.sum() + (1 if len(seen) == 1 else 0)

        with pytest.raises(PaddingLeakError):
            bucketed(once, dims={"x": {0: "t"}}, buckets=LADDER, fill={"x": 0.0}).verify(
                torch.ones(3)
            )

    def test_a_turn_that_fails_excuses_nothing(self) -> None:
        linear, runs = nn.Linear(3, 3), []

        def fails_later(x: torch.Tensor) -> torch.Tensor:
            runs.append(x)
            if len(runs) > 4:
                raise ValueError("the fifth run")
            total: torch.Tensor = linear(x).mean()
            return total

        with pytest.raises(PaddingLeakError):
            bucketed(fails_later, dims={"x": {0: "t"}}, buckets=LADDER).verify(torch.randn(5, 3))
        assert len(runs) > 4

    def test_unusual_weights_keep_their_digits_and_say_so(self) -> None:
        unusual = [
            nn.Parameter(torch.ones(2, device="meta")),
            nn.Parameter(torch.ones(2).share_memory_()),
            nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
            torch.ones(1).expand(2),
            torch.ones(2, dtype=torch.complex64).conj(),
            torch.zeros(2),
        ]
        with torch.inference_mode():
            unusual.append(torch.ones(2))
        before = [tensor.detach().clone() for tensor in unusual]
        with perturbed(unusual, 1) as changed:
            assert not changed
        for tensor, values in zip(unusual, before, strict=True):
            assert tensor.is_meta or torch.equal(tensor, values)

    def test_other_last_digits_are_seen_under_autocast_too(self) -> None:
        linear = nn.Linear(64, 64)
        x = torch.randn(2, 64)
        with torch.autocast("cpu", torch.bfloat16):
            before = linear(x)  # autocast keeps the weight as it has cast it
            with perturbed(linear.parameters(), 1) as changed:
                assert changed
                assert not torch.equal(linear(x), before)
            assert torch.equal(linear(x), before)

    def test_happens_once_per_bucket(self) -> None:
        runs = []

        def note(x: torch.Tensor) -> torch.Tensor:
            runs.append(tuple(x.shape))
            return x + 1

        wrapped = bucketed(note, dims={"x": {0: "t"}}, buckets=LADDER, outputs={0: "t"})
        for length in (2, 3, 2, 5, 6):
            wrapped(torch.ones(length))
        real = [shape for shape in runs if shape[0] not in LADDER.sizes]
        assert real == [(2,), (2,), (5,)]  # (2,) with negative data, too

    def test_checks_another_switch_on_its_own(self) -> None:
        def maybe(x: torch.Tensor, how: str) -> torch.Tensor:
            return x - x.mean() if how == "centred" else x

        wrapped = bucketed(maybe, dims={"x": {0: "t"}}, buckets=LADDER)
        x = torch.randn(3)
        assert torch.equal(wrapped(x, "plain"), x)
        with pytest.raises(PaddingLeakError):
            wrapped(x, how="centred")

    def test_never_and_always(self) -> None:
        def mean(x: torch.Tensor) -> torch.Tensor:
            return x.mean()

        x = torch.ones(3)
        never = bucketed(mean, dims={"x": {0: "t"}}, buckets=LADDER, check_padding="never")
        assert float(never(x)) == 0.75
        with pytest.raises(PaddingLeakError):
            never.verify(x)

        def sometimes(x: torch.Tensor) -> torch.Tensor:
            return x * 1 if float(x[0].abs()) > 0.5 else x - x.mean()

        always = bucketed(
            sometimes,
            dims={"x": {0: "t"}},
            buckets=LADDER,
            check_padding="always",
            outputs={0: "t"},
        )
        always(torch.tensor([1.0, 2.0, 3.0]))
        with pytest.raises(PaddingLeakError):
            always(torch.tensor([0.25, 2.0, 3.0]))


class TestWays:
    def test_grad_modes_and_inference(self, backend: Counting) -> None:
        linear = nn.Linear(3, 3)
        wrapped = bucketed(
            linear, dims={"input": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        x = torch.randn(5, 3)
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                found, expected = wrapped(x), linear(x)
            torch.testing.assert_close(found, expected)
            assert found.requires_grad == expected.requires_grad
            assert found.is_inference() == expected.is_inference()

    def test_autocast(self) -> None:
        linear = nn.Linear(3, 3)
        wrapped = bucketed(
            linear, dims={"input": {0: "t"}}, buckets=LADDER, compile={"backend": "aot_eager"}
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = wrapped(torch.ones(5, 3)), linear(torch.ones(5, 3))
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected)

    def test_activation_checkpointing(self) -> None:
        linear = nn.Linear(3, 3)

        def checkpointed(x: torch.Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=False).relu()

        wrapped = bucketed(
            checkpointed,
            dims={"x": {0: "t"}},
            buckets=LADDER,
            compile={"backend": "aot_eager", "fullgraph": True},
        )
        x = torch.randn(5, 3)
        wrapped(x).sum().backward()
        found = linear.weight.grad
        linear.weight.grad = None
        checkpointed(x).sum().backward()
        torch.testing.assert_close(found, linear.weight.grad)

    def test_torch_func(self) -> None:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return x.square().sum()

        inside = bucketed(
            torch.func.grad(loss),
            dims=({0: "t"},),
            buckets=LADDER,
            compile={"backend": "eager"},
        )
        x = torch.randn(5)
        torch.testing.assert_close(inside(x), 2 * x)
        outside = bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER)
        torch.testing.assert_close(torch.func.grad(lambda y: outside(y).sum())(x), 2 * x / x)
        torch.testing.assert_close(torch.func.vmap(outside)(torch.ones(2, 5)), 2 * torch.ones(2, 5))

    @pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
    def test_torch_func_around_what_is_compiled(self, compiler: str) -> None:
        # Plain torch runs it uncompiled there, and with backend="eager" fails for what is no leaf.
        def wave(x: torch.Tensor) -> torch.Tensor:
            return x.sin() * x

        wrapped = bucketed(
            wave, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": compiler}
        )
        x = torch.randn(5)
        for warm in (False, True):
            if warm:
                wrapped(x)
            for transformed in (
                lambda f: torch.func.grad(lambda y: f(y).sum())(x),
                lambda f: torch.func.vmap(f)(torch.stack([x, 2 * x])),
                lambda f: torch.func.jvp(f, (x,), (x,)),
                lambda f: torch.func.jacrev(f)(x),
                lambda f: torch.func.hessian(lambda y: f(y).sum())(x),
            ):
                torch.testing.assert_close(transformed(wrapped), transformed(wave))
        assert wrapped.stats().graphs == 1

    def test_functional_call(self) -> None:
        linear = nn.Linear(3, 3)
        wrapped = bucketed(
            linear, dims={"input": {0: "t"}}, buckets=LADDER, compile={"backend": "eager"}
        )
        x = torch.randn(5, 3)
        doubled = {name: 2 * p.detach() for name, p in linear.named_parameters()}
        found = torch.func.functional_call(wrapped, doubled, (x,))
        torch.testing.assert_close(found, torch.func.functional_call(linear, doubled, (x,)))
        torch.testing.assert_close(wrapped(x), linear(x))

    def test_threads(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        wrong: list[Any] = []

        def work(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(25):
                x = torch.randn(int(torch.randint(1, 17, (), generator=generator)))
                if not torch.equal(wrapped(x), 2 * x):
                    wrong.append(x)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert wrapped.stats().calls == 100
        assert len(backend.graphs) == 3

    def test_nothing_keeps_inputs_alive(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        for length in (5, 8):
            x = torch.randn(length)
            reference = weakref.ref(x)
            wrapped(x)
            wrapped(x)
            del x
            gc.collect()
            assert reference() is None

    def test_an_exception_in_the_function_leaves_statistics_right(self) -> None:
        def fails(x: torch.Tensor, when: bool) -> torch.Tensor:
            if when:
                raise RuntimeError("on purpose")
            return x + 1

        wrapped = bucketed(fails, dims={"x": {0: "t"}}, buckets=LADDER)
        wrapped(torch.ones(3), False)
        before = wrapped.stats()
        with pytest.raises(RuntimeError, match="on purpose"):
            wrapped(torch.ones(3), True)
        assert wrapped.stats() == before
        assert torch.equal(wrapped(torch.ones(3), False), torch.full((3,), 2.0))

    def test_outputs_of_cuda_graphs_are_copied(self) -> None:
        # A CUDA graph writes its outputs to the same memory in each call; so does this one.
        memory = torch.zeros(4)
        wrapped: Any = bucketed(
            memory.copy_,
            dims=({0: "t"},),
            buckets=LADDER,
            check_padding="never",
            outputs={0: "t"},
        )
        first = wrapped(torch.ones(3))
        wrapped(torch.zeros(3))
        assert first.tolist() == [0, 0, 0]  # so the memory is shared indeed
        next(iter(wrapped._caller.cache.variants.values())).cuda_graphs = True
        first = wrapped(torch.ones(3))
        wrapped(torch.zeros(3))
        assert first.tolist() == [1, 1, 1]

    def test_reduce_overhead_is_known_to_record_cuda_graphs(self) -> None:
        from torchguard._torch import records_cuda_graphs  # noqa: PLC0415

        assert records_cuda_graphs(torch.compile(double, mode="reduce-overhead"))
        assert not records_cuda_graphs(torch.compile(double))
        assert not records_cuda_graphs(torch.compile(double, backend="eager"))


class TestStatistics:
    def test_count_calls_waste_and_graphs(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        for length in (3, 4, 5):
            wrapped(torch.ones(length))
        stats = wrapped.stats()
        assert (stats.calls, stats.hits, stats.graphs) == (3, {(4,): 2, (8,): 1}, 2)
        assert stats.waste == pytest.approx(16 / 12 - 1)
        assert stats.compile_seconds > 0
        exported = json.loads(json.dumps(stats.as_dict()))
        assert exported["hits"] == {"4": 2, "8": 1}
        assert "3 calls, waste 33.3 %, 2 graphs" in str(stats)

    def test_warmup_compiles_every_bucket_and_changes_nothing(self, backend: Counting) -> None:
        net = Net()
        wrapped: Any = bucketed(
            net, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        random_state = torch.get_rng_state()
        wrapped.warmup(torch.ones(2, 3))
        assert len(backend.graphs) == 3
        assert torch.equal(torch.get_rng_state(), random_state)
        assert float(net.steps) == 0
        assert all(p.grad is None for p in net.parameters())
        assert wrapped.stats().calls == 0
        with no_recompile():
            for length in range(1, 17):
                wrapped(torch.ones(length, 3))
        assert len(backend.graphs) == 3

    def test_warmup_compiles_for_training_what_has_run_without_gradients(
        self, backend: Counting
    ) -> None:
        linear = nn.Linear(3, 3)
        wrapped: Any = bucketed(
            linear, dims={"input": {0: "t"}}, buckets=LADDER, compile={"backend": backend}
        )
        with torch.no_grad():
            for length in LADDER:
                wrapped(torch.ones(length, 3))
        wrapped.warmup(torch.ones(2, 3))
        with no_recompile():
            for length in range(1, 17):
                wrapped(torch.ones(length, 3)).sum().backward()

    @pytest.mark.parametrize("how", ["attribute", "partial", "list"])
    def test_warmup_leaves_buffers_wherever_the_module_is(self, how: str) -> None:
        norm = nn.BatchNorm1d(3)

        class Trainer:
            def __init__(self) -> None:
                self.model = norm

            @bucketed(dims={"x": {0: "b"}}, buckets=LADDER, compile={"backend": "eager"})
            def loss(self, x: torch.Tensor) -> Any:
                return self.model(x)

        options: dict[str, Any] = {"buckets": LADDER, "compile": {"backend": "eager"}}
        models = [norm]
        wrapped = {
            "attribute": Trainer().loss,
            "partial": bucketed(
                functools.partial(lambda m, x: 1 * m(x), norm), dims={"x": {0: "b"}}, **options
            ),
            "list": bucketed(lambda x: 1 * models[0](x), dims={"x": {0: "b"}}, **options),
        }[how]
        before = {name: value.clone() for name, value in norm.state_dict().items()}
        wrapped.warmup(x=torch.randn(3, 3))
        same(dict(norm.state_dict()), before)

    def test_warmup_shows_a_bar(self, capsys: pytest.CaptureFixture[str]) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": "eager"}
        )
        wrapped.warmup(torch.ones(2), progress=True)
        shown = capsys.readouterr().err
        assert "0 of 3" in shown
        assert "3 of 3" in shown
        assert "t = 16" in shown

    def test_report_says_what_other_counts_would_change(self, tmp_path: Path) -> None:
        wrapped = bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER)
        with pytest.raises(ValueError, match="nothing to report yet"):
            wrapped.report()
        for length in (2, 3, 5, 6, 9, 10, 11):
            wrapped(torch.ones(length))
        report = wrapped.report()
        assert set(report.axes[0].best) == {1, 3, 7}
        assert report.axes[0].best[7][1] == 0
        assert "the best 7" in str(report)
        pytest.importorskip("matplotlib")
        wrapped.report(tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

    def test_a_plan_is_saved_and_read(self, tmp_path: Path) -> None:
        wrapped = bucketed(double, dims={"x": {0: "t"}}, buckets=LADDER, overflow="grow")
        wrapped(torch.ones(20))
        path = tmp_path / "plan.json"
        wrapped.save_plan(path)
        again = bucketed(double, dims={"x": {0: "t"}}, plan=path)
        again(torch.ones(20))
        assert again.stats().hits == {(32,): 1}
        with pytest.raises(ValueError, match="both given"):
            bucketed(double, dims={"x": {0: "t"}}, plan=path, buckets=LADDER)
        path.write_text("{}")
        with pytest.raises(ValueError, match="is not a plan"):
            bucketed(double, dims={"x": {0: "t"}}, plan=path)

    def test_auto_starts_coarse_fits_once_and_freezes(self, backend: Counting) -> None:
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets="auto", compile={"backend": backend}
        )
        generator = torch.Generator().manual_seed(0)

        def call() -> None:
            length = int(torch.randint(40, 100, (), generator=generator))
            wrapped(torch.ones(length))

        for _ in range(31):
            call()
        assert set(wrapped.stats().hits) == {(64,), (128,)}
        for _ in range(100):
            call()
        frozen = wrapped.report().axes[0].buckets
        assert len(frozen) > 2
        for _ in range(100):
            call()
        assert wrapped.report().axes[0].buckets == frozen
        assert wrapped.report().axes[0].waste < 0.2
        assert Buckets([64, 128]).waste(range(40, 100)) > 0.4  # the ladder it began with
        assert len(backend.graphs) <= len(frozen) + 1


class TestNoRecompile:
    def test_names_axis_and_size_of_a_bucketed_function(self) -> None:
        torch.compiler.reset()
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": "eager"}
        )
        wrapped(torch.ones(3))
        with no_recompile():
            wrapped(torch.ones(2))
            with pytest.raises(RecompileError, match=r"t: 5 -> 8 in x"):
                wrapped(torch.ones(5))
        wrapped(torch.ones(5))

    def test_names_a_batch_size_that_is_new_and_not_the_bucket(self) -> None:
        torch.compiler.reset()
        wrapped = bucketed(
            double, dims={"x": {1: "t"}}, buckets=LADDER, compile={"backend": "eager"}
        )
        wrapped(torch.ones(2, 3))
        with no_recompile():
            with pytest.raises(
                RecompileError,
                match=r"x is \(3, 4\) after padding, compiled was \(2, 4\) \(t: 3 ->",
            ):
                wrapped(torch.ones(3, 3))
            with pytest.raises(RecompileError, match=r"t: 5 -> 8 in x, a bucket that is not compi"):
                wrapped(torch.ones(2, 5))
            with torch.no_grad():
                with pytest.raises(RecompileError, match=r"whether gradients are on is another"):
                    wrapped(torch.ones(2, 3))
            wrapped(torch.ones(2, 4))

    def test_quotes_the_guard_that_failed(self) -> None:
        """A dtype of an input is not part of the plan: it is Dynamo that says what changed."""
        torch.compiler.reset()
        plain = torch.compile(double, backend="eager", dynamic=False)
        plain(torch.ones(3))
        wrapped = bucketed(
            double, dims={"x": {0: "t"}}, buckets=LADDER, compile={"backend": "eager"}
        )
        wrapped(torch.ones(3))
        x = torch.ones(3, dtype=torch.float64)
        with torch.compiler.set_stance("fail_on_recompile"):
            with pytest.raises(RuntimeError) as said:
                plain(x)
        quotes = "guard failure" in str(said.value)
        with no_recompile():
            with pytest.raises(RecompileError, match=r"compile t: 3 -> 4 in x again") as caught:
                wrapped(x)
        assert ("dtype mismatch. expected Float, actual Double" in str(caught.value)) == quotes
        with pytest.raises(RecompileError, match=r"x of shape \(3,\) and torch.float64") as caught:
            with no_recompile():
                plain(x)
        assert ("dtype mismatch. expected Float, actual Double" in str(caught.value)) == quotes

    def test_names_argument_and_size_of_any_compiled_function(self) -> None:
        torch.compiler.reset()
        compiled = torch.compile(double, backend="eager", dynamic=False)
        compiled(torch.ones(3))
        with no_recompile():
            compiled(torch.ones(3))
        with pytest.raises(
            RecompileError, match=r"double was about to compile with x of shape \(7,\)"
        ):
            with no_recompile():
                compiled(torch.ones(7))
        compiled(torch.ones(7))

    def test_a_backward_that_would_compile_is_refused(self) -> None:
        torch.compiler.reset()
        compiled = torch.compile(nn.Linear(3, 3), backend="aot_eager")
        late, later = compiled(torch.ones(2, 3)), compiled(torch.ones(2, 3))
        callbacks = importlib.import_module("torch._dynamo.callback")
        if not hasattr(callbacks, "CallbackTrigger"):
            pytest.skip("this torch does not say when it compiles a backward")
        with pytest.raises(RecompileError, match=r"the backward of compiled graph \S+ was about"):
            with no_recompile():
                late.sum().backward()
        later.sum().backward()
        with no_recompile():
            compiled(torch.ones(2, 3)).sum().backward()
        assert callbacks.callback_handler.start_callbacks == []

    def test_leaves_other_errors_alone(self) -> None:
        with pytest.raises(RuntimeError, match="on purpose") as caught:
            with no_recompile():
                raise RuntimeError("on purpose")
        assert type(caught.value) is RuntimeError
