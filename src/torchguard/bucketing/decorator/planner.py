"""Work out how to pad a call: its sizes, its buckets, the masks and lengths it is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch

from torchguard import _torch
from torchguard.bucketing.decorator.auto import Ladder
from torchguard.bucketing.decorator.masks_and_lengths import Mask
from torchguard.bucketing.decorator.options import Options
from torchguard.bucketing.decorator.output_shapes import Sizes
from torchguard.bucketing.decorator.plans import Input, Place, Plan
from torchguard.bucketing.decorator.spec import Declaration, Found
from torchguard.bucketing.decorator.trees import Path, parts, replaced
from torchguard.bucketing.padding import pad_to_bucket

__all__ = ["Planner"]


class Planner:
    """Knows the declared inputs, the ladders and what else a padded call is given."""

    def __init__(
        self,
        declaration: Declaration,
        ladders: dict[str, Ladder],
        options: Options,
        masks: tuple[Mask, ...],
        lengths: dict[str, str],
    ) -> None:
        self.declaration = declaration
        self.ladders = ladders
        self.options = options
        self.masks = {mask.argument: mask for mask in masks}
        self.lengths = lengths
        self._lock = threading.Lock()

    def entries(self, count: int, keywords: tuple[str, ...]) -> list[tuple[Place, str]]:
        """Say where a call of this form has the arguments that matter."""
        names = self.declaration.parameters
        found = self.declaration.locations(count, keywords)
        listed = {name for _, name in found}
        for argument in self.masks:
            place: Place = names.index(argument) if argument in names[:count] else argument
            if argument not in listed and (type(place) is int or argument in keywords):
                found.append((place, argument))
        return found

    def found(self, name: str, value: Any) -> Iterator[Found]:
        """Yield the tensors of one argument that have dims to pad."""
        mask = self.masks.get(name)
        if name in self.declaration.dims:
            yield from self.declaration.find(name, value)
        elif mask is not None and value is not None:
            if not isinstance(value, torch.Tensor) or not value.dim():
                raise TypeError(f"bucketed: {name} is {value!r}, expected a mask, a tensor")
            yield Found(name, (), value, ((value.dim() - 1, mask.axis),), None)

    def inputs(
        self, entries: list[tuple[Place, str]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Input, ...], Sizes]:
        """Look at a call: its tensors and the size of each axis.

        Raises:
            TypeError, IndexError, KeyError: an argument is not what was declared.
            ValueError: an axis has two sizes, or none.
        """
        inputs = []
        sizes: dict[str, tuple[int, str]] = {}
        for place, name in entries:
            value = args[place] if isinstance(place, int) else kwargs[place]
            mask = self.masks.get(name)
            for each in self.found(name, value):
                fill = each.fill if mask is None or each.fill is not None else mask.fill
                declared = fill is not None
                for dim, axis in each.axes:
                    size = each.tensor.shape[dim]
                    before, label = sizes.setdefault(axis, (size, each.label))
                    if before != size:
                        raise ValueError(
                            f"bucketed: axis {axis!r} is {before} in {label} and {size} in "
                            f"{each.label}"
                        )
                inputs.append(
                    Input(
                        place=place,
                        path=each.path,
                        label=each.label,
                        shape=tuple(each.tensor.shape),
                        axes=each.axes,
                        fill=fill if declared else 0,
                        declared=declared,
                        device=each.tensor.device,
                    )
                )
        for axis in self.ladders:
            if axis not in sizes:
                raise ValueError(
                    f"bucketed: no argument of the call has axis {axis!r}; dims names "
                    f"{', '.join(self.declaration.dims)}"
                )
        return tuple(inputs), {axis: sizes[axis][0] for axis in self.ladders}

    def buckets(self, sizes: Sizes, inputs: tuple[Input, ...]) -> Sizes | None:
        """Return each axis' bucket; None if a size is above the largest and may run without.

        Raises:
            ValueError: it may not.
        """
        found: Sizes = {}
        with self._lock:  # a ladder may grow
            for axis, size in sizes.items():
                ladder = self.ladders[axis]
                bucket = ladder.bucket_for(size)
                if bucket is None and self.options.overflow == "error":
                    assert ladder.buckets is not None
                    largest = ladder.buckets.sizes[-1]
                    label = next(
                        (e.label for e in inputs for _, name in e.axes if name == axis), axis
                    )
                    raise ValueError(
                        f"bucketed: axis {axis!r} is {size} in {label}, but the largest bucket is "
                        f"{largest}: add a larger one, or pass overflow='grow', 'eager' or "
                        "'dynamic'"
                    )
                if bucket is None:
                    return None
                found[axis] = bucket
        return found

    def extras(
        self,
        inputs: tuple[Input, ...],
        sizes: Sizes,
        buckets: Sizes | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[dict[str, torch.Tensor], dict[str, Place]]:
        """Make the lengths and the masks that the caller has not given, and say where they go."""
        made: dict[str, torch.Tensor] = {}
        for axis, argument in self.lengths.items():
            with torch.inference_mode(False):
                made[argument] = torch.tensor(sizes[axis], device=_holder(inputs, axis)[0].device)
        names = self.declaration.parameters
        places: dict[str, Place] = {
            argument: names.index(argument) if argument in names[: len(args)] else argument
            for argument in (*made, *self.masks)
        }
        for argument, mask in self.masks.items():
            place = places[argument]
            given = args[place] if isinstance(place, int) else kwargs.get(place)
            # Above the largest bucket nothing is padded, but the function may insist on a mask.
            if given is None and (buckets is not None or argument in self.declaration.required):
                holder, dim = _holder(inputs, mask.axis)
                batch = holder.shape[:1] if dim else ()
                size = sizes[mask.axis]
                padded = size if buckets is None else buckets[mask.axis]
                made[argument] = mask.make(batch, size, padded, self.options.side, holder.device)
        return made, places

    def real_extras(self, plan: Plan, *, with_masks: bool = False) -> dict[str, torch.Tensor]:
        """Return what a call at the real sizes has to be given besides what the caller gave.

        Args:
            plan: has the sizes.
            with_masks: whether masks that the function can do without are given, too.
        """
        wanted = {}
        for argument, value in plan.extras.items():
            mask = self.masks.get(argument)
            if mask is None:
                wanted[argument] = value
            elif with_masks or argument in self.declaration.required:
                size = plan.sizes[mask.axis]
                wanted[argument] = mask.make(
                    tuple(value.shape[:-1]), size, size, self.options.side, value.device
                )
        return wanted

    def padded(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fills: dict[tuple[Place, Path], Any] | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments at the sizes of their buckets; ``fills`` replaces what is given."""
        side = self.options.side
        given, named = list(args), dict(kwargs)
        inside: dict[Place, dict[Path, Any]] = {}
        for place, path, pad in plan.pads:
            target: Any = given if type(place) is int else named
            tensor = target[place]
            for key in path:
                tensor = dict(parts(tensor) or ())[key]
            fill = None if fills is None else fills.get((place, path))
            if fill is None:
                tensor = pad.carefully(tensor)
            else:
                for dim, size in pad.dims:
                    tensor = pad_to_bucket(tensor, dim, size, value=fill, side=side).tensor
            if path:
                inside.setdefault(place, {})[path] = tensor
            else:
                target[place] = tensor
        for place, new in inside.items():
            target = given if type(place) is int else named
            target[place] = replaced(target[place], new)
        for argument, value in plan.extras.items():
            if _torch.version_of(value) != 0:
                # Whoever wrote to it would have spoiled it for the next call.
                buckets = plan.buckets or None
                plan.extras, _ = self.extras(plan.inputs, plan.sizes, buckets, args, kwargs)
                value = plan.extras[argument]  # noqa: PLW2901
            place = plan.extra_places[argument]
            target = given if type(place) is int else named
            target[place] = value
        return given, named

    def unpadded(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        with_masks: bool = False,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the real arguments and the lengths, and masks as :meth:`real_extras` does."""
        given, named = list(args), dict(kwargs)
        for argument, value in self.real_extras(plan, with_masks=with_masks).items():
            place = plan.extra_places[argument]
            target: Any = given if type(place) is int else named
            target[place] = value
        return given, named


def _holder(inputs: tuple[Input, ...], axis: str) -> tuple[Input, int]:
    """Return the first input that has an axis, and the dim it is."""
    return next((each, dim) for each in inputs for dim, name in each.axes if name == axis)
