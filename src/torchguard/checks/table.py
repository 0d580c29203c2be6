"""Which argument of which operator has to be in which range.

A row is read twice: by the check of an eager call, with tensors, and by the pass over a compiled
graph, with the nodes that stand for them. ``sizes`` answers for both: the size of an argument
along a dim is a number, or a node where it is symbolic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Sizes = Callable[[str, Any], Any]
"""``sizes("weight", 0)`` is the size of an argument along a dim; None for its element count."""

Range = tuple[Any, Any]
"""The smallest and the largest value that is allowed; None where there is no such limit."""


class Check(NamedTuple):
    """One argument of a row and the values it may have."""

    argument: str
    range: Callable[[Mapping[str, Any], Sizes], Range | None]
    """What is allowed, given the call's arguments; None if nothing is to be checked."""

    kind: str = "index"
    """``"index"``: integers. ``"value"``: real numbers. ``"divisor"``: not zero."""

    unread: Callable[[Mapping[str, Any]], Any] | None = None
    """Which of the values are never read: a mask of tensor operations, or None if all are."""


class Row(NamedTuple):
    """A function of torch, by each of its names, with what is checked of its arguments."""

    names: tuple[str, ...]
    """``gather`` stands for ``torch.gather`` and the method; ``nn.`` for functional ones."""

    parameters: tuple[str, ...]
    checks: tuple[Check, ...]


def _row(names: str, parameters: str, *checks: Check) -> Row:
    return Row(tuple(names.split()), tuple(parameters.split()), checks)


def _along(dim: str, of: str = "input") -> Callable[[Mapping[str, Any], Sizes], Range | None]:
    """Return the range of indices into a dim; the kernels take no negative ones here."""

    def find(given: Mapping[str, Any], sizes: Sizes) -> Range | None:
        at = given.get(dim)
        # A dim by its name, and one that is missing, are errors of torch's own.
        return (0, sizes(of, at) - 1) if type(at) is int else None

    return find


def _rows_of(of: str, dim: int = 0) -> Callable[[Mapping[str, Any], Sizes], Range | None]:
    return lambda _, sizes: (0, sizes(of, dim) - 1)


def _along_wrapping(given: Mapping[str, Any], sizes: Sizes) -> Range | None:
    """Return the range of ``index_fill``, which counts from the end as well."""
    at = given.get("dim")
    if type(at) is not int:
        return None
    count = sizes("input", at)
    return -count, count - 1


def _wrapping_rows(_: Mapping[str, Any], sizes: Sizes) -> Range:
    count = sizes("weight", 0)
    return -count, count - 1


def _wrapping(_: Mapping[str, Any], sizes: Sizes) -> Range:
    """Return the range of ``take`` and ``put_``, which count elements, from the end as well."""
    count = sizes("input", None)
    return -count, count - 1


def _along_or_flat(given: Mapping[str, Any], sizes: Sizes) -> Range | None:
    dim = given.get("dim")
    return (0, sizes("input", dim) - 1) if dim is None or type(dim) is int else None


def _ignored(given: Mapping[str, Any]) -> Any:
    return given["target"] == given.get("ignore_index", -100)


def _beyond_length(given: Mapping[str, Any]) -> Any:
    """Of targets that are padded to one length, what lies beyond the length of each."""
    targets = given["targets"]
    if targets.dim() != _PADDED:
        return None
    lengths = torch.as_tensor(given["target_lengths"], device=targets.device)
    return torch.arange(targets.size(1), device=targets.device) >= lengths.unsqueeze(-1)


_PADDED = 2


def _repeats(given: Mapping[str, Any], _: Sizes) -> Range | None:
    """``repeat_interleave(repeats)`` has them in the first place."""
    return None if "repeats" in given else (0, None)


@functools.cache
def _checks_soft_labels() -> bool:
    """Whether torch refuses a target that is no probability, as releases since 2.7 do."""
    try:
        torch.nn.functional.binary_cross_entropy(torch.full((1,), 0.5), torch.full((1,), 2.0))
    except RuntimeError:
        return True
    return False


def _soft_labels(_: Mapping[str, Any], __: Sizes) -> Range | None:
    return (0.0, 1.0) if _checks_soft_labels() else None


def _classes(given: Mapping[str, Any], sizes: Sizes) -> Range | None:
    """Return the range of labels; a target of probabilities has none."""
    return 0, sizes("input", 1 if given["input"].dim() > 1 else 0) - 1


def _one_hot(given: Mapping[str, Any], _: Sizes) -> Range:
    count = given.get("num_classes", -1)
    return 0, (count - 1 if type(count) is int and count > 0 else None)


def _not_negative(_: Mapping[str, Any], __: Sizes) -> Range:
    return 0, None


def _unit(_: Mapping[str, Any], __: Sizes) -> Range:
    return 0.0, 1.0


def _finite_weights(given: Mapping[str, Any], _: Sizes) -> Range:
    return 0.0, torch.finfo(given["input"].dtype).max


def _not_zero(given: Mapping[str, Any], _: Sizes) -> Range | None:
    """Integers can't be divided by zero; real numbers can."""
    if given.get("rounding_mode", "floor") is None:
        return None  # torch.div then divides real numbers
    both = (given.get("input"), given.get("other"))
    real = any(
        type(each) is float or (isinstance(each, torch.Tensor) and _is_real(each)) for each in both
    )
    return None if real else (None, None)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


_INDEX = Check("index", _along("dim"))
_ELEMENT = Check("index", _wrapping)
_LABELS = Check("target", _classes, unread=_ignored)
_DIVISOR = Check("other", _not_zero, kind="divisor")
_IDS = Check("input", _rows_of("weight"))
_IDS_OF = Check("indices", _rows_of("weight"))
_OFFSETS = Check("offsets", lambda _, sizes: (0, sizes("indices", 0)))

_PROBABILITIES = (
    Check("input", _unit, kind="value"),
    Check("target", _soft_labels, kind="value"),
)
_LOSS = "input target weight size_average ignore_index"
_CTC = (
    Check("targets", _rows_of("log_probs", -1), unread=_beyond_length),
    Check("input_lengths", lambda _, sizes: (0, sizes("log_probs", 0))),
    Check("target_lengths", _not_negative),
)
_REPEATS = (Check("repeats", _not_negative), Check("input", _repeats))
_BAG = "weight indices offsets"

ROWS = (
    # What torch.nn.functional calls below, and what Dynamo writes into its graphs instead.
    _row("embedding", "weight indices", _IDS_OF),
    _row("nn.embedding", "input weight", _IDS),
    _row("embedding_renorm_", "weight indices", Check("indices", _wrapping_rows)),
    _row("embedding_bag", _BAG, _IDS_OF, _OFFSETS),
    _row("nn.embedding_bag", "input weight offsets", _IDS),
    _row("nn.one_hot", "tensor num_classes", Check("tensor", _one_hot)),
    _row("_C.cross_entropy_loss", "input target weight reduction ignore_index", _LABELS),
    _row("_C.nll_loss_nd", "input target weight reduction ignore_index", _LABELS),
    _row("nn.cross_entropy nn.nll_loss", _LOSS, _LABELS),
    _row("_C.binary_cross_entropy nn.binary_cross_entropy", "input target", *_PROBABILITIES),
    _row("ctc_loss nn.ctc_loss", "log_probs targets input_lengths target_lengths", *_CTC),
    # Each of these as a function, a method, and a method that writes in place.
    _row("index_select", "input dim index", _INDEX),
    _row("gather", "input dim index", _INDEX),
    _row("take", "input index", _ELEMENT),
    _row("take_along_dim", "input indices dim", Check("indices", _along_or_flat)),
    _row("scatter scatter_add scatter_reduce", "input dim index src", _INDEX),
    _row("index_add index_copy index_reduce", "input dim index source", _INDEX),
    _row("index_fill", "input dim index value", Check("index", _along_wrapping)),
    _row("put", "input index source", _ELEMENT),
    _row("multinomial", "input num_samples", Check("input", _finite_weights, kind="value")),
    _row("bincount", "input weights minlength", Check("input", _not_negative)),
    _row("repeat_interleave", "input repeats dim", *_REPEATS),
    _row(
        "floor_divide remainder fmod __floordiv__ __mod__ __ifloordiv__ __imod__",
        "input other",
        _DIVISOR,
    ),
    _row("div divide", "input other rounding_mode", _DIVISOR),
)
"""Every operator that is checked, but for ``x[index]`` and the sparse constructors."""
