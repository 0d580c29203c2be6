"""verified with inputs of every kind: lazy views, floats, overlaps, and calls that raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.miscompiling import verified_backend, wrong
from torchguard import MiscompilationWarning, verified
from torchguard.equivalence.copies import copy_inputs, run_on_copies, why_not_copied
from torchguard.equivalence.outcome import Outcome

pytestmark = pytest.mark.usefixtures("fresh_reports")


# --- conjugate and negative views


def _complex() -> torch.Tensor:
    return torch.complex(torch.arange(1.0, 5.0), torch.arange(5.0, 9.0))


@torch.inference_mode()
def _inference() -> torch.Tensor:
    return _complex().conj()


LAZY: dict[str, Callable[[], torch.Tensor]] = {
    "conjugate": lambda: _complex().conj(),
    "negative": lambda: _complex().conj().imag,
    "negative slice": lambda: _complex().conj().imag[1:],
    "conjugate leaf": lambda: _complex().conj().clone().detach().conj().requires_grad_(),
    "conjugate with a history": (_complex().requires_grad_() * 2).conj,
    "conjugate of inference": _inference,
    "base of a conjugate": lambda: _complex().conj().conj(),
}


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_view_is_copied_with_its_bit(name: str) -> None:
    """The copy has the same values, bits, strides and history, in memory of its own."""
    original = LAZY[name]()
    assert why_not_copied([original]) is None
    (copy,) = copy_inputs([original])
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


# --- leaves of autograd's graph that are views


def _with_a_wrong_gradient(_: Any, __: list[Any]) -> Any:
    return lambda *inputs: (inputs[-1] * 3 - inputs[-1].detach(),)


@pytest.mark.parametrize("of_a_leaf", [False, True])
def test_the_gradient_of_a_leaf_that_is_a_view_is_compared(of_a_leaf: bool) -> None:
    """``x[2:].requires_grad_()`` is a leaf; the memory behind it is that of ``x``."""
    base = torch.arange(6.0, requires_grad=of_a_leaf)
    with torch.no_grad():
        x = base[2:]
    x.requires_grad_()
    assert x.is_leaf
    compiled = verified(backend=_with_a_wrong_gradient)(lambda x: x * 2)
    with pytest.warns(MiscompilationWarning, match="gradient of x: "):
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


def test_two_values_of_a_float_are_checked_and_all_others_trusted() -> None:
    compiled = verified(backend="aot_eager")(lambda x, n: x * n)
    for factor in (1.5, 2.5, 2.5, 3.5, 4.5, float("inf"), 6.5, 2.5):
        compiled(torch.ones(2), factor)
    assert [graph.checks for graph in compiled.stats().graphs] == [1, 2]


# --- calls that raise


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_call_that_raises_is_no_check(dynamic: bool) -> None:
    """The first call has a bad index; a wrong graph is found by the second."""
    backend = verified_backend(wrong)
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


@pytest.mark.parametrize(("limit", "status"), [(16, "verified"), (15, "unverified")])
def test_inputs_of_more_bytes_than_allowed_are_not_copied(limit: int, status: str) -> None:
    """Each storage counts once, and whole."""
    compiled = verified(backend="aot_eager", max_bytes=limit)(lambda x, y: x + y)
    x = torch.ones(4)
    compiled(x[:2], x[2:])
    (record,) = compiled.stats().graphs
    assert record.status == status
    reason = "" if status == "verified" else "it has 16 bytes of tensors, max_bytes is 15"
    assert record.reason == reason


# --- inputs that overlap and have no common storage


def test_slices_of_a_numpy_array_that_overlap_are_left_unverified() -> None:
    """AOTAutograd takes them to lie apart."""
    array = np.arange(10, dtype=np.float32)
    compiled = verified(backend="aot_eager")(lambda x, y: x.add_(1) + y)
    compiled(torch.from_numpy(array[:6]), torch.from_numpy(array[4:]))
    (record,) = compiled.stats().graphs
    assert record.status == "unverified"
    assert record.reason == "inputs overlap and have no common storage"


def windows(*parts: tuple[int, int]) -> list[torch.Tensor]:
    """Make windows of one buffer, of its elements from and to."""
    buffer = torch.arange(12.0)
    return [buffer[slice(*part)] for part in parts]


@pytest.mark.filterwarnings("ignore::torchguard.MiscompilationWarning")
@pytest.mark.parametrize("dynamic", [False, True])
def test_another_pattern_of_inputs_that_overlap_is_another_check(*, dynamic: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/139789"""

    def double_behind_a_write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    compiled = verified(backend="aot_eager", dynamic=dynamic)(double_behind_a_write)
    for parts in (((0, 5), (6, 11)), ((0, 5), (2, 7)), ((2, 7), (0, 5)), ((1, 6), (6, 11))):
        found, want = (windows(*parts) for _ in range(2))
        assert compiled(*found).tolist() == double_behind_a_write(*want).tolist(), parts
        assert [value.tolist() for value in found] == [value.tolist() for value in want]


def test_which_inputs_overlap_is_not_asked_if_none_is_written() -> None:
    compiled = verified(backend="aot_eager")(lambda x, y: (x * 2).add_(y))
    for parts in (((0, 5), (6, 11)), ((0, 5), (2, 7)), ((2, 7), (0, 5))):
        compiled(*windows(*parts))
    assert sum(graph.checks for graph in compiled.stats().graphs) == len(compiled.stats().graphs)


# --- operations that read what they write


def shifted(x: torch.Tensor) -> torch.Tensor:
    x[:, 1:] = x[:, :-1]
    return x + 1


def test_where_eager_alone_is_wrong_no_graph_is_blamed() -> None:
    backend = verified_backend("aot_eager")
    x = torch.arange(12.0).view(3, 4)
    expected = x.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(shifted, backend=backend)(x)
    expected[:, 1:] = expected[:, :-1].clone()
    assert x.equal(expected)
    assert [graph.status for graph in backend.stats().graphs] == ["verified"]


# --- memory that is not written


def test_free_memory_of_the_size_of_an_output_is_overwritten_first() -> None:
    """A kernel that leaves memory unwritten must not find the right values there by chance."""
    filled: list[Any] = []

    class Fills(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.fill_.Scalar:
                filled.append((args[0].untyped_storage().nbytes(), args[1]))
            return func(*args, **(kwargs or {}))

    seen: list[int] = []

    def compiled(x: torch.Tensor) -> torch.Tensor:
        seen.append(filled.count((160, 0xFF)))
        return x * 2

    reference = Outcome(outputs=[torch.ones(40)])
    with Fills():  # type: ignore[no-untyped-call]
        run_on_copies(compiled, [torch.ones(40)], reference=reference)
    assert seen[0] > 1
