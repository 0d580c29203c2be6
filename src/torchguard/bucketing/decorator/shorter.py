"""The same call with shorter inputs: where padding leaks, more of it makes a larger difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchguard.bucketing.decorator.bucket import Call, Input, Plan
from torchguard.bucketing.decorator.masking import Real, given_masks, make_extras
from torchguard.bucketing.decorator.options import Sizes, Spec


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
        start = real_window(
            [m for m in masks if m.axis == axis], size, shortest, spec.options["side"]
        )
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
    if may_be_sizes(call, plan.inputs, new, min(length for _, length in windows.values())):
        return None
    shorter = call.with_leaves(new)
    extras = make_extras(spec, shorter, inputs, sizes, plan.buckets)
    plan = replace(plan, inputs=tuple(inputs), sizes=sizes, extras=extras, slices={}, ready=False)
    return plan, shorter


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


def real_window(masks: Sequence[Real], size: int, length: int, side: str) -> int | None:
    """Return where a part begins in which every sequence has something real."""
    starts = (0, size - length) if side == "right" else (size - length, 0)
    for start in starts:
        if all(bool(m.positions[..., start : start + length].any(-1).all()) for m in masks):
            return start
    return None
