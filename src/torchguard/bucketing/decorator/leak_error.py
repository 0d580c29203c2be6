"""Say what padding has changed, and what a user can do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchguard.equivalence.compare import Difference
from torchguard.equivalence.outcome import Outcome
from torchguard.errors import PaddingLeakError

__all__ = ["Context", "leak_error"]


class Context(NamedTuple):
    """What an error says besides what differs."""

    what: str
    """The sizes, and what is in the padding."""
    function: str
    """Its name."""
    modules: Sequence[torch.nn.Module]
    """Those it can reach."""
    masks: Sequence[str]
    """The ones that the call has."""
    others: Sequence[str]
    """The inputs that have other data than the caller's."""


def leak_error(
    found: Difference, expected: Outcome, got: Outcome, context: Context
) -> PaddingLeakError:
    """Return the error for a difference between a run and one with more, or other, padding.

    The structure of both outcomes is an :class:`torchguard.bucketing.decorator.outputs.Output`.
    """
    return PaddingLeakError(_message(found, expected, got, context))


def _message(found: Difference, expected: Outcome, got: Outcome, context: Context) -> str:
    """Name what differs, and by how much."""
    what, function = context.what, context.function
    if found.kind == "shape" and found.part == "structure":
        return f"bucketed: {function} returns another structure when its input is padded ({what})"
    operators = expected.operators | got.operators
    advice = _not_neutral(context.others) if context.others else _causes(operators, context)
    ending = f"({what}). {advice}"
    if found.part == "outputs":
        where = f"{expected.structure.label(found.key)} of {function}"
        wanted, value = (run.outputs[found.key] for run in (expected, got))
        if found.kind == "value":
            return f"bucketed: {where} is {value!r} with padding and {wanted!r} without {ending}"
        if found.kind == "shape":
            return (
                f"bucketed: {where} has shape {tuple(value.shape)} cut out of a padded run, and "
                f"{tuple(wanted.shape)} without padding ({what}): say in outputs= how long it is"
            )
    elif found.part == "gradients":
        gradients = {**got.gradients, **expected.gradients}
        where = f"the gradient of {gradients[found.key].name} in {function}"
    else:
        where = f"the buffer {found.key} that {function} writes"
    return (
        f"bucketed: padding changes {where}: largest difference {found.largest:.3g}, where the "
        f"largest value is {found.scale:.3g} {ending}"
    )


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


def _not_neutral(others: Sequence[str]) -> str:
    fills = ", ".join(f"{label!r}: 0" for label in others)
    return (
        "So 0 in the padding is not neutral: pass a mask (mask=) or the true sizes (lengths=); "
        "or write in fill= a value that changes nothing, such as -inf for a maximum and inf "
        f"for a minimum; fill={{{fills}}} says that such data never comes"
    )


def _causes(operators: frozenset[str], context: Context) -> str:
    """Name the usual culprits, those that have run, and what to write."""
    _, function, modules, masks, _ = context
    names = [name.removeprefix("aten::") for name in operators]
    trains = not modules or any(isinstance(m, _BATCH_NORMS) and m.training for m in modules)
    found = [
        culprit
        for beginnings, culprit in _CULPRITS
        if any(name.startswith(beginnings) for name in names) and (culprit != _BATCH_NORM or trains)
    ]
    if not found:
        found = ["a mean, a softmax without a mask, BatchNorm in training mode"]
    if masks:
        advice = (
            f"{' and '.join(masks)} was given: something in {function} does not use it, "
            "or a loss reads positions that it masks (labels there: fill={'labels': -100}). Pass "
            "the true sizes (lengths=)"
        )
    else:
        advice = "Pass the function a mask (mask=) or the true sizes (lengths=)"
    return (
        f"Usual causes, seen here: {'; '.join(found)}. {advice}; if what the padding holds means "
        "something to it, say so in fill="
    )
