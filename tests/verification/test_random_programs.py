"""No false alarm, and nothing wrong: random programs, torch's own samples, whole models."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from support.miscompiling import verified_backend
from support.random_programs import attempt, program
from support.slow import slow_except
from support.zoo import Architecture, named
from torchguard import verified

pytestmark = pytest.mark.usefixtures("fresh_reports")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchguard.MiscompilationWarning")
def test_no_program_that_is_compiled_right_is_a_mismatch() -> None:
    """Programs go through AOTAutograd, which writes each of them anew."""
    # It loses what is written through a dropout that does nothing, up to 2.13.
    # https://github.com/pytorch/pytorch/issues/195422
    programs = [each for each in map(program, range(16)) if "F.dropout" not in each.source]
    assert len({each.gradients for each in programs}) == 2
    for made in programs:
        torch._dynamo.reset()
        backend = verified_backend("aot_eager")
        attempt(made, partial(torch.compile, backend=backend), sizes=(4,))
        assert backend.stats().unverified == 0
        if backend.stats().mismatched:
            torch._dynamo.reset()
            bare = attempt(made, partial(torch.compile, backend="aot_eager"), sizes=(4,))
            assert bare, made.source


# --- torch's own samples


# What AOTAutograd returns with other strides than eager on some release is no false alarm.
OPERATORS = (
    "add", "mul", "div", "addmm", "addcdiv", "matmul", "bmm", "sum", "mean", "var", "prod", "amax",
    "argmax", "cumsum", "logsumexp", "softmax", "exp", "tanh", "erf", "rsqrt", "pow", "sign",
    "clamp", "maximum", "masked_fill", "gather", "scatter", "scatter_add", "index_select",
    "index_add", "index_put", "take_along_dim", "cat", "stack", "flip", "roll", "tril", "sort",
    "topk", "nn.functional.gelu", "nn.functional.layer_norm", "nn.functional.linear",
    "nn.functional.mse_loss", "nn.functional.avg_pool2d", "nn.functional.conv2d",
    "nn.functional.pad",
)  # fmt: skip


def _function(name: str) -> Any:
    """Return the operator as a user calls it: its entry in the database may be a lambda."""
    namespace = torch.nn.functional if name.startswith("nn.functional.") else torch
    return getattr(namespace, name.removeprefix("nn.functional."))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_samples_raise_no_false_alarm() -> None:
    by_name = {info.name: info for info in reversed(op_db)}  # the first of its variants
    checked, mismatched = 0, []
    for number, name in enumerate(OPERATORS):
        torch._dynamo.reset()
        info, dtype = by_name[name], (torch.float32, torch.bfloat16)[number % 2]
        grad = dtype in info.supported_backward_dtypes("cpu")
        sample = next(iter(info.sample_inputs("cpu", dtype, requires_grad=grad)))
        function, backend = _function(name), verified_backend("aot_eager")
        call = torch.compile(lambda *args, f=function, **kw: f(*args, **kw), backend=backend)
        call(sample.input, *sample.args, **sample.kwargs)
        report = backend.stats()
        checked += bool(report.graphs)  # none where the size of the result is in the data
        if report.verified != len(report.graphs):
            mismatched.append((name, str(report)))
    assert mismatched == []
    assert checked >= len(OPERATORS) - 2


# --- whole models


def step(architecture: Architecture, model: nn.Module) -> list[Any]:
    """Return the outputs of a ragged batch and what a step leaves: gradients and buffers."""
    model.train()
    model.zero_grad()
    outputs = model(**architecture.batch([7, 4]))
    outputs.loss.backward()
    named_outputs = dict(outputs) if isinstance(outputs, dict) else vars(outputs)
    found = [value for value in tree_leaves(named_outputs) if isinstance(value, torch.Tensor)]
    return [*found, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def assert_same(found: list[Any], want: list[Any], *, bits: bool) -> None:
    assert [value is None for value in found] == [value is None for value in want]
    found, want = ([value for value in values if value is not None] for values in (found, want))
    assert [value.stride() for value in found] == [value.stride() for value in want]
    exactly: dict[str, Any] = {"rtol": 0, "atol": 0} if bits else {}
    torch.testing.assert_close(found, want, equal_nan=True, **exactly)


# Other ways to mix positions, experts or pixels.
@pytest.mark.filterwarnings("error::torchguard.MiscompilationWarning")
@pytest.mark.parametrize(
    "name", slow_except(["mixtral", "t5", "residual-convnet"], "residual-convnet")
)
def test_what_is_checked_is_eagers_result_bit_for_bit(name: str) -> None:
    """In training, with gradients; each graph is verified.

    Or bit for bit that of plain torch.compile, and close to eager's.
    """
    architecture = named(name)
    plain = architecture.build(to_compile=True)
    compiled = verified(backend="aot_eager")(copy.deepcopy(plain))
    found, want = (step(architecture, model) for model in (compiled, plain))
    try:
        assert_same(found, want, bits=True)
    except AssertionError:
        # AOTAutograd adds up some gradients in another order than eager, which ones depends
        # on torch. Then plain torch.compile has these very bits.
        assert_same(found, want, bits=False)
        torch._dynamo.reset()
        bare = copy.deepcopy(plain)
        bare.compile(backend="aot_eager")
        assert_same(found, step(architecture, bare), bits=True)
    assert {(graph.status, graph.runs, graph.reason) for graph in compiled.stats().graphs} == {  # type: ignore[operator]
        ("verified", "aot_eager", "")
    }
