"""no_recompile(): a recompilation is an error that names its reason."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from support.bucketed import LADDER, double
from torchguard import bucketed, no_recompile
from torchguard.errors import RecompileError


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
