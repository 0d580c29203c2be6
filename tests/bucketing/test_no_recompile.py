"""no_recompile(): a recompilation is an error that names its reason."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from support.bucketed import double, wrap
from torchguard import no_recompile
from torchguard.errors import RecompileError

EAGER: Any = {"backend": "eager"}
IN_TIME: Any = {"dims": {"x": {1: "t"}}, "compile": EAGER}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def refused(match: str, function: Any, *given: Any) -> str:
    """Return the error of a call in a scope; the same call outside of it compiles."""
    with pytest.raises(RecompileError, match=match) as caught:
        with no_recompile():
            function(*given)
    return str(caught.value)


def test_names_a_batch_size_that_is_new_and_not_the_bucket() -> None:
    wrapped = wrap(double, **IN_TIME)
    wrapped(torch.ones(2, 3))
    new = r"t: 3 -> 4 in x, because x after padding is \(3, 4\), compiled was \(2, 4\): call war"
    refused(new, wrapped, torch.ones(3, 3))
    refused("t: 5 -> 8 in x, a bucket that is not compi", wrapped, torch.ones(2, 5))
    with torch.no_grad():
        refused("because whether gradients are on is False, compiled", wrapped, torch.ones(2, 3))
    with no_recompile():
        wrapped(torch.ones(2, 4))


def test_names_keywords_in_another_order() -> None:
    dims = {"ids": {0: "t"}, "mask": {0: "t"}}
    wrapped: Any = wrap(lambda *, ids, mask: ids * mask, dims=dims, compile=EAGER)
    x = torch.ones(3)
    wrapped(ids=x, mask=x)
    with no_recompile():
        wrapped(ids=x, mask=x)
    refused("t: 3 -> 4.* because mask, ids come in another order", lambda: wrapped(mask=x, ids=x))


def test_names_arguments_that_the_warmup_lacked() -> None:
    wrapped = wrap(lambda x, m=None: x if m is None else x * m, mask="m", **IN_TIME)
    x = torch.ones(2, 3)
    wrapped.warmup(x)
    because = r"because m after padding is \(2, 4\), compiled was left out: call warmup\(\) with"
    refused(f"t: 3 -> 4 in x, {because}", wrapped, x, x)
    wrapped.warmup(x, x)
    with no_recompile():
        wrapped(x, x)


def test_quotes_the_guard_that_failed() -> None:
    """A dtype of an input is not part of the plan: it is Dynamo that says what changed."""
    plain = torch.compile(double, backend="eager", dynamic=False)
    plain(torch.ones(3))
    wrapped = wrap(double, compile=EAGER)
    wrapped(torch.ones(3))
    x = torch.ones(3, dtype=torch.float64)
    with torch.compiler.set_stance("fail_on_recompile"):
        with pytest.raises(RuntimeError) as said:
            plain(x)
    quotes = "guard failure" in str(said.value)
    for text in (
        refused(r"compile t: 3 -> 4 in x again", wrapped, x),
        refused(r"x of shape \(3,\) and torch.float64", plain, x),
    ):
        assert ("dtype mismatch. expected Float, actual Double" in text) == quotes


def test_quotes_the_guard_alone() -> None:
    """Not the line of source behind it, nor its stack; torch 2.6 does not say which guard."""
    wrapped = wrap(lambda x, scale: x * 2 * scale, **IN_TIME)
    x = torch.ones(2, 3)
    wrapped.warmup(x, 1.0)
    refused(r"again(, because scale == 1.0)?$", wrapped, x, 2.0)
    refused(r"again(, because tensor .x. dtype.*)?$", wrapped, x.double(), 1.0)


def test_names_argument_and_size_of_any_compiled_function() -> None:
    compiled = torch.compile(double, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    with no_recompile():
        compiled(torch.ones(3))
    refused(r"double was about to compile with x of shape \(7,\)", compiled, torch.ones(7))
    compiled(torch.ones(7))


def test_a_backward_that_would_compile_is_refused() -> None:
    compiled = torch.compile(nn.Linear(3, 3), backend="aot_eager")
    late, later = compiled(torch.ones(2, 3)), compiled(torch.ones(2, 3))
    callbacks = importlib.import_module("torch._dynamo.callback")
    if not hasattr(callbacks, "CallbackTrigger"):
        pytest.skip("this torch does not say when it compiles a backward")
    refused(r"the backward of compiled graph \S+ was about", late.sum().backward)
    later.sum().backward()
    with no_recompile():
        compiled(torch.ones(2, 3)).sum().backward()
    assert callbacks.callback_handler.start_callbacks == []


def test_leaves_other_errors_alone() -> None:
    with pytest.raises(RuntimeError, match="on purpose") as caught:
        with no_recompile():
            raise RuntimeError("on purpose")
    assert type(caught.value) is RuntimeError


async def awaited() -> None:
    pass


async def async_items() -> AsyncIterator[None]:
    yield


def items() -> Iterator[None]:
    yield


class Awaited:
    async def __call__(self) -> None:
        pass


@pytest.mark.parametrize("function", [awaited, async_items, items, Awaited()])
@pytest.mark.parametrize("decorate", [no_recompile, no_recompile()])
def test_a_function_that_runs_later_is_refused(decorate: Any, function: Any) -> None:
    """The scope would have ended before it does."""
    with pytest.raises(TypeError, match=r"(waited|tems) does not run when it is called; write"):
        decorate(function)


def test_each_call_of_a_decorated_function_is_a_scope() -> None:
    compiled = torch.compile(double, backend="eager")
    for decorate in (no_recompile, no_recompile()):
        decorated = decorate(compiled)
        for _ in range(2):
            with pytest.raises(RecompileError, match="double was about to compile"):
                decorated(torch.ones(3))
    compiled(torch.ones(3))
