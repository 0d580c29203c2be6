"""bucketed() names what it was given wrongly, and says what to type."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchguard import Buckets, PaddingLeakError, bucketed

LADDER = Buckets([8, 16])

torch_compile: Any = torch.compile


def wrap(function: Any, **options: Any) -> Any:
    return bucketed(function, **{"dims": {"x": {0: "t"}}, "buckets": LADDER, **options})


async def later(x: torch.Tensor) -> torch.Tensor:
    return x


async def one_after_the_other(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    yield x


def one_by_one(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from x


class AsyncCall:
    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


class AsyncModule(nn.Module):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class GeneratorModule(nn.Module):
    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield x


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def _make_double() -> Callable[[torch.Tensor], torch.Tensor]:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    return double


class TestWhatCannotBeWrapped:
    @pytest.mark.parametrize(
        "function",
        [
            later,
            one_after_the_other,
            AsyncCall(),
            AsyncModule(),
            functools.partial(later),
            torch.compile(later, backend="eager"),
        ],
    )
    def test_async_functions(self, function: Any) -> None:
        with pytest.raises(TypeError, match="which is async: what it returns can't be sliced"):
            wrap(function)

    @pytest.mark.parametrize(
        "function", [one_by_one, GeneratorModule(), torch.no_grad()(one_by_one)]
    )
    def test_generators(self, function: Any) -> None:
        with pytest.raises(TypeError, match=r"which is a generator: .* return a list"):
            wrap(function)

    def test_a_generator_that_a_function_returns(self) -> None:
        wrapped = wrap(lambda x: (row for row in x), check_padding="never")
        with pytest.raises(TypeError, match="output is of type generator: what comes out"):
            wrapped(torch.ones(5))

    def test_a_coroutine_that_a_function_returns(self) -> None:
        wrapped = wrap(lambda x: later(x), check_padding="never")  # noqa: PLW0108 - no async function
        with (
            warnings.catch_warnings(),
            pytest.raises(TypeError, match="output is of type coroutine: what comes out"),
        ):
            warnings.simplefilter("ignore")  # it was never awaited
            wrapped(torch.ones(5))

    def test_classes(self) -> None:
        with pytest.raises(TypeError, match=r"the class Doubles: pass an instance, bucketed\(Doub"):
            wrap(Doubles)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_what_torch_jit_made(self) -> None:
        def double(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        made = [
            torch.jit.script(Doubles()),
            torch.jit.trace(Doubles(), torch.ones(3)),
            torch.jit.trace(double, torch.ones(3)),
        ]
        for each in made:
            with pytest.raises(TypeError, match=r"made by torch.jit: pass the module"):
                wrap(each)

    def test_what_is_no_function(self) -> None:
        with pytest.raises(TypeError, match="function is of type int, expected something to call"):
            wrap(3)


class TestNotCompiled:
    def test_stats_say_so(self) -> None:
        wrapped = wrap(lambda x: 2 * x)
        wrapped(torch.ones(5))
        assert not wrapped.stats().compiled
        assert "not compiled (compile=True compiles each bucket)" in str(wrapped.stats())
        assert wrapped.stats().as_dict()["compiled"] is False
        wrapped = wrap(lambda x: 2 * x, compile={"backend": "eager"})
        assert wrapped.stats().compiled
        assert "not compiled" not in str(wrapped.stats())
        assert wrap(torch_compile(lambda x: 2 * x, backend="eager")).stats().compiled

    @pytest.mark.parametrize("make", [Doubles, _make_double])
    def test_torch_compile_around_it_warns(self, make: Callable[[], Any]) -> None:
        wrapped = wrap(make())
        around = torch_compile(wrapped, backend="eager")
        with pytest.warns(UserWarning, match=r"runs uncompiled: .* bucketed\(..., compile=True\)"):
            assert torch.equal(around(torch.ones(5)), torch.full((5,), 2.0))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            around(torch.ones(6))

    @pytest.mark.parametrize("compile_", [False, True, {"backend": "eager"}])
    def test_torch_compile_around_it_does_not_warn_where_something_is_said(
        self, compile_: Any
    ) -> None:
        if compile_ is True:
            compile_ = {"backend": "aot_eager"}
        wrapped = wrap(Doubles(), compile=compile_)
        around = torch_compile(wrapped, backend="eager")
        with warnings.catch_warnings():
            # Dynamo warns once in a process of what it can't trace.
            warnings.filterwarnings("error", message="bucketed")
            assert torch.equal(around(torch.ones(5)), torch.full((5,), 2.0))

    def test_a_whole_graph_says_what_to_type(self) -> None:
        wrapped = wrap(Doubles())
        around = torch_compile(lambda x: wrapped(x) + 1, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=r"bucketed|Bucketed") as caught:
            around(torch.ones(5))
        if "reason" in inspect.signature(torch.compiler.disable).parameters:  # it is shown then
            assert "pass compile={...} to bucketed" in str(caught.value)
        assert isinstance(caught.value, torch._dynamo.exc.Unsupported)

    def test_warmup_warns(self) -> None:
        with pytest.warns(UserWarning, match="has nothing to compile: .* Pass compile=True"):
            wrap(Doubles()).warmup(torch.ones(8))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            wrap(Doubles(), compile=False).warmup(torch.ones(8))


class TestCallbacks:
    def test_what_is_not_bucketed_is_refused(self) -> None:
        session = importlib.import_module("torchguard.integrations").Session
        refused = r"buckets\['encoder'\] is of type Doubles, which has no stats\(\)"
        with pytest.raises(TypeError, match=refused):
            session("resize", {"encoder": Doubles()})
        with pytest.raises(TypeError, match=r"buckets is of type Doubles, expected \{name: what"):
            session("resize", Doubles())
        assert session("resize", {"encoder": wrap(Doubles())}).metrics()


class Tagger(nn.Module):
    """Embeds tokens and their types, and has a loss where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(11, 4), nn.Embedding(3, 4)
        self.head = nn.Linear(4, 5)

    def forward(
        self,
        ids: torch.Tensor,
        types: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        hidden = self.words(ids)
        if types is not None:
            hidden = hidden + self.types(types)
        if others.get("batch"):
            hidden = hidden + others["batch"]["bias"]
        logits = self.head(hidden)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def ids_of(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 3


def mean(x: torch.Tensor, attention_mask: Any = None, **others: Any) -> torch.Tensor:
    """The mean of the last dim, of what the mask says is real."""
    if attention_mask is None:
        return x.mean(1)
    weights: torch.Tensor = attention_mask.to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)


class TestANameThatOnlyKwargsTakes:
    """``mask="mask"`` for ``attention_mask`` vanishes in ``**kwargs``."""

    @pytest.mark.parametrize("what", ["mask", "lengths"])
    def test_a_name_much_like_another_warns(self, what: str) -> None:
        name = {"mask": "mask", "lengths": "attention_masks"}[what]
        with pytest.warns(
            UserWarning, match=rf"{what} names '{name}', which only \*\*others takes: is it 'att"
        ) as e:
            wrap(mean, dims={"x": {1: "t"}}, **{what: name})
        assert e[0].filename == __file__

    def test_a_leak_says_that_the_name_is_taken_by_kwargs_only(self) -> None:
        wrapped = bucketed(mean, dims={"x": {1: "t"}}, buckets=LADDER, mask="valid")
        with pytest.raises(PaddingLeakError, match=r"mask names 'valid', which .* \*\*others"):
            wrapped(torch.randn(2, 5))

    @pytest.mark.parametrize("mask", ["attention_mask", {"attention_mask": "real"}])
    def test_a_name_that_is_taken_says_nothing(self, mask: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped = bucketed(mean, dims={"x": {1: "t"}}, buckets=LADDER, mask=mask)
            x = torch.randn(2, 5)
            assert torch.allclose(wrapped(x), x.mean(1))

    def test_a_function_that_takes_any_name_says_nothing(self) -> None:
        def call(x: torch.Tensor, **others: Any) -> torch.Tensor:
            return mean(x, **others)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped = bucketed(call, dims={"x": {1: "t"}}, buckets=LADDER, mask="attention_mask")
            x = torch.randn(2, 5)
            assert torch.allclose(wrapped(x), x.mean(1))

    def test_a_second_mask_through_kwargs_says_nothing(self) -> None:
        def call(x: torch.Tensor, attention_mask: Any = None, **others: Any) -> torch.Tensor:
            return mean(x, attention_mask, **others)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            bucketed(
                call,
                dims={"x": {1: "t"}},
                buckets=LADDER,
                mask={"attention_mask": "real", "cross_attention_mask": "real"},
            )


class TestAnArgumentThatDimsForgot:
    @pytest.mark.parametrize("check_padding", ["first", "never"])
    @pytest.mark.parametrize("batch", [2, 5])
    def test_is_named(self, batch: int, check_padding: Any) -> None:
        wrapped = bucketed(
            Tagger(), dims={"ids": {1: "t"}}, buckets=LADDER, check_padding=check_padding
        )
        ids = ids_of(batch, 5)
        with pytest.raises(
            ValueError, match=rf"not types of shape \({batch}, 5\), .* in dims: "
        ) as e:
            wrapped(ids, ids)
        assert "'t' from 5 to 8" in str(e.value)
        assert "{..., 'types': {1: 't'}}" in str(e.value)
        assert isinstance(e.value.__cause__, RuntimeError)

    def test_several_are_named_and_labels_want_a_fill(self) -> None:
        wrapped = bucketed(Tagger(), dims={"ids": {1: "t"}}, buckets=LADDER)
        ids = ids_of(2, 5)
        with pytest.raises(ValueError, match="types of shape") as caught:
            wrapped(ids, types=ids, labels=ids)
        assert "'types': {1: 't'}, 'labels': {1: 't'}" in str(caught.value)
        assert "{'labels': -100}" in str(caught.value)

    def test_inside_a_container_is_named_as_one_would_type_it(self) -> None:
        wrapped = bucketed(Tagger(), dims={"ids": {1: "t"}}, buckets=LADDER)
        with pytest.raises(ValueError, match=r"not batch\['bias'\] of shape \(2, 5, 1\)"):
            wrapped(ids_of(2, 5), batch={"bias": torch.ones(2, 5, 1), "other": torch.ones(3)})

    def test_another_dim_of_one_that_was_named(self) -> None:
        wrapped = bucketed(
            lambda x, bias: x + bias.sum(0), dims={"x": {1: "t"}, "bias": {0: "t"}}, buckets=LADDER
        )
        with pytest.raises(ValueError, match=r"not bias of shape \(5, 5\), .*'bias': {1: 't'}}"):
            wrapped(torch.ones(8, 5), torch.ones(5, 5))

    def test_an_error_of_the_function_itself_is_left_as_it_is(self) -> None:
        def fails(ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            raise KeyError(f"no {tuple(other.shape)}")

        wrapped = bucketed(fails, dims={"ids": {1: "t"}}, buckets=LADDER)
        with pytest.raises(KeyError, match=r"no \(2, 5\)"):
            wrapped(ids_of(2, 5), ids_of(2, 5))

    def test_out_of_memory_is_left_as_it_is(self) -> None:
        def fails(ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory")

        wrapped = bucketed(fails, dims={"ids": {1: "t"}}, buckets=LADDER)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            wrapped(ids_of(2, 5), ids_of(2, 5))


def test_a_warm_call_by_keyword() -> None:
    """Each argument finds its own parameter, in whatever order they come."""
    x, y = torch.arange(5.0), torch.ones(5)
    minus = wrap(lambda x, y: x - y, dims={"x": {0: "t"}, "y": {0: "t"}})
    for _ in range(3):
        for output in (minus(x, y=y), minus(x=x, y=y), minus(y=y, x=x)):
            assert torch.equal(output, x - y)
