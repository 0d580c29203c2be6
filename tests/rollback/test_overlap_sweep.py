"""Every operator of torch's own database, with operands that overlap what it writes.

The truth is the same call with each operand copied first. Bare torch stands beside it.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import torchguard

DTYPES = (torch.float64, torch.int64, torch.bool)
# What random numbers, a device or the order of additions decides.
UNSTEADY = {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform"),
    *(
        "random",
        "randn",
        "rand_like",
        "multinomial",
        "empty",
        "empty_like",
        "nn.functional.dropout",
    ),
}

View = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Makes an operand that overlaps what is written, of the operand's shape, or raises."""


def same(written: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return written


def shifted(written: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """One element further on; the buffer has room."""
    return written.as_strided(written.shape, written.stride(), written.storage_offset() + 1)


def back(written: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return written.as_strided(written.shape, written.stride(), written.storage_offset() - 1)


def transposed(written: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    if written.dim() < 2 or written.shape[0] != written.shape[1]:
        raise ValueError
    return written.transpose(0, 1)


def column(written: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return written[..., :1]


def row(written: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return written[:1]


def element(written: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return written[(0,) * written.dim()]


VIEWS: tuple[View, ...] = (same, shifted, back, transposed, column, row, element)


def in_a_buffer(tensor: torch.Tensor, *, gaps: bool) -> torch.Tensor:
    """Return the same values as a view of a larger buffer, with gaps between rows or without."""
    if tensor.dim() == 0 or not gaps:
        buffer = torch.zeros(tensor.numel() + 2, dtype=tensor.dtype)
        return buffer[1 : 1 + tensor.numel()].view(tensor.shape).copy_(tensor)
    wider = (*tensor.shape[:-1], tensor.shape[-1] + 3)
    buffer = torch.zeros(wider, dtype=tensor.dtype)
    return buffer[..., 1 : 1 + tensor.shape[-1]].copy_(tensor)


def calls(name: str) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
    """Yield an overlapping call of an operator and the same with copies; each returns a result."""
    for op in (each for each in op_db if each.name == name):
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            samples = list(op.sample_inputs("cpu", dtype))[:3]
            for sample in samples:
                if isinstance(sample.input, torch.Tensor) and sample.input.layout == torch.strided:
                    yield from _calls_of(op, sample)


def _calls_of(op: Any, sample: Any) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
    tensors = [place for place, each in enumerate(sample.args) if isinstance(each, torch.Tensor)]
    if op.inplace_variant is not None and sample.input.numel():
        for gaps in (False, True):
            for view in VIEWS:
                for place in tensors:
                    yield tuple(  # type: ignore[misc]
                        functools.partial(_in_place, op, sample, view, place, gaps, copy)
                        for copy in (False, True)
                    )
    if op.supports_out and sample.input.numel() and function_of(op) is not None:
        for view in VIEWS:
            yield tuple(  # type: ignore[misc]
                functools.partial(_out, op, sample, view, copy) for copy in (False, True)
            )


def _in_place(op: Any, sample: Any, view: View, place: int, gaps: bool, copy: bool) -> Any:
    written = in_a_buffer(sample.input, gaps=gaps)
    args = list(sample.args)
    operand = view(written, args[place])
    broadcasts = view in {column, row, element}
    if operand.dtype != args[place].dtype or not (broadcasts or operand.shape == args[place].shape):
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


def _out(op: Any, sample: Any, view: View, copy: bool) -> Any:
    expected = op(sample.input, *sample.args, **sample.kwargs)
    if not isinstance(expected, torch.Tensor) or not expected.numel():
        raise ValueError
    out = in_a_buffer(torch.zeros_like(expected), gaps=True)
    given = view(out, sample.input)
    if given.dtype != sample.input.dtype or given.shape != sample.input.shape:
        raise ValueError
    given.copy_(sample.input)
    function = function_of(op)
    function(given.clone() if copy else given, *sample.args, out=out, **sample.kwargs)
    return out


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def wrong(
    pairs: Iterator[tuple[Callable[[], Any], Callable[[], Any]]],
) -> tuple[int, int, list[Any]]:
    """Count the calls, and those that differ from the call with copies."""
    count, errors = 0, []
    for overlapping, copied in pairs:
        try:
            truth = copied()
        except Exception:  # noqa: BLE001, S112 - no call of this operator
            continue
        count += 1
        try:
            result = overlapping()
        except Exception as error:  # noqa: BLE001
            errors.append(f"raises {type(error).__name__}: {error}")
            continue
        if not torch.equal(torch.nan_to_num(result), torch.nan_to_num(truth)):
            errors.append(str(overlapping.args[1:3])[-200:])  # type: ignore[attr-defined]
    return count, len(errors), errors[:3]


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
@pytest.mark.parametrize("part", range(8))
def test_no_operator_is_wrong_with_the_guard(part: int) -> None:
    bare = total = 0
    bad = {}
    with silent():
        for name in NAMES[part::8]:
            bare += wrong(calls(name))[1]
        with torchguard.install("overlap"):
            for name in NAMES[part::8]:
                count, errors, which = wrong(calls(name))
                total += count
                if errors:
                    bad[name] = which
    assert total > 0
    assert bad == {}
    assert bare > 0
