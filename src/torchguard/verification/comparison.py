"""What two runs of one graph differ in, and what may differ by rounding alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchguard.verification.outcome import Outcome
from torchguard.verification.strides import same_strides

__all__ = ["Difference", "apart", "as_double", "differences", "same"]

# Relative and absolute tolerances: those of torch.testing.assert_close, and one unit in the
# last place of the 8-bit types.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
_EIGHT_BITS = (0.26, 1e-2)

_MULTIPLE = 4.0
"""How many times eager's own rounding error the compiled result may be off."""

_TRUSTED = 0.05
"""A reference further away from eager than this, relative to its size, computed something else."""


@dataclass(frozen=True)
class Difference:
    """One thing that the compiled graph does otherwise than eager."""

    where: str
    """``output 0``, ``input 1 after the call``, ``gradient of input 2``."""

    what: str
    largest: float | None = None
    """The largest absolute difference of the values; None if it isn't one of numbers."""

    tensor: tuple[str, int] | None = None
    """Where in an outcome the tensor is whose finite values differ; None if anything else does."""

    strides: tuple[int, tuple[int, ...]] | None = None
    """An output whose strides alone have been compared so far, and eager's strides of it."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def differences(
    eager: Outcome, compiled: Outcome, reference: Callable[[], Outcome | None]
) -> list[Difference]:
    """Return what differs; empty if the compiled graph is right.

    ``reference`` makes the outcome in double precision. It is asked only where values
    differ by more than the tolerance of their dtype.
    """
    if eager.error is not None or compiled.error is not None:
        return _errors("the run", eager.error, compiled.error)
    if len(eager.outputs) != len(compiled.outputs):
        what = f"{len(compiled.outputs)} outputs where eager has {len(eager.outputs)}"
        return [Difference("the run", what)]
    reference = functools.cache(reference)
    found = _all("outputs", eager.outputs, compiled.outputs, reference)
    found += _all("inputs", eager.inputs, compiled.inputs, reference)
    found += _sharing(eager, compiled)
    if found or eager.backward_error is not None:
        return found  # eager has no gradients to compare with, or the outputs are wrong already
    if compiled.backward_error is not None:
        return _errors("the backward pass", None, compiled.backward_error)
    if eager.gradients is None or compiled.gradients is None:
        return found
    return _all("gradients", *_zeros_for_none(eager.gradients, compiled.gradients), reference)


_NAMES = {
    "outputs": "output {}",
    "inputs": "input {} after the call",
    "gradients": "gradient of input {}",
}


def _part(reference: Callable[[], Outcome | None], name: str) -> list[Any] | None:
    outcome = reference()
    if outcome is None or outcome.error is not None or outcome.backward_error is not None:
        return None
    values: list[Any] | None = getattr(outcome, name)
    return values


def _errors(where: str, eager: Exception | None, compiled: Exception | None) -> list[Difference]:
    if (eager is None) == (compiled is None):
        return []
    if eager is None:
        return [Difference(where, f"raises {_shown(compiled)}, eager does not")]
    return [Difference(where, f"does not raise, eager raises {_shown(eager)}")]


def _shown(error: Exception | None) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _zeros_for_none(
    eager: list[torch.Tensor | None], compiled: list[torch.Tensor | None]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """No gradient and a gradient of zeros are the same number."""
    pairs = list(zip(eager, compiled, strict=True))
    return (
        [torch.zeros_like(b) if a is None and b is not None else a for a, b in pairs],
        [torch.zeros_like(a) if b is None and a is not None else b for a, b in pairs],
    )


def _sharing(eager: Outcome, compiled: Outcome) -> list[Difference]:
    found = [
        Difference(name, f"shares memory with {other}, in eager it does not")
        for name, other in sorted(compiled.sharing - eager.sharing)
    ]
    return found + [
        Difference(name, f"does not share memory with {other}, in eager it does")
        for name, other in sorted(eager.sharing - compiled.sharing)
    ]


def _all(
    part: str, eager: list[Any], compiled: list[Any], reference: Callable[[], Outcome | None]
) -> list[Difference]:
    found = []
    for position, (expected, actual) in enumerate(zip(eager, compiled, strict=True)):
        where = _NAMES[part].format(position)
        what = _compare_kinds(expected, actual)
        if what is not None:
            found.append(Difference(where, what))
            continue
        if not isinstance(expected, torch.Tensor) or expected.layout is not torch.strided:
            continue
        # Autograd gives a leaf's gradient the leaf's own strides.
        if part != "gradients" and not same_strides(expected, actual):
            what = f"strides {actual.stride()}, eager has {expected.stride()}"
            wanted = (position, expected.stride()) if part == "outputs" else None
            found.append(Difference(where, what, strides=wanted))
            continue

        def exact(position: int = position) -> Any:
            values = _part(reference, part)
            return None if values is None else values[position]

        difference = _compare_values(expected.detach(), actual.detach(), exact)
        if difference is not None:
            what, largest, finite = difference
            tensor = (part, position) if finite else None
            found.append(Difference(where, what, largest, tensor))
    return found


def _compare_kinds(expected: Any, actual: Any) -> str | None:
    """Compare all but the values and strides of tensors; return what differs."""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor):
            return f"a {type(actual).__name__}, eager has a {type(expected).__name__}"
        right = expected == actual or (expected != expected and actual != actual)  # noqa: PLR0124 - NaN
        return None if right else f"{actual!r}, eager has {expected!r}"
    for name in ("shape", "dtype", "device", "layout", "requires_grad"):
        want, got = getattr(expected, name), getattr(actual, name)
        if want != got:
            return f"{name} {_plain(got)}, eager has {_plain(want)}"
    return None


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value


def same(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether all values are equal within the tolerance of their dtype, NaN where there is NaN."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, actual)
    relative, absolute = _TOLERANCES.get(expected.dtype, _EIGHT_BITS)
    wide = as_double(expected), as_double(actual)
    return torch.allclose(wide[1], wide[0], relative, absolute, equal_nan=True)


def apart(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Return, for each number, whether the two are further apart than the tolerance."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return expected != actual
    relative, absolute = _TOLERANCES.get(expected.dtype, _EIGHT_BITS)
    return ~torch.isclose(as_double(actual), as_double(expected), relative, absolute, True)


def as_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers in double precision, of a complex tensor both parts."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().to(torch.complex128))
    return tensor.to(torch.float64)


def _compare_values(
    expected: torch.Tensor, actual: torch.Tensor, reference: Callable[[], Any]
) -> tuple[str, float | None, bool] | None:
    """Return what differs, by how much at most, and whether all of it is finite numbers."""
    if same(expected, actual):
        return None
    exact = reference()
    if isinstance(exact, torch.Tensor) and exact.shape == expected.shape:
        exact = exact.detach()
        if expected.is_floating_point() or expected.is_complex():
            if _as_near(expected, actual, exact):
                return None
        elif exact.dtype == actual.dtype and torch.equal(exact, actual):
            return None
    return _describe(expected, actual)


def _as_near(expected: torch.Tensor, actual: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the compiled result is about as near to the exact one as eager's is."""
    wide, narrow, true = as_double(expected), as_double(actual), as_double(exact)
    places = torch.isfinite(true)
    for values in (wide, narrow):
        if not torch.equal(torch.isfinite(values), places):
            return False
        if not torch.equal(values[~places].nan_to_num(), true[~places].nan_to_num()):
            return False
    wide, narrow, true = wide[places], narrow[places], true[places]
    if not true.numel():
        return True
    eager_error = (wide - true).abs()
    if eager_error.square().mean() > (_TRUSTED**2) * true.square().mean():
        return False  # it is no reference for this graph
    relative, absolute = _TOLERANCES.get(expected.dtype, _EIGHT_BITS)
    allowed = torch.clamp(absolute + relative * true.abs(), min=_MULTIPLE * eager_error.max())
    return bool(((narrow - true).abs() <= allowed).all())


def _describe(expected: torch.Tensor, actual: torch.Tensor) -> tuple[str, float | None, bool]:
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = expected != actual
        if expected.dtype == torch.bool:
            return _counted(wrong), None, True
        off = float((expected.to(torch.float64) - actual.to(torch.float64)).abs().max())
        return f"{_counted(wrong)}, the largest by {off:.3g}", off, True
    wide, narrow = as_double(expected), as_double(actual)
    for name, test in (("NaN", torch.isnan), ("infinite", torch.isinf)):
        wrong = test(wide) != test(narrow)
        if wrong.any():
            text = f"{int(wrong.sum())} of {wrong.numel()} elements are {name} in one only"
            return text, None, False
    relative, absolute = _TOLERANCES.get(expected.dtype, _EIGHT_BITS)
    wrong = ~torch.isclose(narrow, wide, relative, absolute, equal_nan=True)
    off = float((wide - narrow).abs().nan_to_num().max())
    return f"{_counted(wrong)}, the largest by {off:.3g}", off, True


def _counted(wrong: torch.Tensor) -> str:
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ"
