"""What the user declared, checked once: which dims of which arguments vary, and what pads them."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchguard._pytree import KeyPath, key_paths, keystr
from torchguard.bucketing.buckets import Buckets, buckets_by_axis
from torchguard.bucketing.decorator.bucket import Call, Input
from torchguard.bucketing.decorator.masking import lengths_of, mask_axes, masks_of
from torchguard.bucketing.dims import (
    Axes,
    axes_in,
    declared_at,
    declared_dims,
    lengths_by_axis,
    part_of,
)

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.api import Options

AxisSizes: TypeAlias = dict[str, int]
"""Size by axis."""


class Spec:
    """The declared arguments of one function, and the buckets of each axis."""

    def __init__(self, function: Callable[..., Any], options: Options, *, bound: bool) -> None:
        """Match options with the arguments of a function, ``bound`` to the first of them."""
        self.options = options
        name = getattr(function, "__qualname__", type(function).__name__) + "()"
        parameters = _parameters(function)
        kinds = {each.kind for each in parameters}
        positional = [
            each.name
            for each in parameters
            if each.kind in {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}
        ][bound:]
        self.parameters = tuple(positional)
        """What can be given by position."""
        self.required = frozenset(each.name for each in parameters if each.default is each.empty)
        dims: Any = options["dims"]
        if not isinstance(dims, Mapping):
            if len(dims) > len(positional) and Parameter.VAR_POSITIONAL not in kinds:
                raise TypeError(
                    f"bucketed: dims has {len(dims)} entries, but {name} takes {len(positional)} "
                    "arguments"
                )
            behind = (f"*{i}" for i in range(len(positional), len(dims)))
            dims = dict(zip([*positional, *behind], dims, strict=False))
        self.dims: dict[str, dict[KeyPath, Axes]] = {}
        """The named dims of each tensor in an argument; behind ``*args`` it is called ``*2``."""
        for (argument, *path), named in declared_dims(dims, "bucketed").items():
            self.dims.setdefault(argument, {})[tuple(path)] = named
        every = (named for inside in self.dims.values() for named in inside.values())
        axes = tuple(dict.fromkeys(axis for named in every for _, axis in named))
        if not axes:
            raise ValueError("bucketed: dims names no axis to pad")
        self.ladders: Mapping[str, Buckets | None] = dict.fromkeys(axes)
        """By axis; None for powers of two as they are needed."""
        if options["buckets"] is not None:
            self.ladders = buckets_by_axis(axes, options["buckets"], "bucketed")
        self.fill = dict(options["fill"] or {})
        self.masks = {mask.argument: mask for mask in masks_of(options["mask"], axes)}
        self.lengths = lengths_of(options["lengths"], axes)
        """The argument that takes the size of an axis, by axis."""
        explicit = {*positional, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}
        if Parameter.VAR_KEYWORD not in kinds:
            self._check_names(dims, explicit, name)
        for argument in self.fill:
            if argument not in self.dims:
                raise TypeError(f"bucketed: fill names {argument!r}, which dims does not pad")

    def _check_names(self, dims: Iterable[str], explicit: set[str], function: str) -> None:
        """Raise unless the function takes all that was named."""
        taken = ", ".join(sorted(explicit)) or "nothing"
        named = {
            "dims": dims,  # those of None too
            "fill": self.fill,
            "mask": self.masks,
            "lengths": self.lengths.values(),
        }
        for option, names in named.items():
            for name in names:
                if name not in explicit and not name.startswith("*"):
                    raise TypeError(
                        f"bucketed: {option} names {name!r}, but {function} takes {taken}"
                    )

    def find(self, name: str, argument: Any, places: Mapping[KeyPath, int]) -> Iterator[Input]:
        """Yield the tensors of an argument that have dims to pad; ``places`` are its leaves."""
        mask = self.masks.get(name)
        label = f"argument {name[1:]}" if name.startswith("*") else name
        for path, named in self.dims[name].items():
            value = part_of(argument, path, label, "bucketed") if path else argument
            if value is None:
                continue
            where = keystr(label, path, argument) if path else label
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"bucketed: {where} is of type {type(value).__name__}, expected a tensor, as "
                    "dims says"
                )
            fill = declared_at(self.fill[name], path) if name in self.fill else None
            if fill is None and mask is not None:
                fill = mask.fill
            axes = axes_in(value, named, where, "bucketed")
            yield _input_of(places[path], where, value, axes, fill)


def _input_of(index: int, label: str, tensor: torch.Tensor, axes: Axes, fill: Any) -> Input:
    shape, dtype = tuple(tensor.shape), tensor.dtype
    return Input(index, label, shape, axes, fill, tensor.device, dtype, tensor.requires_grad)


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # a builtin without a signature: anything goes
        return [
            Parameter("args", Parameter.VAR_POSITIONAL),
            Parameter("kwargs", Parameter.VAR_KEYWORD),
        ]


# ---- the tensors of a call that have dims to pad ----


def find_inputs(spec: Spec, call: Call) -> tuple[tuple[Input, ...], AxisSizes]:
    """Look at a call: its tensors that have dims to pad, and the size of each axis."""
    found: dict[str, list[Input]] = {}
    names, _, treedefs, starts = call.signature
    given = zip(names, call.arguments, treedefs, starts, strict=False)
    # Masks that dims does not name come last: their batch is that of the first that dims names.
    for name, argument, treedef, start in sorted(given, key=lambda each: each[0] not in spec.dims):
        if argument is None:
            continue
        if name in spec.dims:
            paths = [()] if treedef is None else key_paths(treedef)
            places = {path: place for place, path in enumerate(paths, start)}
            found[name] = [*spec.find(name, argument, places)]
        elif name in spec.masks:
            mask = spec.masks[name]
            in_order = (each for known in spec.dims for each in found.get(known, ()))
            axes = mask_axes(in_order, mask, argument)
            found[name] = [_input_of(start, name, argument, axes, mask.fill)]
    inputs = [each for tensors in found.values() for each in tensors]
    sizes = lengths_by_axis([(e.label, e.shape, e.axes) for e in inputs], "bucketed")
    for axis in spec.ladders:
        if axis not in sizes:
            missing = [name for name in spec.dims if name in spec.required and name not in names]
            if missing:
                raise TypeError(
                    f"bucketed: the call is missing the argument {missing[0]!r}, which dims names"
                )
            raise ValueError(
                f"bucketed: no argument of the call has axis {axis!r}; dims names "
                f"{', '.join(spec.dims)}"
            )
    return tuple(inputs), {axis: sizes[axis] for axis in spec.ladders}


def find_buckets(spec: Spec, sizes: AxisSizes, inputs: Iterable[Input]) -> AxisSizes:
    """Return each axis' bucket."""
    found: AxisSizes = {}
    for axis, size in sizes.items():
        ladder = spec.ladders[axis]
        if ladder is None:
            found[axis] = 1 << max(size - 1, 0).bit_length()
        elif size <= ladder.sizes[-1]:
            found[axis] = ladder.sizes[bisect_left(ladder.sizes, size)]
        else:
            label = next(e.label for e in inputs if any(axis == name for _, name in e.axes))
            raise ValueError(
                f"bucketed: axis {axis!r} is {size} in {label}, but the largest bucket is "
                f"{ladder.sizes[-1]}: add a larger one to buckets, or leave buckets out"
            )
    return found
