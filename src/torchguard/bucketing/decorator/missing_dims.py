"""Why a padded call failed: an argument as long as a padded axis that ``dims`` does not name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchguard._pytree import all_reachable_modules
from torchguard._torch import SymbolicSizes
from torchguard.bucketing.decorator.output_shapes import OutputShapes, running_without_data
from torchguard.bucketing.decorator.plan import Call, Plan

__all__ = ["explain_failure"]

_MOST_TRIED = 16


@dataclass(frozen=True)
class _Suspect:
    """A dim of a tensor that was not padded, and is as long as an axis that was."""

    index: int
    """Of the leaf."""
    dim: int
    axis: str
    label: str
    shape: tuple[int, ...]


def explain_failure(
    shapes: OutputShapes, plan: Plan, call: Call, error: Exception
) -> ValueError | None:
    """Return an error that names the arguments that ``dims`` lacks, None if none does.

    The function runs on tensors without data: if it fails with the padded arguments, and does
    not once some others are padded too, those are the ones.

    Args:
        shapes: knows what runs, and what was declared of it.
        plan: how the call was padded.
        call: not padded.
        error: what the call ended in.
    """
    memory = isinstance(error, torch.OutOfMemoryError)
    if memory or not plan.pads or shapes.spec.options["group"] is not None:
        return None
    suspects = list(itertools.islice(_suspects(plan, call), _MOST_TRIED))
    modules = all_reachable_modules(shapes.function, (*call.owner, *call.arguments))
    with running_without_data(modules):

        def works(padded: Sequence[_Suspect]) -> bool:
            return _works(shapes.function, plan, call, padded)

        if not suspects or works(()):
            return None
        usual = {(axis, dim) for each in plan.inputs for dim, axis in each.axes}
        in_place = [each for each in suspects if (each.axis, each.dim) in usual]
        for group in (in_place, *([each] for each in suspects), suspects):
            if group and works(group):
                found = list(group)
                break
        else:
            return None
        for each in list(found):
            fewer = [other for other in found if other is not each]
            if fewer and works(fewer):
                found = fewer
    return ValueError(_message(shapes.name, plan, found))


def _suspects(plan: Plan, call: Call) -> Iterator[_Suspect]:
    padded = {(each.index, dim) for each in plan.inputs for dim, _ in each.axes}
    axes = [axis for axis, size in plan.sizes.items() if plan.buckets[axis] != size]
    for index, (label, leaf) in enumerate(zip(call.labels(), call.leaves, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            continue
        for (dim, size), axis in itertools.product(enumerate(leaf.shape), axes):
            if size == plan.sizes[axis] and (index, dim) not in padded:
                yield _Suspect(index, dim, axis, label, tuple(leaf.shape))


def _works(
    function: Callable[..., Any], plan: Plan, call: Call, suspects: Sequence[_Suspect]
) -> bool:
    """Run the function without data, at the sizes of the buckets, with these padded as well."""
    shapes = {each.index: list(each.padded(plan.buckets)) for each in plan.inputs}
    for each in suspects:
        shapes.setdefault(each.index, list(each.shape))[each.dim] = plan.buckets[each.axis]
    try:
        with SymbolicSizes({}) as world:
            padded = {
                index: world.empty(tuple(shape), call.leaves[index])
                for index, shape in shapes.items()
            }
            args, kwargs = call.with_leaves(padded).bind(plan.extras)
            function(*args, **kwargs)
    except Exception:  # noqa: BLE001 - whatever it is, it did not work
        return False
    return True


def _message(name: str, plan: Plan, found: Sequence[_Suspect]) -> str:
    axes = dict.fromkeys(each.axis for each in found)
    padded = ", ".join(f"{axis!r} from {plan.sizes[axis]} to {plan.buckets[axis]}" for axis in axes)
    shown = ", ".join(f"{each.label} of shape {each.shape}" for each in found)
    entries = ", ".join(f"{each.label!r}: {{{each.dim}: {each.axis!r}}}" for each in found)
    text = (
        f"bucketed: {name} was padded along {padded}, but not {shown}, which is as long: it runs "
        f"once that is padded too. Name it in dims: {{..., {entries}}}"
    )
    labels = [each.label for each in found if "label" in each.label or "target" in each.label]
    if labels:
        text += f", and say in fill what a loss ignores: {{{labels[0]!r}: -100}}"
    return text
