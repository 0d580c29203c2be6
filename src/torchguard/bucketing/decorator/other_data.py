"""The other data that a check runs a function on, once: a fixed battery.

Data that lies on one side of a threshold shows nothing of data on the other: ``(x - 5).relu()``
of numbers below 5 is 0 whatever is padded, and ``x.round().mode(1)`` of numbers below 0.5 is 0 as
long as more of them are real than padded. So a function runs, padded and not, on numbers of either
sign, on whole numbers near and far, on smaller ones, and on other ids. A threshold far beyond these
is not found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from torchguard.bucketing.decorator.bucket import Call, Input, Plan
from torchguard.bucketing.decorator.masking import Real, given_masks, make_extras
from torchguard.bucketing.decorator.options import AxisSizes, Spec
from torchguard.bucketing.padding import pad_to_bucket

_LARGER, _SMALLER = 64.0, 1 / 64
_WHOLE = 31
"""Whole numbers, and ids that are spread on a CPU, go from 1 to this."""


def may_be_probabilities(tensor: torch.Tensor) -> bool:
    """Whether another value could end the process: kernels of an accelerator assert 0 <= p <= 1."""
    return bool(((tensor >= 0) & (tensor <= 1)).all())


class OtherData(NamedTuple):
    """A way to make other data of the same kind."""

    description: str  # in an error: "where {label} ..."
    of_floats: Callable[[torch.Tensor], torch.Tensor]
    of_ids: Callable[[torch.Tensor], torch.Tensor]
    keeps_sign: bool = False
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
            # Ones may be a mask.
            return None if bool((tensor == 1).all()) else self.of_ids(tensor)
        # On an accelerator a probability, or an index, that is not valid ends the process.
        may_be_index = bool(((tensor >= 0) & (tensor == tensor.trunc())).all())
        if not (tensor.is_cpu or self.keeps_sign) and (
            may_be_probabilities(tensor) or may_be_index
        ):
            return None
        if not bool(tensor.any()):
            tensor = torch.ones_like(tensor)
        other = self.of_floats(tensor)
        return other if torch.equal(other.isfinite(), tensor.isfinite()) else None


def _positive(numbers: torch.Tensor) -> torch.Tensor:
    """Replace numbers that are not positive by the largest, if that is positive."""
    return torch.where((numbers <= 0) & (numbers.max() > 0), numbers.max(), numbers)


def _order(values: torch.Tensor) -> torch.Tensor:
    """Return a number for each place of a tensor, in an order without a rule."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(values.numel(), generator=generator, device="cpu")
    return order.view(values.shape).to(values.device)


def _whole(values: torch.Tensor) -> torch.Tensor:
    """Make whole numbers from 1 to 31, each as often as the others."""
    return (_order(values) % _WHOLE + 1).to(values.dtype)


def _near_and_far(values: torch.Tensor, far: float) -> torch.Tensor:
    """Make whole numbers of either sign, every third of them far from 0."""
    whole = _whole(values)
    signed = torch.where(whole % 2 == 0, whole, -whole)
    return torch.where(_order(values) % 3 == 0, signed * far, signed)


def _exchanged(ids: torch.Tensor) -> torch.Tensor:
    """Put each id that is there in the place of another, and turn the order around."""
    present, places = torch.unique(ids, return_inverse=True)
    exchanged: torch.Tensor = present.roll(1)[places].flip(-1)
    return exchanged


# An id that is not valid raises on a CPU, and shows nothing; on an accelerator it ends the process.


def _spread(ids: torch.Tensor) -> torch.Tensor:
    """Spread the ids that are there evenly; on a CPU all from 1 to the largest, at most 31."""
    present = torch.unique(ids[ids > 0])
    if not present.numel():
        return ids.clone()
    if ids.is_cpu:
        present = torch.arange(1, int(present[-1].clamp(max=_WHOLE)) + 1, dtype=ids.dtype)
    spread: torch.Tensor = present[_whole(ids).long() % len(present)]
    if spread.dim() > 1 and len(spread) > 1:
        # A row of one number, for what asks for all of a row.
        spread[-1] = spread[-1, ..., :1].clone()
    return spread


def _chosen(ids: torch.Tensor, among: Iterable[int]) -> torch.Tensor:
    """Put other ids, each about as often as the others, on a CPU only."""
    if not ids.is_cpu:
        return ids.clone()
    least = min(int(ids.min()), 1)
    valid = [*dict.fromkeys(each for each in among if each >= least)] or [least]
    return torch.tensor(valid, dtype=ids.dtype)[_order(ids) % len(valid)]


STEPS = {
    # rounding
    *("round", "floor", "ceil", "trunc", "frac", "floor_divide", "fmod", "remainder"),
    # comparing
    *("eq", "ne", "gt", "ge", "lt", "le", "isin", "sign", "sgn", "all", "any", "nonzero"),
    *("count_nonzero", "searchsorted", "bucketize", "histc", "bincount"),
    # choosing
    *("max", "maximum", "amax", "argmax", "cummax", "min", "minimum", "amin", "argmin", "cummin"),
    *("aminmax", "mode", "median", "nanmedian", "kthvalue", "sort", "argsort", "topk"),
    *("_unique2", "unique_dim", "unique_consecutive"),
    # another rule beyond a number
    *("relu", "leaky_relu", "_prelu_kernel", "elu", "gelu", "silu", "mish", "softplus"),
    *("sigmoid", "log_sigmoid_forward", "tanh", "erf", "hardsigmoid", "hardswish", "hardtanh"),
    *("clamp", "clamp_min", "clamp_max", "threshold", "hardshrink", "softshrink", "heaviside"),
    *("fmax", "fmin", "smooth_l1_loss", "huber_loss", "_to_copy", "div"),
}
"""Operators with a threshold: data on one side of it shows nothing of the other."""


def battery(
    *, depends: bool, steps: bool, masked: bool, compared: set[int] | None
) -> Iterator[OtherData]:
    """Yield the data to try.

    Args:
        depends: whether the answer depends on what the padding holds.
        steps: whether one of :data:`STEPS` has run.
        masked: whether the function is given a mask. Many add -10,000 to the scores that it leaves
            out: numbers whose scores are as large would be no leak of theirs.
        compared: the integers that the function compares its own with, if it compares any.
    """
    # Data of one sign finds what other padding can't: with one negative number ``(x > 0).all()`` is
    # False whatever the padding holds.
    yield OtherData("is positive", lambda x: _positive(x.abs()), _positive, keeps_sign=True)
    yield OtherData("is negative", lambda x: -x.abs(), lambda ids: -_positive(-ids))
    far = 1.0 if masked else _LARGER
    if depends or steps:
        yield OtherData("is a positive whole number", lambda x: _whole(x) * far, _spread)
        yield OtherData("is a negative whole number", lambda x: -_whole(x) * far, torch.clone)
        yield OtherData(
            "is a whole number of either sign",
            lambda x: _near_and_far(x, far),
            lambda ids: _chosen(ids, range(int(_LARGER), 0, -3)),
        )
    if compared is not None:
        near = [n + step for n in sorted(compared)[:_MOST_COMPARED] for step in (0, 1, -1)]
        above = [max(compared, default=0) + step for step in (1, 2, 3)]
        yield OtherData(
            "is near what the function compares it with",
            torch.clone,
            lambda ids: _chosen(ids, [*near, *torch.unique(ids).tolist()]),
        )
        yield OtherData(
            "is above all that the function compares it with",
            torch.clone,
            lambda ids: _chosen(ids, above),
        )
    if depends:
        yield OtherData(
            "is 64 times smaller and in reverse order",
            lambda x: (x * _SMALLER).flip(tuple(range(x.dim()))),
            lambda x: x[..., :1].expand_as(x).clone(),
            keeps_sign=True,
        )
        yield OtherData(
            "is 64 times larger and has the other sign", lambda x: x * -_LARGER, _exchanged
        )


COMPARING = ("eq", "ne", "gt", "ge", "lt", "le", "isin", "clamp", "clamp_min", "clamp_max")
_MOST_COMPARED = 16


def note_compared(
    numbers: set[int], _: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Add the integers that an operator compares integers with: numbers, and those of tensors."""
    given = [*args, *kwargs.values()]
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    if any(each.is_floating_point() or each.is_complex() or each.is_meta for each in tensors):
        return
    found = [each for each in given if type(each) is int]
    # The largest is what is compared.
    largest = max((each.numel() for each in tensors), default=0)
    for each in tensors:
        if each.dtype != torch.bool and each.numel() < min(largest, _MOST_COMPARED + 1):
            found += each.flatten().tolist()
    numbers.update(sorted(found, key=abs)[:_MOST_COMPARED])


# ---- the same call with shorter inputs: more padding makes a leak larger ----


def shortened(spec: Spec, plan: Plan, call: Call) -> tuple[Plan, Call] | None:
    """Cut real inputs short, to have more padding; None if they are as short as can be.

    To half of what they are, and no shorter than what this bucket can be entered with. The
    shorter they are, the less they are like what the function is made for.
    """
    masks = given_masks(spec.masks, plan.inputs, call.leaves)
    sizes: AxisSizes = dict(plan.sizes)
    for axis, size in plan.sizes.items():
        # Of two axes that share their buckets, the first may be cut already.
        shortest = max((size + 1) // 2, spec.ladders[axis].least(axis, sizes), 2)
        side = spec.options["side"]
        if shortest < size and _real_window(masks, axis, size, shortest, side) is not None:
            sizes[axis] = shortest
    lengths = {axis: size for axis, size in sizes.items() if size != plan.sizes[axis]}
    cut = {e.index for e in plan.inputs if any(axis in lengths for _, axis in e.axes)}
    if not lengths or may_be_sizes(call, plan.inputs, cut, min(lengths.values())):
        return None
    shorter = resized(spec, plan.inputs, call, sizes)
    shapes = {each.index: tuple(shorter.leaves[each.index].shape) for each in plan.inputs}
    inputs = tuple(replace(each, shape=shapes[each.index]) for each in plan.inputs)
    extras = make_extras(spec, shorter, inputs, sizes, plan.buckets)
    return replace(plan, inputs=inputs, sizes=sizes, extras=extras, slices={}, ready=False), shorter


def resized(spec: Spec, inputs: Sequence[Input], call: Call, sizes: AxisSizes) -> Call:
    """Return a call with its inputs cut or padded to these sizes.

    They are cut where the caller's own mask calls something real, in every sequence.
    """
    masks = given_masks(spec.masks, inputs, call.leaves)
    side = spec.options["side"]
    new: dict[int, Any] = {}
    for each in inputs:
        sized, fill = call.leaves[each.index].detach(), 0 if each.fill is None else each.fill
        for dim, axis in each.axes:
            size, length = sizes[axis], sized.shape[dim]
            if size < length:
                start = _real_window(masks, axis, length, size, side) or 0
                # Copied: a graph is compiled for strides too, and a call's are not those of a part.
                sized = sized.narrow(dim, start, size).clone()
            sized = pad_to_bucket(sized, dim, size, value=fill, side=side).tensor
        new[each.index] = sized.requires_grad_(each.requires_grad)
    return call.with_leaves(new)


def may_be_sizes(call: Call, inputs: Iterable[Input], cut: Iterable[int], length: int) -> bool:
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


def _real_window(masks: Sequence[Real], axis: str, size: int, length: int, side: str) -> int | None:
    """Return where a part begins in which every sequence has something real."""
    own = [each.positions for each in masks if each.axis == axis]
    starts = (0, size - length) if side == "right" else (size - length, 0)
    for start in starts:
        if all(bool(each[..., start : start + length].any(-1).all()) for each in own):
            return start
    return None
