"""Do two runs agree: outputs, gradients, buffers; and what to say where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchguard.bucketing.decorator.trees import is_leaf, spelled
from torchguard.bucketing.decorator.verification import Run
from torchguard.errors import PaddingLeakError

__all__ = ["Verdict", "Wording", "compared"]

# Differences that rounding alone makes, as a share of the largest value. Sums over a padded
# length are taken in another order, so they are not exact.
_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 5e-5,
    torch.complex64: 5e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
_COARSEST = 0.1  # of dtypes with fewer bits
# A gradient that is zero but for rounding is measured by the largest of all.
_OF_LARGEST = 1e-2


class Verdict(NamedTuple):
    """What a comparison has found."""

    error: PaddingLeakError | None
    strain: float
    """The largest difference as a share of what is allowed; 0 means equal to the last bit."""


class Wording(NamedTuple):
    """What an error says besides what differs."""

    what: str
    """The sizes, and what is in the padding."""
    function: str
    modules: Sequence[torch.nn.Module]
    masked: tuple[str, ...] = ()
    """The masks that the call has."""
    others: tuple[str, ...] = ()
    """The inputs that have other data than the caller's."""


def compared(expected: Run, got: Run, said: Wording) -> Verdict:
    """Compare two runs."""
    try:
        strain = _compared(expected, got, said)
    except PaddingLeakError as error:
        return Verdict(error, float("inf"))
    return Verdict(None, strain)


def _compared(expected: Run, got: Run, said: Wording) -> float:
    """Return the strain.

    Raises:
        PaddingLeakError: naming what differs, and by how much.
    """
    function, what = said.function, said.what
    if [path for path, _ in expected.leaves] != [path for path, _ in got.leaves]:
        raise PaddingLeakError(
            f"bucketed: {function} returns another structure when its input is padded ({what})"
        )
    comparison = _Comparison(f"({what}). {_causes(expected.operators | got.operators, said)}")
    for (path, wanted), (_, value) in zip(expected.leaves, got.leaves, strict=True):
        where = f"{spelled('output', path, expected.output)} of {function}"
        if not isinstance(wanted, torch.Tensor):
            if is_leaf(wanted) and wanted != value and not (wanted != wanted and value != value):  # noqa: PLR0124
                raise PaddingLeakError(
                    f"bucketed: {where} is {value!r} with padding and {wanted!r} without "
                    f"{comparison.ending}"
                )
            continue
        if wanted.shape != value.shape:
            raise PaddingLeakError(
                f"bucketed: {where} has shape {tuple(value.shape)} cut out of a padded run, and "
                f"{tuple(wanted.shape)} without padding ({what}): say in outputs= how long it is"
            )
        comparison.tensors(wanted, value, where)
    _compare_gradients(expected, got, comparison, function)
    for name in expected.buffers.keys() | got.buffers.keys():
        # One that only one of the runs has written is in the other as it was before.
        before = got.before.get(name, expected.before.get(name))
        wanted = expected.buffers.get(name, before)
        value = got.buffers.get(name, before)
        # A buffer as long as the input, such as a table of positions, is no statistic.
        if wanted is not None and value is not None and wanted.shape == value.shape:
            comparison.tensors(wanted, value, f"the buffer {name} that {function} writes")
    return comparison.strain


def _compare_gradients(expected: Run, got: Run, comparison: _Comparison, function: str) -> None:
    values = [each.value for each in expected.gradients.values() if each.value is not None]
    scale = _OF_LARGEST * max(map(_largest, values), default=0.0)
    for key in {**expected.gradients, **got.gradients}:
        one, other = expected.gradients.get(key), got.gradients.get(key)
        found = one or other
        assert found is not None
        if (one is None or other is None) and not found.known:
            continue  # a leaf that this run has made: nobody sees its gradient
        wanted = None if one is None else one.value
        value = None if other is None else other.value
        if wanted is None and value is None:
            continue
        zero = value if wanted is None else wanted
        assert zero is not None
        comparison.tensors(
            torch.zeros_like(zero) if wanted is None else wanted,
            torch.zeros_like(zero) if value is None else value,
            f"the gradient of {found.name} in {function}",
            scale=scale,
        )


class _Comparison:
    """Compares tensors and keeps the largest strain.

    Args:
        ending: of the error.
    """

    def __init__(self, ending: str) -> None:
        self.ending = ending
        self.strain = 0.0

    def tensors(
        self, wanted: torch.Tensor, value: torch.Tensor, where: str, *, scale: float = 0.0
    ) -> None:
        """Compare two tensors of one shape.

        Raises:
            PaddingLeakError: they differ by more than rounding.
        """
        if wanted.dtype.is_floating_point or wanted.dtype.is_complex:
            tolerance = _TOLERANCES.get(wanted.dtype, _COARSEST)
            allowed = tolerance * max(_largest(wanted), scale)
            wide = torch.complex128 if wanted.dtype.is_complex else torch.float64
            a, b = wanted.to(wide), value.to(wide)
            # Infinities and NaN have to be in the same places.
            same = (a == b) | (a.isnan() & b.isnan())
            difference = torch.where(same, torch.zeros_like(a), a - b).abs()
        else:
            allowed = 0.0
            difference = (wanted != value).to(torch.float64)
        largest = float(difference.max()) if difference.numel() else 0.0
        if largest <= allowed:  # NaN is not
            if largest:
                self.strain = max(self.strain, largest / allowed)
            return
        raise PaddingLeakError(
            f"bucketed: padding changes {where}: largest difference {largest:.3g}, where the "
            f"largest value is {_largest(wanted):.3g} {self.ending}"
        )


def _largest(tensor: torch.Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    size = tensor.abs() if tensor.dtype != torch.bool else tensor.to(torch.int8)
    size = size.to(torch.float64)
    return float(size[size.isfinite()].max()) if bool(size.isfinite().any()) else 0.0


_BATCH_NORM = "BatchNorm in training mode, whose statistics include the padding"
_BATCH_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)
# By the beginnings of operators' names.
_CULPRITS = (
    (("native_batch_norm", "_native_batch_norm", "_batch_norm", "cudnn_batch_norm"), _BATCH_NORM),
    (("mean", "var", "std"), "a mean or variance over the padded dim"),
    (
        ("_softmax", "_log_softmax", "_scaled_dot_product"),
        "softmax or attention without a mask",
    ),
    (
        ("sum", "norm", "linalg_vector_norm", "amax", "amin", "max", "mse_loss"),
        "a sum, maximum or loss over the padded dim without weights",
    ),
)


def _causes(operators: set[str], said: Wording) -> str:
    """Name the usual culprits, those that have run, and what to write."""
    if said.others:
        fills = ", ".join(f"{label!r}: 0" for label in said.others)
        return (
            "So 0 in the padding is not neutral: pass a mask (mask=) or the true sizes (lengths=); "
            "or write in fill= a value that changes nothing, such as -inf for a maximum and inf "
            f"for a minimum; fill={{{fills}}} says that such data never comes"
        )
    names = [name.removeprefix("aten::") for name in operators]
    trains = not said.modules or any(
        isinstance(m, _BATCH_NORMS) and m.training for m in said.modules
    )
    found = [
        culprit
        for beginnings, culprit in _CULPRITS
        if any(name.startswith(beginnings) for name in names) and (culprit != _BATCH_NORM or trains)
    ]
    if not found:
        found = ["a mean, a softmax without a mask, BatchNorm in training mode"]
    if said.masked:
        advice = (
            f"{' and '.join(said.masked)} was given: something in {said.function} does not use it, "
            "or a loss reads positions that it masks (labels there: fill={'labels': -100}). Pass "
            "the true sizes (lengths=)"
        )
    else:
        advice = "Pass the function a mask (mask=) or the true sizes (lengths=)"
    return (
        f"Usual causes, seen here: {'; '.join(found)}. {advice}; if what the padding holds means "
        "something to it, say so in fill="
    )
