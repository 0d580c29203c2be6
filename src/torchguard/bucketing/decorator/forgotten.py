"""Why a padded call failed: an argument as long as a padded axis that ``dims`` does not name.

Shapes: t the size of an axis, T its bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchguard._torch import SymbolicSizes
from torchguard.bucketing.decorator.compile import COMPILING
from torchguard.bucketing.decorator.cutting import Cutter
from torchguard.bucketing.decorator.plans import Plan
from torchguard.bucketing.decorator.trees import Path, flattened, spelled
from torchguard.bucketing.decorator.verification import Arguments
from torchguard.equivalence.isolate import (
    module_state_restored,
    uncompiled,
    without_fake_tensor_logs,
)
from torchguard.equivalence.reachable import all_reachable_modules

__all__ = ["explained"]

_MOST_TRIED = 16


class _Suspect(NamedTuple):
    """A dim of a tensor that was not padded, and is as long as an axis that was."""

    path: Path
    """In (args, kwargs)."""
    dim: int
    axis: str
    label: str
    shape: tuple[int, ...]


def explained(
    cutter: Cutter, plan: Plan, owner: tuple[Any, ...], given: Arguments, error: Exception
) -> ValueError | None:
    """Return an error that names the arguments that were forgotten, None if none was.

    The function runs on tensors without data: if it fails with the padded arguments, and does
    not once some others are padded too, those are the ones.

    Args:
        cutter: knows what runs.
        plan: how the call was padded.
        owner: what the function is given first, ``self``.
        given: the call, not padded.
        error: what it ended in.
    """
    memory = isinstance(error, torch.OutOfMemoryError)
    if memory or not plan.pads or cutter.options.group is not None:
        return None
    whole = Arguments((*owner, *given.args), given.kwargs)
    suspects = list(_suspects(cutter, plan, given))[:_MOST_TRIED]
    modules = all_reachable_modules(cutter.source.function, whole.args)
    with COMPILING, uncompiled(), without_fake_tensor_logs(), module_state_restored(modules):

        def works(forgotten: Sequence[_Suspect]) -> bool:
            return _works(cutter, plan, whole, forgotten)

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
    return ValueError(_said(cutter.name, plan, found))


def _suspects(cutter: Cutter, plan: Plan, given: Arguments) -> Iterator[_Suspect]:
    padded = {(each.path_in(plan.owned), dim) for each in plan.inputs for dim, _ in each.axes}
    axes = [axis for axis, size in plan.sizes.items() if plan.buckets[axis] != size]
    names = cutter.planner.declaration.parameters
    places: Iterator[tuple[str, Path, Any]] = itertools.chain(
        (
            (names[i] if i < len(names) else f"argument {i}", (0, i + plan.owned), value)
            for i, value in enumerate(given.args)
        ),
        ((name, (1, name), value) for name, value in given.kwargs.items()),
    )
    for name, place, value in places:
        for path, part in flattened(value):
            if not isinstance(part, torch.Tensor):
                continue
            for (dim, size), axis in itertools.product(enumerate(part.shape), axes):
                where = (*place, *path)
                if size == plan.sizes[axis] and (where, dim) not in padded:
                    label = spelled(name, path, value)
                    yield _Suspect(where, dim, axis, label, tuple(part.shape))


def _works(cutter: Cutter, plan: Plan, whole: Arguments, forgotten: Sequence[_Suspect]) -> bool:
    """Run the function without data, at the sizes of the buckets, with these padded as well."""
    shapes = {each.path_in(plan.owned): list(each.padded(plan.buckets)) for each in plan.inputs}
    for each in forgotten:
        shape = shapes.setdefault(each.path, list(each.shape))
        shape[each.dim] = plan.buckets[each.axis]
    values = dict(whole.leaves())
    try:
        with SymbolicSizes({}) as world:
            changed = whole.with_parts(
                {path: world.empty(tuple(shape), values[path]) for path, shape in shapes.items()}
            )
            args, kwargs = list(changed.args), dict(changed.kwargs)
            for argument, extra in plan.extras.items():
                place = plan.extra_places[argument]
                if isinstance(place, int):
                    args[place + plan.owned] = extra
                else:
                    kwargs[place] = extra
            cutter.source.function(*args, **kwargs)
    except Exception:  # noqa: BLE001 - whatever it is, it did not work
        return False
    return True


def _said(name: str, plan: Plan, found: Sequence[_Suspect]) -> str:
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
