"""verified leaves whole models alone: no false alarm, and eager's results bit for bit."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from support.zoo import Architecture, named
from torchguard import MiscompilationWarning, verified

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", MiscompilationWarning)
        yield
    torch._dynamo.reset()


def run(architecture: Architecture, model: nn.Module, *, train: bool, **options: Any) -> list[Any]:
    """Return the outputs of a ragged batch and what a step leaves: gradients and buffers."""
    model.train(train)
    model.zero_grad()
    with torch.set_grad_enabled(train):
        outputs = model(**architecture.batch([7, 4]), **options)
        if train:
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


def same_bits(found: list[Any], want: list[Any]) -> bool:
    try:
        assert_same(found, want, bits=True)
    except AssertionError:
        return False
    return True


# One for each way to mix positions, experts or pixels; what is left out has the graphs of one of
# them, with other names and norms.
CHOSEN = (
    "bert", "deberta-v2", "gpt2", "bloom", "gemma2", "mixtral", "mamba2", "t5", "whisper",
    "wav2vec2", "swin", "residual-convnet",
)  # fmt: skip
IN_EVALUATION_TOO = ("bert", "gemma2", "t5", "residual-convnet")


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_checked_is_eagers_result_bit_for_bit(name: str) -> None:
    """In training, with gradients; each graph is verified.

    Or bit for bit that of plain torch.compile, and close to eager's.
    """
    architecture = named(name)
    architecture.excuse("verified")
    plain = architecture.build(to_compile=True)
    compiled = verified(backend="aot_eager")(copy.deepcopy(plain))
    for train in (True, False) if name in IN_EVALUATION_TOO else (True,):
        found, want = (run(architecture, model, train=train) for model in (compiled, plain))
        if train and not same_bits(found, want):
            # AOTAutograd adds up some gradients in another order than eager, which ones depends
            # on torch. Then plain torch.compile has these very bits.
            assert_same(found, want, bits=False)
            torch._dynamo.reset()
            bare = copy.deepcopy(plain)
            bare.compile(backend="aot_eager")
            want = run(architecture, bare, train=train)
        assert_same(found, want, bits=True)
    graphs = compiled.stats().graphs
    assert graphs
    assert {(graph.status, graph.runs, graph.reason) for graph in graphs} == {
        ("verified", "aot_eager", "")
    }


@pytest.mark.parametrize("name", ["gpt2", "residual-convnet"])
def test_inductor_raises_no_false_alarm(name: str) -> None:
    """The decoder has a cache, as it has unless the caller says otherwise."""
    architecture = named(name)
    options = {"use_cache": True} if architecture.kind == "decoder" else {}
    plain = architecture.build(to_compile=True)
    compiled = verified()(copy.deepcopy(plain))
    found, want = (run(architecture, model, train=False, **options) for model in (compiled, plain))
    assert_same(found, want, bits=False)
    graphs = compiled.stats().graphs
    assert {(graph.status, graph.runs) for graph in graphs} == {("verified", "inductor")}


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_the_first_cache_of_a_decoder_has_eagers_strides(name: str) -> None:
    """The decompositions that inductor has give it those of the keys."""
    architecture = named(name)
    plain = architecture.build(to_compile=True)
    compiled = verified(backend="aot_eager_decomp_partition")(copy.deepcopy(plain))
    found, want = (
        run(architecture, model, train=False, use_cache=True) for model in (compiled, plain)
    )
    assert_same(found, want, bits=False)
    graphs = compiled.stats().graphs
    assert {graph.status for graph in graphs} == {"verified"}
    assert any("they get eager's" in graph.reason for graph in graphs)
