"""bucketed(): which inputs are padded, and with what; errors name what to type."""

from __future__ import annotations

import enum
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.bucketed import LADDER, Counting, double, in_time, wrap
from torchguard import Buckets, bucketed
from torchguard.errors import TorchGuardWarning

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
            ({"dims": {"x": {0: "t"}, "z": None}}, "dims names 'z'"),
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

    def test_one_of_a_container_where_a_tensor_is(self) -> None:
        message = r"dims has an entry for x\[0\], but x is a tensor, expected \{dim: name\}"
        with pytest.raises(TypeError, match=message):
            wrap(double, dims={"x": ({0: "t"},)})(torch.ones(2, 3))

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

    def test_sizes_that_disagree_or_are_too_large_are_named(self) -> None:
        wrapped = wrap(lambda x, y: x, dims={"x": {0: "t"}, "y": {1: "t"}})
        with pytest.raises(ValueError, match="axis 't' is 3 in x and 4 in y"):
            wrapped(torch.ones(3), torch.ones(1, 4))
        with pytest.raises(ValueError, match="axis 't' is 17 in x, but the largest bucket is 16"):
            wrap(double)(torch.ones(17))


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
        with pytest.warns(
            TorchGuardWarning, match=r"runs uncompiled: .* bucketed\(..., compile=True\)"
        ):
            assert torch.equal(around(torch.ones(5)), torch.full((5,), 2.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error", TorchGuardWarning)
            around(torch.ones(6))

    def test_a_whole_graph_says_what_to_type(self) -> None:
        wrapped = wrap(Doubles())
        around = torch_compile(lambda x: wrapped(x) + 1, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"bucketed|Bucketed") as caught:
            around(torch.ones(5))
        if "reason" in inspect.signature(torch.compiler.disable).parameters:  # it is shown then
            assert "pass compile={...} to bucketed" in str(caught.value)

    def test_warmup_warns(self) -> None:
        with pytest.warns(TorchGuardWarning, match="has nothing to compile: .* Pass compile=True"):
            wrap(Doubles()).warmup(torch.ones(8))
        with warnings.catch_warnings():
            warnings.simplefilter("error", TorchGuardWarning)
            wrap(Doubles(), compile=False).warmup(torch.ones(8))


def ids_of(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 3


class TestAnArgumentThatDimsForgot:
    def test_is_named(self) -> None:
        """Inside a container too."""
        ids, batch = ids_of(2, 5), {"bias": torch.ones(2, 5), "other": torch.ones(3)}
        forgotten = r"not padded: dimension 1 of types, \(2, 5\), with 't': name it in dims"
        with pytest.raises(ValueError, match=forgotten) as e:
            in_time(lambda ids, types: ids + types)(ids, ids)
        assert "t: 5 -> 8 in ids" in str(e.value)
        assert isinstance(e.value.__cause__, RuntimeError)
        with pytest.raises(ValueError, match=r"dimension 1 of batch\['bias'\], \(2, 5\), w"):
            in_time(lambda ids, batch: ids + batch["bias"])(ids, batch=batch)

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
