"""verified leaves whole models alone: no false alarm, and eager's results bit for bit."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from support.zoo import Architecture, named
from torchguard import verified

if TYPE_CHECKING:
    from torch import nn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("error::torchguard.MiscompilationWarning"),
]


def run(architecture: Architecture, model: nn.Module) -> list[Any]:
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
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5", "residual-convnet"])
def test_what_is_checked_is_eagers_result_bit_for_bit(name: str) -> None:
    """In training, with gradients; each graph is verified.

    Or bit for bit that of plain torch.compile, and close to eager's.
    """
    architecture = named(name)
    architecture.excuse("verified")
    plain = architecture.build(to_compile=True)
    compiled = verified(backend="aot_eager")(copy.deepcopy(plain))
    found, want = (run(architecture, model) for model in (compiled, plain))
    try:
        assert_same(found, want, bits=True)
    except AssertionError:
        # AOTAutograd adds up some gradients in another order than eager, which ones depends
        # on torch. Then plain torch.compile has these very bits.
        assert_same(found, want, bits=False)
        torch._dynamo.reset()
        bare = copy.deepcopy(plain)
        bare.compile(backend="aot_eager")
        assert_same(found, run(architecture, bare), bits=True)
    assert {(graph.status, graph.runs, graph.reason) for graph in compiled.stats().graphs} == {
        ("verified", "aot_eager", "")
    }


def test_inductor_raises_no_false_alarm() -> None:
    """A ReLU of a convolutional network passes a gradient on or stops it: rounding decides."""
    architecture = named("residual-convnet")
    plain = architecture.build(to_compile=True)
    compiled = verified()(copy.deepcopy(plain))
    found, want = (run(architecture, model) for model in (compiled, plain))
    assert_same(found, want, bits=False)
    graphs = compiled.stats().graphs
    assert {(graph.status, graph.runs) for graph in graphs} == {("verified", "inductor")}
