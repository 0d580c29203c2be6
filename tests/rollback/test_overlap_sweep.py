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
from support.slow import slow_except
from support.sweep import samples_of
from torchguard.equivalence.operands import _rule_of

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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", slow_except(range(8), "0"))
def test_no_operator_is_wrong_with_the_guard(part: int) -> None:
    names = NAMES[part::8]
    with torchguard.install("overlap"):
        count, errors = wrong(names)
    assert errors == {}
    assert count > 100
    assert wrong(names[:10])[1], "plain torch got them right: this proves nothing"


# ---- no warning where PyTorch is right ----

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda t: torch.empty(t.shape, dtype=t.dtype),
    "gaps": lambda t: in_a_buffer(t, gaps=True),
    "transposed": lambda t: torch.empty(t.transpose(0, -1).shape, dtype=t.dtype).transpose(0, -1),
    "steps": lambda t: torch.empty((*t.shape, 2), dtype=t.dtype)[..., 1],
}

# Right in each case of the sweep, and warned of all the same: no method in place relies on it.
LUCKY = {
    *("alias_copy", "diff", "linalg.householder_product", "linalg.pinv", "log_softmax", "msort"),
    *("nn.functional.normalize", "slice_scatter", "softmax", "t_copy", "transpose_copy"),
}


def enlarged(tensor: torch.Tensor) -> torch.Tensor:
    """Repeat a tensor along its last two dims, to more than what one vector or tile holds."""
    times = [1] * tensor.dim()
    for dim in (-1, -2)[: tensor.dim()]:
        times[dim] = max(1, 150 // max(1, tensor.shape[dim]))
    return tensor.repeat(*times)


def calls_on_itself(name: str) -> Iterator[tuple[Callable[..., Any], torch.Tensor]]:
    """Yield calls whose first operand is what they write, each with the values to begin with."""
    for op in (each for each in op_db if each.name == name):
        function = function_of(op)
        if not op.supports_out or function is None:
            continue
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            for sample in itertools.islice(samples_of(op, dtype), 4):
                start = sample.input
                if torch.is_tensor(start) and start.layout == torch.strided and start.dim():
                    for larger in (False, True):
                        args = [
                            enlarged(each)
                            if larger and torch.is_tensor(each) and each.dim()
                            else each
                            for each in (start, *sample.args)
                        ]
                        call = functools.partial(_on_itself, function, args[1:], sample.kwargs)
                        if 0 < args[0].numel() < 100_000:
                            yield call, args[0]


def _on_itself(function: Any, args: Any, kwargs: Any, out: torch.Tensor, *, copy: bool) -> None:
    function(out.clone() if copy else out, *args, out=out, **kwargs)


def compared(name: str) -> tuple[int, bool]:
    """Count the calls of an operator on itself, and say whether one of them is wrong."""
    count = 0
    for call, start in calls_on_itself(name):
        for layout in LAYOUTS.values():
            truth, found = layout(start).copy_(start), layout(start).copy_(start)
            try:
                call(truth, copy=True)
            except Exception:  # noqa: BLE001  no call of this operator
                break
            if truth.shape != start.shape:  # resized
                break
            count += 1
            try:
                call(found, copy=False)
            except Exception:  # noqa: BLE001  refused
                return count, True
            if not torch.equal(torch.nan_to_num(truth), torch.nan_to_num(found)):
                return count, True
    return count, False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", slow_except(range(4), "0"))
def test_an_operator_on_itself_is_warned_of_if_it_can_be_wrong(part: int) -> None:
    """PyTorch alone is compared; the rule says the same of each operator."""
    unsafe = ("lu", "linalg.lu", "linalg.ldl", "ormqr", "geqrf")  # trust what other calls return
    names = [name for name in NAMES[part::4] if not name.startswith(unsafe)]
    silent, wrong, lucky = set(), set(), set()
    for name in names:
        function = next(map(function_of, (op for op in op_db if op.name == name)))
        if function is None:
            continue
        rule = _rule_of(function)
        count, is_wrong = compared(name)
        if is_wrong and (rule.first or rule.elementwise):
            wrong.add(name)
        elif count and rule.first and not rule.elementwise:
            silent.add(name)
        elif count > 8 and not is_wrong and not rule.elementwise:
            lucky.add(name)
    assert wrong == set()
    assert lucky <= LUCKY
    assert silent
