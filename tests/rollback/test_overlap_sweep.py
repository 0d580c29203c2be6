"""Every operator of torch's own database, with operands that overlap what it writes.

The truth is the same call with each operand copied first. Bare torch stands beside it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import torchguard
from support.sweep import samples_of

DTYPES = (torch.float64, torch.int64, torch.bool)
# What random numbers, a device or the order of additions decides.
UNSTEADY = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "random",
    "randn", "rand_like", "multinomial", "empty", "empty_like", "nn.functional.dropout",
}  # fmt: skip

# Each makes an operand that overlaps what is written. The buffer has room on both sides.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same": lambda w: w,
    "shifted": lambda w: w.as_strided(w.shape, w.stride(), w.storage_offset() + 1),
    "back": lambda w: w.as_strided(w.shape, w.stride(), w.storage_offset() - 1),
    "transposed": lambda w: w.transpose(0, 1),
    "column": lambda w: w[..., :1],
    "row": lambda w: w[:1],
    "element": lambda w: w[(0,) * w.dim()],
}
BROADCAST = {"column", "row", "element"}


def in_a_buffer(tensor: torch.Tensor, *, gaps: bool) -> torch.Tensor:
    """Return the same values as a view of a larger buffer, with gaps between rows or without."""
    if tensor.dim() == 0 or not gaps:
        buffer = torch.zeros(tensor.numel() + 2, dtype=tensor.dtype)
        return buffer[1 : 1 + tensor.numel()].view(tensor.shape).copy_(tensor)
    wider = (*tensor.shape[:-1], tensor.shape[-1] + 3)
    buffer = torch.zeros(wider, dtype=tensor.dtype)
    return buffer[..., 1 : 1 + tensor.shape[-1]].copy_(tensor)


def calls(name: str) -> Iterator[Callable[[bool], Any]]:
    """Yield calls of an operator that overlap; each returns what it has written.

    A call takes whether the operand is copied first.
    """
    for op in (each for each in op_db if each.name == name):
        for dtype in DTYPES:
            if dtype in op.supported_dtypes("cpu"):
                for sample in itertools.islice(samples_of(op, dtype), 3):
                    given = sample.input
                    if torch.is_tensor(given) and given.layout == torch.strided and given.numel():
                        yield from _calls_of(op, sample)


def _calls_of(op: Any, sample: Any) -> Iterator[Callable[[bool], Any]]:
    if op.inplace_variant is not None:
        places = [place for place, each in enumerate(sample.args) if torch.is_tensor(each)]
        for gaps, view, place in itertools.product((False, True), VIEWS, places):
            yield functools.partial(_in_place, op, sample, view, place, gaps)
    if op.supports_out and function_of(op) is not None:
        expected = functools.cache(lambda: op(sample.input, *sample.args, **sample.kwargs))
        for view in VIEWS:
            yield functools.partial(_out, op, sample, expected, view)


def _in_place(op: Any, sample: Any, view: str, place: int, gaps: bool, copy: bool) -> Any:
    written = in_a_buffer(sample.input, gaps=gaps)
    args = list(sample.args)
    operand = VIEWS[view](written)
    fits = view in BROADCAST or operand.shape == args[place].shape
    if operand.dtype != args[place].dtype or not fits:
        raise ValueError
    args[place] = operand.clone() if copy else operand
    # The database holds torch's own functions, taken before the guard was there.
    getattr(written, op.inplace_variant.__name__)(*args, **sample.kwargs)
    return written


def function_of(op: Any) -> Any:
    """Look a function up where programs do; None where it stands under another name."""
    try:
        return functools.reduce(getattr, op.name.split("."), torch)
    except AttributeError:
        return None


def _out(op: Any, sample: Any, expected: Callable[[], Any], view: str, copy: bool) -> Any:
    if not isinstance(expected(), torch.Tensor) or not expected().numel():
        raise ValueError
    out = in_a_buffer(torch.zeros_like(expected()), gaps=True)
    given = VIEWS[view](out)
    if given.dtype != sample.input.dtype or given.shape != sample.input.shape:
        raise ValueError
    given.copy_(sample.input)
    function = function_of(op)
    function(given.clone() if copy else given, *sample.args, out=out, **sample.kwargs)
    return out


def wrong(names: list[str]) -> tuple[int, dict[str, str]]:
    """Count the calls, and describe those that differ from the call with copies."""
    count, errors = 0, {}
    for name in names:
        for call in calls(name):
            try:
                truth = call(True)
            except Exception:  # noqa: BLE001, S112 - no call of this operator
                continue
            count += 1
            try:
                result = call(False)
            except Exception as error:  # noqa: BLE001
                errors[name] = f"raises {type(error).__name__}: {error}"
                continue
            if not torch.equal(torch.nan_to_num(result), torch.nan_to_num(truth)):
                errors[name] = str(call.args[1:])[-200:]  # type: ignore[attr-defined]
    return count, errors


NAMES = sorted(
    {
        op.name
        for op in op_db
        if (op.inplace_variant is not None or op.supports_out)
        and op.name not in UNSTEADY
        and "as_strided" not in op.name  # reads the storage, not the tensor
    }
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_no_operator_is_wrong_with_the_guard(part: int) -> None:
    names = NAMES[part::8]
    with torchguard.install("overlap"):
        count, errors = wrong(names)
    assert errors == {}
    assert count > 100
    assert wrong(names[:10])[1], "plain torch got them right: this proves nothing"
