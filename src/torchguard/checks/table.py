"""Which argument of which operator has to be in which range.

A row is read twice: by the check of an eager call, with tensors, and by the pass over a compiled
graph, with their nodes. ``sizes`` answers for both: the size of an argument
along a dim is a number, or a node where it is symbolic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torchguard._torch import computing_unseen

Given = Mapping[str, Any]
"""The arguments of a call, by name."""

Sizes = Callable[[str, Any], Any]
"""``sizes("weight", 0)`` is the size of an argument along a dim; None for its element count."""

Range = tuple[Any, Any]
"""The smallest and the largest value that is allowed; None where there is no such limit."""


class Check(NamedTuple):
    """One argument of a row and the values it may have."""

    argument: str
    range: Callable[[Given, Sizes], Range | None]
    """What is allowed, given the call's arguments; None if nothing is to be checked."""

    kind: str = "index"
    """``"index"``: integers. ``"value"``: real numbers. ``"divisor"``: not zero."""

    unread: Callable[[Given, Given], Any] | None = None
    """Which of the values are never read: a mask of tensor operations, or None if all are.

    It gets the arguments, and what knows their dims: the same, or fake tensors.
    """


class Row(NamedTuple):
    """A function of torch, by each of its names, with what is checked of its arguments."""

    names: tuple[str, ...]
    """``gather``: ``torch.gather``, and methods. ``F.``: ``functional``. ``nn.``: its builtins."""

    parameters: tuple[str, ...]
    checks: tuple[Check, ...]
    """None of them: each item of ``x[index]`` is checked, the second of the parameters."""


def _row(names: str, parameters: str, *checks: Check) -> Row:
    return Row(tuple(names.split()), tuple(parameters.split()), checks)


# ---- ranges ----


def _below(of: str, dim: int | None = 0) -> Callable[[Given, Sizes], Range]:
    return lambda _, sizes: (0, sizes(of, dim) - 1)


def wrapping(of: str, dim: int | None = None) -> Callable[[Given, Sizes], Range]:
    """Return the range of an index that counts from the end as well."""
    return lambda _, sizes: (-sizes(of, dim), sizes(of, dim) - 1)


def _along(given: Given, sizes: Sizes, *, wraps: bool = False, flat: bool = False) -> Range | None:
    """Return the range of an index into the dim that the call names."""
    dim = given.get("dim")
    # A dim by its name, and one that is missing, are errors of torch's own.
    if type(dim) is not int and not (flat and dim is None):
        return None
    size = sizes("input", dim)
    return (-size if wraps else 0), size - 1


def _always(low: Any, high: Any) -> Callable[[Given, Sizes], Range]:
    return lambda *_: (low, high)


def _classes(given: Given, sizes: Sizes) -> Range:
    return 0, sizes("input", 1 if given["input"].dim() > 1 else 0) - 1


def _one_hot(given: Given, _: Sizes) -> Range:
    count = given.get("num_classes", -1)
    return 0, (count - 1 if type(count) is int and count > 0 else None)


@functools.cache
def _counts_from_the_end() -> bool:
    """Whether ``take_along_dim`` does on this torch; ``torch.ops`` is checked by no scope."""
    try:
        with computing_unseen():
            both = torch.zeros(1, device="cpu"), torch.full((1,), -1, device="cpu")
            torch.ops.aten.take_along_dim(*both, 0)
    except RuntimeError:
        return False
    return True


def _take_along(given: Given, sizes: Sizes) -> Range | None:
    wraps = given.get("dim") is not None and _counts_from_the_end()  # never without a dim
    return _along(given, sizes, wraps=wraps, flat=True)


def _finite(given: Given, _: Sizes) -> Range:
    return 0.0, torch.finfo(given["input"].dtype).max


def _repeats(given: Given, _: Sizes) -> Range | None:
    """``repeat_interleave(repeats)`` takes the counts as its first argument."""
    return None if "repeats" in given else (0, None)


def _has_no_elements(tensor: torch.Tensor) -> bool:
    """Whether a size is 0; one that is a symbol counts as more."""
    return any(type(size) is int and size == 0 for size in tensor.shape)


def _not_zero(given: Given, _: Sizes) -> Range | None:
    """Integers can't be divided by zero; real numbers can."""
    both = (given.get("input"), given.get("other"))
    if any(isinstance(each, torch.Tensor) and _has_no_elements(each) for each in both):
        return None
    real = any(
        each.dtype.is_floating_point or each.dtype.is_complex
        if isinstance(each, torch.Tensor)
        else isinstance(each, (float, np.floating, torch.SymFloat))
        for each in both
    )
    return None if real else (1, None)


# ---- values that are never read ----


def _ignored(given: Given, _: Given) -> Any:
    return given["target"] == given.get("ignore_index", -100)


def _beyond_length(given: Given, fakes: Given) -> Any:
    """Of targets that are padded to one length, what lies beyond the length of each."""
    targets, lengths = given["targets"], given["target_lengths"]
    if fakes["targets"].dim() != 2:  # noqa: PLR2004
        return None
    if isinstance(lengths, (tuple, list)):
        lengths = torch.tensor(lengths)
    lengths = lengths.to(targets.device).reshape(-1, 1)
    return torch.arange(targets.size(1), device=targets.device) >= lengths


_INDEX = Check("index", _along)
_LABELS = Check("target", _classes, unread=_ignored)
_PROBABILITIES = (
    Check("input", _always(0.0, 1.0), kind="value"),
    Check("target", _always(0.0, 1.0), kind="value"),
)
_CTC = (
    Check("targets", _below("log_probs", -1), unread=_beyond_length),
    Check("input_lengths", lambda _, sizes: (0, sizes("log_probs", 0))),
    Check("target_lengths", _always(0, None)),
)
_BAG = (
    Check("indices", _below("weight")),
    Check("offsets", lambda _, sizes: (0, sizes("indices", 0))),
)
_DIVISOR = Check("other", _not_zero, kind="divisor")
# Without a rounding mode the quotients of integers are real numbers.
_QUOTIENT = _DIVISOR._replace(
    range=lambda given, sizes: _not_zero(given, sizes) if given.get("rounding_mode") else None
)
_LOSS = "input target weight size_average ignore_index"

ROWS = (
    # Builtins that torch.nn.functional calls, and the functions that Dynamo's graphs call instead.
    _row("embedding", "weight indices", Check("indices", _below("weight"))),
    _row("F.embedding", "input weight", Check("input", _below("weight"))),
    _row("embedding_renorm_", "weight indices", Check("indices", wrapping("weight", 0))),
    _row("embedding_bag", "weight indices offsets", *_BAG),
    _row("F.embedding_bag", "input weight offsets", Check("input", _below("weight"))),
    _row("nn.one_hot", "tensor num_classes", Check("tensor", _one_hot)),
    _row("nn.cross_entropy_loss", "input target weight reduction ignore_index", _LABELS),
    _row("nn.nll_loss_nd", "input target weight reduction ignore_index", _LABELS),
    _row("F.cross_entropy F.nll_loss", _LOSS, _LABELS),
    _row("nn.binary_cross_entropy F.binary_cross_entropy", "input target", *_PROBABILITIES),
    _row("ctc_loss F.ctc_loss", "log_probs targets input_lengths target_lengths", *_CTC),
    # Each of these as a function, a method, and a method that writes in place.
    _row("index_select gather", "input dim index", _INDEX),
    _row("scatter scatter_add scatter_reduce", "input dim index src", _INDEX),
    _row("index_add index_copy index_reduce", "input dim index source", _INDEX),
    _row(
        "index_fill",
        "input dim index value",
        Check("index", functools.partial(_along, wraps=True)),
    ),
    _row("take_along_dim", "input indices dim", Check("indices", _take_along)),
    _row("take put", "input index source", Check("index", wrapping("input"))),
    _row("multinomial", "input num_samples", Check("input", _finite, kind="value")),
    _row("bincount", "input weights minlength", Check("input", _always(0, None))),
    _row(
        "repeat_interleave",
        "input repeats dim",
        Check("repeats", _always(0, None)),
        Check("input", _repeats),
    ),
    _row("floor_divide remainder fmod __mod__ __ifloordiv__ __imod__", "input other", _DIVISOR),
    _row("div divide", "input other rounding_mode", _QUOTIENT),
)
"""Every operator that is checked, but for ``x[index]`` and the sparse constructors."""

INDEXING = {
    "__getitem__": _row("", "input index")._replace(names=("x[index]",)),
    "__setitem__": _row("", "input index value")._replace(names=("x[index] = ...",)),
    "index_put": _row("index_put", "input indices values"),
    "index_put_": _row("index_put_", "input indices values"),
}
"""By function, the rows whose checks depend on the index of a call."""
