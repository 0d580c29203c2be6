"""verified with inputs of every kind: lazy views, floats that change, and calls that raise."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.miscompiling import spoiling
from torchguard import MiscompilationWarning, verified, verified_backend
from torchguard.equivalence.copies import copy_inputs, why_not_copied

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("fresh_reports")


# --- conjugate and negative views


def _complex() -> torch.Tensor:
    return torch.complex(torch.arange(1.0, 5.0), torch.arange(5.0, 9.0))


def _requiring_grad() -> torch.Tensor:
    return _complex().requires_grad_() * 2


LAZY: dict[str, Callable[[], torch.Tensor]] = {
    "conjugate": lambda: _complex().conj(),
    "negative": lambda: _complex().conj().imag,
    "negative slice": lambda: _complex().conj().imag[1:],
    "conjugate leaf": lambda: _complex().conj().clone().detach().conj().requires_grad_(),
    "conjugate with a history": lambda: _requiring_grad().conj(),
    "conjugate of inference": lambda: _inference(lambda: _complex().conj()),
    "base of a conjugate": lambda: _complex().conj().conj(),
}


def _inference(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return make()


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_view_is_copied_with_its_bit(name: str) -> None:
    """The copy has the same values, bits, strides and history, in memory of its own."""
    original = LAZY[name]()
    assert why_not_copied([original]) is None
    (copy,) = copy_inputs([original]).values
    assert torch.equal(copy.resolve_conj().resolve_neg(), original.resolve_conj().resolve_neg())
    for one in ("is_conj", "is_neg", "is_inference", "stride", "storage_offset"):
        assert getattr(copy, one)() == getattr(original, one)()
    assert (copy.requires_grad, copy.is_leaf) == (original.requires_grad, original.is_leaf)
    assert copy.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()


def test_a_negative_view_whose_sign_is_lost_is_found() -> None:
    """https://github.com/pytorch/pytorch/issues/145093"""
    original = LAZY["negative"]()
    compiled = torch.compile(lambda x: (x * 2,), backend=verified_backend(_dropping_the_bit))
    with pytest.warns(MiscompilationWarning, match="4 of 4 elements differ"):
        assert compiled(original)[0].tolist() == [-10.0, -12.0, -14.0, -16.0]


def _dropping_the_bit(graph: Any, _: list[Any]) -> Any:
    def run(*inputs: Any) -> Any:
        return graph.forward(*(-value if value.is_neg() else value for value in inputs))

    return run


@pytest.mark.slow
def test_inductor_reads_a_negative_view_with_its_sign_or_is_replaced() -> None:
    """https://github.com/pytorch/pytorch/issues/145093"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert verified()(lambda x: x * 2)(LAZY["negative"]()).tolist() == [-10, -12, -14, -16]


def test_a_nested_tensor_is_named_as_such() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    compiled = verified(backend="aot_eager")(lambda x: x * 2)
    compiled(nested)
    (record,) = compiled.stats().graphs
    assert "NestedTensor" in record.reason


# --- leaves of autograd's graph that are views


class _Tripled(torch.autograd.Function):
    """Twice its input, with the gradient of three times its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 3


def _with_a_wrong_gradient(_: Any, __: list[Any]) -> Any:
    return lambda *inputs: (_Tripled.apply(inputs[-1]),)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("of_a_leaf", [False, True])
def test_the_gradient_of_a_leaf_that_is_a_view_is_compared(of_a_leaf: bool) -> None:
    """``x[2:].requires_grad_()`` is a leaf; the memory behind it is that of ``x``."""
    base = torch.arange(6.0, requires_grad=of_a_leaf)
    with torch.no_grad():
        x = base[2:]
    x.requires_grad_()
    assert x.is_leaf
    compiled = verified(backend=_with_a_wrong_gradient)(lambda x: x * 2)
    with pytest.warns(MiscompilationWarning, match="gradient of input 0"):
        compiled(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 4


# --- floats that change


def _constant(graph: Any, examples: list[Any]) -> Any:
    """Compile as inductor of torch 2.13 does: a float that is returned stays what it was."""
    first = graph.forward(*examples)

    def run(*inputs: Any) -> Any:
        return (graph.forward(*inputs)[0], *first[1:])

    return run


def _scaled(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
    return x * factor, factor + 1


def test_a_float_that_is_compiled_in_is_found_when_it_changes() -> None:
    """One warning; from then on each value is right."""
    compiled = verified(backend=_constant)(_scaled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MiscompilationWarning)
        for factor in (1.5, 2.5, 3.5, 4.5, float("inf"), -0.25, 2.5):
            assert compiled(torch.ones(2), factor)[1] == factor + 1
    assert len([w for w in caught if w.category is MiscompilationWarning]) == 1


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def test_two_values_of_a_float_are_checked_and_all_others_trusted() -> None:
    compiled = verified(backend="aot_eager")(_times)
    for factor in (1.5, 2.5, 2.5, 3.5, 4.5, float("inf"), 6.5, 2.5):
        compiled(torch.ones(2), factor)
    assert [graph.checks for graph in compiled.stats().graphs] == [1, 2]
    torch._dynamo.reset()
    compiled = verified(backend="aot_eager", check_each="graph")(_times)
    for factor in (1.5, 2.5, 3.5):
        compiled(torch.ones(2), factor)
    assert [graph.checks for graph in compiled.stats().graphs] == [1, 1]


# --- calls that raise


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_call_that_raises_is_no_check(dynamic: bool) -> None:
    """The first call has a bad index; a wrong graph is found by the second."""
    backend = verified_backend(spoiling(lambda outputs, _: [outputs[0] + 1]))
    compiled = torch.compile(lambda x, i: (x[i],), backend=backend, dynamic=dynamic)
    x = torch.arange(3.0)
    for _ in range(2):
        with pytest.raises(IndexError):
            compiled(x, torch.tensor([0, 9]))
    (record,) = backend.stats().graphs
    assert record.status == "compiled"
    assert record.reason == "eager raises IndexError; the next call is checked"
    with pytest.warns(MiscompilationWarning):
        assert compiled(x, torch.tensor([0, 1]))[0].tolist() == [0, 1]


def test_a_graph_that_was_checked_stays_verified_when_a_later_call_raises() -> None:
    backend = verified_backend("aot_eager", calls=2)
    compiled = torch.compile(lambda x, i: x[i], backend=backend)
    for index in (0, 9, 1, 2):
        try:
            compiled(torch.arange(3.0), torch.tensor([0, index]))
        except IndexError:
            assert index == 9
    (record,) = backend.stats().graphs
    assert (record.status, record.reason, record.checks) == ("verified", "", 3)


# --- large inputs


def test_inputs_of_more_bytes_than_allowed_are_not_copied() -> None:
    """Each storage counts once, and whole."""
    for limit, status in ((16, "verified"), (15, "unverified")):
        torch._dynamo.reset()
        compiled = verified(backend="aot_eager", max_bytes=limit)(lambda x, y: x + y)
        x = torch.ones(4)
        compiled(x[:2], x[2:])
        (record,) = compiled.stats().graphs
        assert record.status == status
    assert record.reason == "its inputs have 16 bytes, max_bytes is 15"
