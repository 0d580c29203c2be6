"""Values out of range that are used as they are: a read out of bounds, or a wrong result."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch.nn import functional

from torchguard.defects.catalog import Defect

# --- ctc-target

_CLASSES = 3


def _loss(beyond: float) -> float:
    """Return the loss of a target one past the last class, with ``beyond`` in memory there."""
    # T = 2 steps, N = 1 sequence; the classes are the first columns of a wider tensor, so
    # the read out of bounds lands in memory of ours.
    memory = torch.full((2, 1, 2 * _CLASSES), -1.0)
    memory[..., _CLASSES:] = beyond
    log_probs = memory[..., :_CLASSES]
    lengths = torch.tensor([2]), torch.tensor([1])
    return functional.ctc_loss(log_probs, torch.tensor([[_CLASSES]]), *lengths).item()


def _ctc_target() -> str | None:
    """Compute one loss twice: only memory that the loss must not read is different.

    ``ctc_loss`` on CPU reads out of bounds when a target is no class.

    The CPU kernel uses the target as an index into ``log_probs`` without comparing
    it with the number of classes: a target slightly out of range returns a loss made
    of whatever memory follows, one far out of range kills the process.
    """
    try:
        first, second = _loss(-2.0), _loss(-4.0)
    except (RuntimeError, IndexError, ValueError):
        return None
    if first == second:
        return None
    return f"target 3 of classes 0 to 2: loss {first:.3g} or {second:.3g}, by the memory behind"


CTC_TARGET = Defect(
    id="ctc-target",
    summary="ctc_loss on CPU does not check targets: a loss from foreign memory, or a crash",
    upstream=("https://github.com/pytorch/pytorch/issues/193794",),
    family="memory",
    probe=_ctc_target,
    advice="Check targets first: assert 0 <= targets.min() and targets.max() < log_probs.size(-1).",
)


# --- csr-unchecked

_COLUMNS = 3


def _product(beyond: float) -> float:
    """Return a (1, 3) @ (3, 1) product whose column index is 3, with ``beyond`` in memory there."""
    # The dense factor is the start of a longer tensor, so the read out of bounds lands in
    # memory of ours.
    memory = torch.zeros(4 * _COLUMNS, 1)
    memory[_COLUMNS:] = beyond
    sparse = torch.sparse_csr_tensor(
        torch.tensor([0, 1]), torch.tensor([_COLUMNS]), torch.ones(1), size=(1, _COLUMNS)
    )
    return (sparse @ memory[:_COLUMNS]).item()


def _csr_unchecked() -> str | None:
    """Compute one product twice: only memory that it must not read is different.

    A product with a sparse CSR tensor reads out of bounds when an index is wrong.

    ``torch.sparse_csr_tensor`` does not check its indices by default, because that
    takes time, and the products trust them: a column index past the last column
    reads the memory behind the dense factor.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that CSR support is in beta state
        try:
            first, second = _product(1.0), _product(2.0)
        except (RuntimeError, IndexError, ValueError):
            return None
    if first == second:
        return None
    return f"column 3 of columns 0 to 2: product {first:g} or {second:g}, by the memory behind"


CSR_UNCHECKED = Defect(
    id="csr-unchecked",
    summary="sparse CSR indices are not checked: a product reads out of bounds",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/190045",
        "https://github.com/pytorch/pytorch/issues/141004",
        "https://github.com/pytorch/pytorch/issues/195547",
    ),
    family="memory",
    probe=_csr_unchecked,
    advice="Build sparse tensors under `with torch.sparse.check_sparse_tensor_invariants():`.",
)


# --- checks-lost

_CHECKED = ("index_select", "index_add", "index_copy", "binary_cross_entropy")
"""The operators of ``_call_checked_operators``, in the order of its arguments."""


def _call_checked_operators(
    selected: torch.Tensor, added: torch.Tensor, copied: torch.Tensor, chance: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    rows = torch.ones(3, 2)
    return (
        rows.index_select(0, selected),
        rows.index_add(0, added, rows[:1]),
        rows.index_copy(0, copied, rows[:1]),
        functional.binary_cross_entropy(chance, torch.ones(1)),
    )


def _checks_lost() -> str | None:
    """Call each operator with the one input that eager rejects.

    Eager raises, the compiled function returns a value.

    The decompositions that inductor compiles leave out what the eager kernels check.
    ``index_select``, ``index_add`` and ``index_copy`` become plain indexing, where -1 is the
    last row: a padding id of -1 reads or writes a real row. ``binary_cross_entropy`` becomes
    two logarithms, and the test of its range is a comment in the decomposition.
    """
    first, last = torch.tensor([0]), torch.tensor([-1])
    valid = [first, first.clone(), first.clone(), torch.tensor([0.5])]
    invalid = [last, last.clone(), last.clone(), torch.tensor([1.5])]
    compiled = torch.compile(_call_checked_operators)
    compiled(*valid)  # a failing compilation must not pass for a check that is kept
    lost = []
    for position, name in enumerate(_CHECKED):
        inputs = [*valid[:position], invalid[position], *valid[position + 1 :]]
        if _raises(_call_checked_operators, inputs) and not _raises(compiled, inputs):
            lost.append(name)
    return f"accepted where eager raises: {', '.join(lost)}" if lost else None


def _raises(function: Callable[..., object], inputs: list[torch.Tensor]) -> bool:
    try:
        function(*inputs)
    except (IndexError, RuntimeError):
        return True
    return False


CHECKS_LOST = Defect(
    id="checks-lost",
    summary="compiled: index -1 or a probability of 1.5 gives a value where eager raises",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/197554",
        "https://github.com/pytorch/pytorch/issues/183608",
        "https://github.com/pytorch/pytorch/issues/151918",
        "https://github.com/pytorch/pytorch/issues/169779",
        "https://github.com/pytorch/pytorch/issues/185885",
        "https://github.com/pytorch/pytorch/issues/182965",
    ),
    family="compile",
    probe=_checks_lost,
    advice="Check indices and probabilities before they enter the compiled function.",
)


# --- int-div-zero


def _divide(dividend: torch.Tensor, divisor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    truncated = torch.div(dividend, divisor, rounding_mode="trunc")
    return dividend // divisor, dividend % divisor, truncated


def _int_div_zero() -> str | None:
    """Divide by zero: eager raises, compiled dies where the defect is live.

    Integer division by a zero element, compiled for the CPU, kills the process.

    Inductor writes an integer ``//``, ``%`` or truncated division as the bare C++ operators.
    Division by zero is undefined there and traps on x86 (SIGFPE), where eager raises
    ``RuntimeError: ZeroDivisionError``. Since 2.13 ``//`` and ``%`` go through helpers that
    look at the divisor first; ``torch.div(..., rounding_mode="trunc")`` does not.
    """
    try:
        results = torch.compile(_divide)(torch.tensor([7]), torch.tensor([0]))
    except RuntimeError as error:
        if "ZeroDivisionError" in str(error):  # as eager raises
            return None
        raise
    floored, remainder, truncated = (result.item() for result in results)
    return f"compiled: 7 // 0 = {floored}, 7 % 0 = {remainder}, 7 / 0 = {truncated}; eager raises"


INT_DIV_ZERO = Defect(
    id="int-div-zero",
    summary="compiled on CPU: an integer division by a zero element kills the process",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/143649",
        "https://github.com/pytorch/pytorch/issues/183610",
        "https://github.com/pytorch/pytorch/issues/178013",
    ),
    family="compile",
    probe=_int_div_zero,
    advice="Replace zeros first: divisor = torch.where(divisor == 0, 1, divisor).",
)
