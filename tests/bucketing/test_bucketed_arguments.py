"""bucketed() names what it was given wrongly, and says what to type."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.bucketed import LADDER, double, in_time, wrap
from torchguard import Buckets, bucketed

torch_compile: Any = torch.compile


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class TestWhatCannotBeWrapped:
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize(
        "make",
        [
            lambda: Doubles,
            lambda: 3,
            lambda: wrap(double),
            lambda: wrap(Doubles()),
            lambda: torch.jit.script(Doubles()),
        ],
    )
    def test_is_named(self, make: Callable[[], Any]) -> None:
        with pytest.raises(TypeError, match="expected a function, a method or an instance of nn"):
            wrap(make())

    def test_a_method_in_the_body_of_its_class(self) -> None:
        """Python 3.11 and before raise a RuntimeError from it."""
        with pytest.raises((TypeError, RuntimeError)) as caught:

            class Model:
                @bucketed(dims={"x": {0: "t"}}, buckets=LADDER)
                def run(self, x: torch.Tensor) -> torch.Tensor:
                    return x

        refused = caught.value.__cause__ or caught.value
        assert "self.run = bucketed(self.run, ...) in __init__" in str(refused)


class TestDeclarations:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dims": {"z": {0: "t"}}}, "dims names 'z'"),
            ({"dims": {"x": {0: 3}}}, r"dims\['x'\] is \{0: 3\}, expected \{dim: name\}"),
            ({"dims": {"x": (None, "t")}}, r"dims\['x'\]\[1\] is 't', expected \{dim: name\}"),
            ({"dims": {"x": {"t": 0}}}, r"is 0, expected \{dim: name\}"),
            ({"fill": {"z": 1}}, "fill names 'z'"),
            ({"buckets": {"u": LADDER}}, "buckets names 'u'"),
            ({"buckets": {}}, "no buckets for 't'"),
            ({"buckets": "auto"}, "buckets is 'auto', expected Buckets, a list of sizes"),
            ({"side": "up"}, "side is 'up'"),
            ({"check_padding": "often"}, "check_padding is 'often'"),
            ({"mask": "m"}, "mask names 'm'"),
            ({"lengths": {"u": "x"}}, "for axis 'u', expected one of t"),
            ({"compile": "inductor"}, "compile is 'inductor', expected True or a dict"),
        ],
    )
    def test_a_wrong_one_says_so(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            wrap(double, **{"dims": {"x": {0: "t"}}, **options})

    def test_options_by_position(self) -> None:
        by_position: Any = bucketed
        with pytest.raises(TypeError, match="got Buckets by position, expected options"):
            by_position(double, Buckets([8]))

    def test_no_dims(self) -> None:
        nothing: Any = {}
        with pytest.raises(TypeError, match=r"dims is None, expected \{argument"):
            bucketed(double, **nothing)

    @pytest.mark.parametrize("value", [3, "text", [torch.ones(3)]])
    def test_something_else_than_declared_says_so(self, value: Any) -> None:
        with pytest.raises((TypeError, KeyError), match="x"):
            wrap(double, dims={"x": {0: "t"}})(value)

    def test_a_call_without_its_argument(self) -> None:
        with pytest.raises(TypeError, match="the call is missing the argument 'x'"):
            wrap(double)()

    def test_sizes_that_disagree_are_named(self) -> None:
        wrapped = wrap(lambda x, y: x, dims={"x": {0: "t"}, "y": {1: "t"}})
        with pytest.raises(ValueError, match="axis 't' is 3 in x and 4 in y"):
            wrapped(torch.ones(3), torch.ones(1, 4))

    def test_a_fill_that_the_dtype_cannot_hold_is_refused(self) -> None:
        wrapped = wrap(double, fill={"x": -1})
        wrapped(torch.ones(3))
        with pytest.raises(TypeError, match="does not fit"):
            wrapped(torch.ones(3, dtype=torch.uint8))


class TestNotCompiled:
    def test_stats_say_so(self) -> None:
        stats = wrap(double).stats()
        assert not stats.compiled
        assert "not compiled (compile=True compiles each bucket)" in str(stats)
        assert stats.as_dict()["compiled"] is False
        for compiled in (
            wrap(double, compile={"backend": "eager"}),
            wrap(torch_compile(double, backend="eager")),
        ):
            assert compiled.stats().compiled
            assert "not compiled" not in str(compiled.stats())

    @pytest.mark.parametrize("function", [Doubles(), lambda x: 2 * x])
    def test_torch_compile_around_it_warns_once(self, function: Any) -> None:
        around = torch_compile(wrap(function), backend="eager")
        with pytest.warns(UserWarning, match=r"runs uncompiled: .* bucketed\(..., compile=True\)"):
            assert torch.equal(around(torch.ones(5)), torch.full((5,), 2.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            around(torch.ones(6))

    def test_a_whole_graph_says_what_to_type(self) -> None:
        wrapped = wrap(Doubles())
        around = torch_compile(lambda x: wrapped(x) + 1, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"bucketed|Bucketed") as caught:
            around(torch.ones(5))
        if "reason" in inspect.signature(torch.compiler.disable).parameters:  # it is shown then
            assert "pass compile={...} to bucketed" in str(caught.value)

    def test_warmup_warns(self) -> None:
        with pytest.warns(UserWarning, match="has nothing to compile: .* Pass compile=True"):
            wrap(Doubles()).warmup(torch.ones(8))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            wrap(Doubles(), compile=False).warmup(torch.ones(8))


def ids_of(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 3


class TestAnArgumentThatDimsForgot:
    def test_is_named(self) -> None:
        ids = ids_of(2, 5)
        forgotten = r"not padded: dimension 1 of types, \(2, 5\), with 't': name it in dims"
        with pytest.raises(ValueError, match=forgotten) as e:
            in_time(lambda ids, types: ids + types)(ids, ids)
        assert "t: 5 -> 8 in ids" in str(e.value)
        assert isinstance(e.value.__cause__, RuntimeError)

    def test_inside_a_container_is_named(self) -> None:
        batch = {"bias": torch.ones(2, 5), "other": torch.ones(3)}
        with pytest.raises(ValueError, match=r"dimension 1 of batch\['bias'\], \(2, 5\), w"):
            in_time(lambda ids, batch: ids + batch["bias"])(ids_of(2, 5), batch=batch)

    @pytest.mark.parametrize("error", [KeyError("its own"), torch.OutOfMemoryError("no memory")])
    def test_an_error_of_the_function_itself_is_left_as_it_is(self, error: Exception) -> None:
        def fails(ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            raise error

        with pytest.raises(type(error)) as caught:
            in_time(fails)(ids_of(2, 5), ids_of(2, 5))
        assert caught.value is error


def test_a_warm_call_by_keyword() -> None:
    """Each argument finds its own parameter, in whatever order they come."""
    x, y = torch.arange(5.0), torch.ones(5)
    minus = wrap(lambda x, y: x - y, dims={"x": {0: "t"}, "y": {0: "t"}})
    for _ in range(3):
        for output in (minus(x, y=y), minus(x=x, y=y), minus(y=y, x=x)):
            assert torch.equal(output, x - y)
