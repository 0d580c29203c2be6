"""What a check tries besides the call itself: other data, and inputs that are cut short."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from torchguard.bucketing.decorator.masking import Real, given_masks, make_extras
from torchguard.bucketing.decorator.plan import Call, Input, Plan
from torchguard.bucketing.decorator.spec import Sizes, Spec
from torchguard.bucketing.decorator.thresholds import Beyond, Thresholds

__all__ = ["OtherValues", "may_be_probabilities", "other_values", "shortened"]

_LARGER = 16.0
_SMALLER = 1 / 64
_WHOLE = 31
"""A prime number: no dim that is counted along has all its numbers alike."""

_ROUNDS = 2
"""How often larger numbers are tried: the way to a threshold is guessed, and may be longer."""

_CANDIDATES = 16
"""Of more numbers that reach thresholds, the smallest are tried."""

_STEPS = {
    # rounding
    *("round", "floor", "ceil", "trunc", "frac", "floor_divide", "fmod", "remainder"),
    # comparing
    *("eq", "ne", "gt", "ge", "lt", "le", "isin", "sign", "sgn", "all", "any", "nonzero"),
    *("count_nonzero", "searchsorted", "bucketize", "histc", "bincount"),
    # choosing
    *("max", "maximum", "amax", "argmax", "cummax", "min", "minimum", "amin", "argmin", "cummin"),
    *("aminmax", "mode", "median", "nanmedian", "kthvalue", "sort", "argsort", "topk"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
"""Operators that give one answer to much data, and another one beyond: they round, compare, or
choose. Data that is all alike to them shows nothing of other data."""


# ---- other data ----


def may_be_probabilities(tensor: torch.Tensor) -> bool:
    """Whether another value could end the process: kernels of an accelerator assert 0 <= p <= 1."""
    return bool(((tensor >= 0) & (tensor <= 1)).all())


def _may_be_indices(tensor: torch.Tensor) -> bool:
    """Likewise: they assert that an index lies within what it points into."""
    return bool(((tensor >= 0) & (tensor == tensor.trunc())).all())


class OtherValues(NamedTuple):
    """A way to make other data of the same kind."""

    description: str
    """Of the data, in an error: "where {label} ..."."""
    of_floats: Callable[[torch.Tensor], torch.Tensor]
    of_integers: Callable[[torch.Tensor], torch.Tensor]
    keeps_sign: bool
    """Whether what is positive stays so, and between 0 and 1 what is."""

    def made(self, inputs: Iterable[Input], call: Call) -> Call | None:
        """Return the call with other data in these inputs; None if nothing changes."""
        new: dict[int, Any] = {}
        with torch.no_grad(), contextlib.suppress(RuntimeError, NotImplementedError):
            for each in inputs:
                tensor = call.leaves[each.index]
                other = self._of(tensor.detach())
                if other is not None and not torch.equal(other, tensor):
                    new[each.index] = other.requires_grad_(tensor.requires_grad)
        return call.with_leaves(new) if new else None

    def _of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.dtype == torch.bool or tensor.dtype.is_complex or not tensor.numel():
            return None
        if not tensor.dtype.is_floating_point:
            return self.of_integers(tensor)
        on_accelerator = not tensor.is_cpu and not self.keeps_sign
        if on_accelerator and (may_be_probabilities(tensor) or _may_be_indices(tensor)):
            return None
        if not bool(tensor.any()):
            tensor = torch.ones_like(tensor)
        other = self.of_floats(tensor)
        return other if torch.equal(other.isfinite(), tensor.isfinite()) else None


def _positive(numbers: torch.Tensor) -> torch.Tensor:
    """Put the largest number in the place of those that are not positive, if it is."""
    return torch.where((numbers <= 0) & (numbers.max() > 0), numbers.max(), numbers)


def _negative(numbers: torch.Tensor) -> torch.Tensor:
    return -_positive(-numbers)


def _exchanged(numbers: torch.Tensor) -> torch.Tensor:
    """Put each number that is there in the place of another, and turn the order around."""
    present, places = torch.unique(numbers, return_inverse=True)
    exchanged: torch.Tensor = present.roll(1)[places].flip(-1)
    return exchanged


def _order(values: torch.Tensor) -> torch.Tensor:
    """Return a number for each place of a tensor, in an order without a rule."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(values.numel(), generator=generator, device="cpu")
    return order.view(values.shape).to(values.device)


def _whole(values: torch.Tensor, factor: float = 1) -> torch.Tensor:
    """Make whole numbers from 1 to 31, each as often as the others, times a factor."""
    return ((_order(values) % _WHOLE + 1) * factor).to(values.dtype)


def _of_either_sign(values: torch.Tensor, factor: float = 1) -> torch.Tensor:
    whole = _whole(values)
    return torch.where(whole % 2 == 0, whole, -whole) * factor


def _across(values: torch.Tensor, beyond: Beyond, factor: float) -> torch.Tensor:
    """Make whole numbers of either sign, far and near, and those that reach the thresholds."""
    made = _of_either_sign(values, factor)
    if not beyond.missed:
        return made
    part = _order(values)
    reaching = torch.tensor(beyond.missed[:_CANDIDATES], dtype=values.dtype, device=values.device)
    made = torch.where(part % 3 == 1, _of_either_sign(values), made)
    return torch.where(part % 3 == 0, reaching[part // 3 % len(reaching)], made)


def _spread(numbers: torch.Tensor) -> torch.Tensor:
    """Put the numbers that are there, each as often as the others; on a CPU those between, too."""
    present = torch.unique(numbers[numbers > 0])
    if not present.numel():
        return numbers.clone()
    if numbers.is_cpu:  # one that is not valid raises, on an accelerator it ends the process
        present = torch.arange(1, int(present[-1].clamp(max=_WHOLE)) + 1, dtype=numbers.dtype)
    spread: torch.Tensor = present[_whole(numbers).long() % len(present)]
    if spread.dim() > 1 and len(spread) > 1:
        spread[-1] = spread[-1, ..., :1]  # a row of one number, for what asks for all of a row
    return spread


_SIGNS = (
    OtherValues("is positive", lambda x: _positive(x.abs()), _positive, keeps_sign=True),
    OtherValues("is negative", lambda x: -x.abs(), _negative, keeps_sign=False),
)
"""They find what other padding can't: one negative number, and ``(x > 0).all()`` is False whatever
the padding holds."""


def _whole_numbers(beyond: Beyond, factor: float) -> tuple[OtherValues, ...]:
    """Return whole numbers, the least of them beyond every threshold.

    They find what data can't that is all alike once it is rounded: ``x.round().mode(1)`` of
    numbers below 0.5 is 0 as long as more of them are real than padded.
    """
    return (
        OtherValues(
            "is a positive whole number", lambda x: _whole(x, factor), _spread, keeps_sign=False
        ),
        OtherValues(
            "is a negative whole number",
            lambda x: -_whole(x, factor),
            torch.clone,
            keeps_sign=False,
        ),
        OtherValues(
            "is a whole number of either sign",
            lambda x: _across(x, beyond, factor),
            torch.clone,
            keeps_sign=False,
        ),
    )


def _near(compared: Sequence[float]) -> OtherValues:
    """Return the integers that a function compares its input with, and those beside them."""
    near = [round(each) + step for each in compared[:_CANDIDATES] for step in (0, 1, -1)]

    def made(numbers: torch.Tensor) -> torch.Tensor:
        return _chosen(numbers, [*near, *torch.unique(numbers).tolist()])

    said = "is near what the function compares it with"
    return OtherValues(said, torch.clone, made, keeps_sign=True)


def _above(compared: float) -> OtherValues:
    """Return integers above those that a function compares its input with."""
    least = math.ceil(compared) + 1

    def made(numbers: torch.Tensor) -> torch.Tensor:
        above = torch.unique(numbers[numbers >= least]).tolist()
        return _chosen(numbers, above or [least, least + 1, least + 2])

    said = "is above all that the function compares it with"
    return OtherValues(said, torch.clone, made, keeps_sign=True)


def _chosen(numbers: torch.Tensor, among: Iterable[int]) -> torch.Tensor:
    """Put other integers that may come, each about as often as the others."""
    # One that is not valid raises, on an accelerator it ends the process. Ones may be a mask.
    if not numbers.is_cpu or bool((numbers == 1).all()):
        return numbers.clone()
    least = min(int(numbers.min()), 1)
    valid = dict.fromkeys(each for each in among if each >= least)
    chosen: torch.Tensor = torch.tensor([*valid], dtype=numbers.dtype)[_order(numbers) % len(valid)]
    return chosen


_MAGNITUDES = (
    OtherValues(
        "is 64 times smaller and in reverse order",
        lambda x: (x * _SMALLER).flip(tuple(range(x.dim()))),
        lambda x: x[..., :1].expand_as(x).clone(),
        keeps_sign=True,
    ),
    OtherValues(
        "is 16 times larger and has the other sign",
        lambda x: x * -_LARGER,
        _exchanged,
        keeps_sign=False,
    ),
)


def other_values(
    thresholds: Thresholds,
    agreed: Callable[..., list[bool]],
    operators: Iterable[str],
    *,
    relies_on_0: bool,
) -> Iterator[OtherValues]:
    """Yield the other data to try on a function, each once that before it was tried.

    Args:
        thresholds: those that were seen, and that are while it is tried.
        agreed: returns what any rank has found.
        operators: the names of those that the function has run.
        relies_on_0: whether the answer depends on what the padding holds.
    """
    yield from _SIGNS
    steps = any(name.rpartition("::")[2].rstrip("_") in _STEPS for name in operators)
    floats, integers, tried = Beyond(), Beyond(), 0.0
    for _ in range(_ROUNDS):
        if thresholds.runs:
            floats = thresholds.beyond(of_integers=False)
            integers = thresholds.beyond(of_integers=True)
        # A power of 2, so that they are the same numbers in every dtype.
        factor = 2.0 ** math.ceil(math.log2(floats.farthest + 1))
        if tried:
            wanted = bool(floats.missed) and factor > tried
        else:
            wanted = steps or relies_on_0 or bool(floats.missed or integers.missed)
        wanted, near, above = agreed(wanted, bool(integers.missed), integers.farthest > 1)
        if not wanted:
            break
        yield from _whole_numbers(floats, factor)
        tried = factor
    if near:
        yield _near(integers.missed)
    if above:
        yield _above(integers.farthest)
    if relies_on_0:
        yield from _MAGNITUDES


# ---- shorter inputs ----


def shortened(spec: Spec, plan: Plan, call: Call) -> tuple[Plan, Call] | None:
    """Cut real inputs short, to have more padding; None if they are as short as can be.

    To half of what they are, and no shorter than what this bucket can be entered with. The
    shorter they are, the less they are like what the function is made for.
    """
    masks = given_masks(spec.masks, plan.inputs, call.leaves)
    windows: dict[str, tuple[int, int]] = {}
    sizes: Sizes = dict(plan.sizes)
    for axis, size in plan.sizes.items():
        # Of two axes that share their buckets, the first may be cut already.
        shortest = max((size + 1) // 2, spec.ladders[axis].least(axis, sizes), 2)
        if shortest >= size:
            continue
        start = _window([m for m in masks if m.axis == axis], size, shortest, spec.options["side"])
        if start is not None:
            windows[axis] = (start, shortest)
            sizes[axis] = shortest
    if not windows:
        return None
    new: dict[int, Any] = {}
    inputs = []
    for each in plan.inputs:
        tensor = call.leaves[each.index]
        for dim, axis in each.axes:
            if axis in windows:
                tensor = tensor.narrow(dim, *windows[axis])
        if any(axis in windows for _, axis in each.axes):
            new[each.index] = tensor.detach().requires_grad_(tensor.requires_grad)
        inputs.append(replace(each, shape=tuple(tensor.shape)))
    if _may_be_sizes(call, plan.inputs, new, min(length for _, length in windows.values())):
        return None
    shorter = call.with_leaves(new)
    extras = make_extras(spec, shorter, inputs, sizes, plan.buckets)
    plan = replace(plan, inputs=tuple(inputs), sizes=sizes, extras=extras, slices={}, ready=False)
    return plan, shorter


def _may_be_sizes(call: Call, inputs: Iterable[Input], cut: Iterable[int], length: int) -> bool:
    """Whether an index could lie behind the end now: on an accelerator that ends the process."""
    # Offsets, such as cu_seqlens, point into what was cut, and half of them are no packed batch.
    offsets = [each for each in inputs if each.fill == "repeat-last"]
    if any(not call.leaves[each.index].is_floating_point() for each in offsets):
        return True
    return any(
        isinstance(value, torch.Tensor)
        and index not in cut
        and not (value.is_floating_point() or value.is_complex())
        and value.device.type not in {"cpu", "meta"}
        and bool((value >= length).any())
        for index, value in enumerate(call.leaves)
    )


def _window(masks: Sequence[Real], size: int, length: int, side: str) -> int | None:
    """Return where a part begins in which every sequence has something real."""
    starts = (0, size - length) if side == "right" else (size - length, 0)
    for start in starts:
        if all(bool(m.positions[..., start : start + length].any(-1).all()) for m in masks):
            return start
    return None
