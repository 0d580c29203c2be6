"""What the user declared, checked once: which dims of which arguments vary, and what pads them.

``dims`` takes the form of ``dynamic_shapes`` of ``torch.export``:
https://pytorch.org/docs/stable/export.html#expressing-dynamism
"""

from __future__ import annotations

import inspect
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchguard._pytree import KeyPath, children, key_paths, keystr
from torchguard.bucketing.buckets import Buckets, buckets_by_axis
from torchguard.bucketing.decorator.bucket import Call, Input
from torchguard.bucketing.decorator.masking import Mask, lengths_of, mask_axes, masks_of

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.api import Options

# ---- the declaration, matched with the arguments of a function ----

AxisSizes: TypeAlias = dict[str, int]
"""Size by axis."""


class Ladder:
    """The buckets of one axis: those given, or powers of two as they are needed."""

    def __init__(self, given: Buckets | None) -> None:
        self.sizes = [] if given is None else list(given)
        self._powers = given is None
        self._lock = threading.Lock()

    def bucket_for(self, size: int) -> int | None:
        """Return the smallest bucket that holds a size, None if there is none."""
        if self._powers:
            power = 1 << max(size - 1, 0).bit_length()
            with self._lock:
                if power not in self.sizes:
                    self.sizes = sorted([*self.sizes, power])
            return power
        place = bisect_left(self.sizes, size)
        return self.sizes[place] if place < len(self.sizes) else None

    def least(self, size: int) -> int:
        """Return the smallest size that gets the same bucket."""
        below = [each for each in self.sizes if each < size]
        return max(below, default=0) + 1


@dataclass(frozen=True)
class Spec:
    """The declared arguments of one function, and the buckets of each axis."""

    options: Options
    dims: Mapping[str, Any]  # by argument; behind *args by position, "*2"
    fill: Mapping[str, Any]
    masks: Mapping[str, Mask]
    lengths: Mapping[str, str]  # the argument that takes the size of an axis, by axis
    ladders: dict[str, Ladder]  # by axis
    parameters: tuple[str, ...]  # what can be given by position
    required: frozenset[str]
    explicit: frozenset[str]
    var_keyword: str | None  # the name of **kwargs, if the function has it

    @classmethod
    def of(cls, function: Callable[..., Any], options: Options, *, bound: bool) -> Spec:
        """Match options with the arguments of a function."""
        axes = tuple(dict.fromkeys(_axis_names(options["dims"], "dims")))
        if not axes:
            raise ValueError("bucketed: dims names no axis to pad")
        given: Mapping[str, Buckets | None] = dict.fromkeys(axes)
        if options["buckets"] is not None:
            given = buckets_by_axis(axes, options["buckets"], "bucketed")
        function_name = getattr(function, "__qualname__", type(function).__name__) + "()"
        by_kind, required = _parameters(function)
        positional = [*by_kind["POSITIONAL_ONLY"], *by_kind["POSITIONAL_OR_KEYWORD"]][bound:]
        args, kwargs = (next(iter(by_kind[f"VAR_{k}"]), None) for k in ("POSITIONAL", "KEYWORD"))
        dims: Any = options["dims"]
        if isinstance(dims, Mapping):
            dims = dict(dims)
        elif len(dims) > len(positional) and args is None:
            raise TypeError(
                f"bucketed: dims has {len(dims)} entries, but {function_name} takes "
                f"{len(positional)} arguments"
            )
        else:
            names = [*positional, *(f"*{i}" for i in range(len(positional), len(dims)))]
            dims = dict(zip(names, dims, strict=False))
        spec = cls(
            options=options,
            dims={name: each for name, each in dims.items() if each is not None},
            fill=dict(options["fill"] or {}),
            masks={mask.argument: mask for mask in masks_of(options["mask"], axes)},
            lengths=lengths_of(options["lengths"], axes),
            ladders={axis: Ladder(each) for axis, each in given.items()},
            parameters=tuple(positional),
            required=required,
            explicit=frozenset((*positional, *by_kind["KEYWORD_ONLY"])),
            var_keyword=kwargs,
        )
        spec._check_names(dims, function_name)
        return spec

    def _check_names(self, dims: Mapping[str, Any], function: str) -> None:
        """Raise unless the function takes all that was named."""
        taken = ", ".join(sorted(self.explicit)) or "nothing"
        made = [("mask", name) for name in self.masks]
        made += [("lengths", name) for name in self.lengths.values()]
        given = [("dims", name) for name in dims] + [("fill", name) for name in self.fill]
        for what, name in given + made:
            if self.var_keyword is None and name not in self.explicit and not name.startswith("*"):
                raise TypeError(f"bucketed: {what} names {name!r}, but {function} takes {taken}")
            if what == "fill" and dims.get(name) is None:
                raise TypeError(f"bucketed: fill names {name!r}, which dims does not pad")

    def find(self, name: str, argument: Any, places: Mapping[KeyPath, int]) -> Iterator[Input]:
        """Yield the tensors of an argument that have dims to pad; ``places`` are its leaves."""
        mask = self.masks.get(name)
        label = f"argument {name[1:]}" if name.startswith("*") else name

        def inside(value: Any, spec: Any, fill: Any, path: KeyPath) -> Iterator[Input]:
            if spec is None or value is None:
                return
            where = keystr(label, path, argument) if path else label
            if isinstance(value, torch.Tensor):
                axes = _axes_of(value, spec, where)
                if axes:
                    fill = mask.fill if fill is None and mask is not None else fill
                    yield _input_of(places[path], where, value, axes, fill)
                return
            parts = children(value)
            if parts is None:
                raise TypeError(
                    f"bucketed: {where} is of type {type(value).__name__}, expected a tensor, as "
                    "dims says"
                )
            found = dict(parts)
            for key, inner in _items(spec):
                if key not in found:
                    raise KeyError(f"bucketed: {where} has no part {key!r}, but dims names it")
                yield from inside(found[key], inner, _fill_of(fill, key), (*path, key))

        yield from inside(argument, self.dims[name], self.fill.get(name), ())


# ---- the tensors of a call that have dims to pad ----


def find_inputs(spec: Spec, call: Call) -> tuple[tuple[Input, ...], AxisSizes]:
    """Look at a call: its tensors that have dims to pad, and the size of each axis."""
    inputs: list[Input] = []
    declared: dict[str, list[Input]] = {}
    sizes: dict[str, tuple[int, str]] = {}
    names, _, treedefs, starts = call.signature
    given = zip(names, call.arguments, treedefs, starts, strict=False)
    # Masks that dims does not name come last: their batch is that of the first that dims names.
    for name, argument, treedef, start in sorted(given, key=lambda each: each[0] not in spec.dims):
        if argument is None or (name not in spec.dims and name not in spec.masks):
            continue
        paths = [()] if treedef is None else key_paths(treedef)
        places = {path: place for place, path in enumerate(paths, start)}
        if name in spec.dims:
            tensors = declared[name] = [*spec.find(name, argument, places)]
        else:
            in_order = (each for known in spec.dims for each in declared.get(known, ()))
            axes = mask_axes(in_order, spec.masks[name], argument)
            tensors = [_input_of(start, name, argument, axes, spec.masks[name].fill)]
        for found in tensors:
            for dim, axis in found.axes:
                size = found.shape[dim]
                before, label = sizes.setdefault(axis, (size, found.label))
                if before != size:
                    raise ValueError(
                        f"bucketed: axis {axis!r} is {before} in {label} and {size} in "
                        f"{found.label}"
                    )
            inputs.append(found)
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
    return tuple(inputs), {axis: sizes[axis][0] for axis in spec.ladders}


def find_buckets(spec: Spec, sizes: AxisSizes, inputs: Iterable[Input]) -> AxisSizes:
    """Return each axis' bucket."""
    found: AxisSizes = {}
    for axis, size in sizes.items():
        ladder = spec.ladders[axis]
        bucket = ladder.bucket_for(size)
        if bucket is None:
            label = next(e.label for e in inputs if any(axis == name for _, name in e.axes))
            raise ValueError(
                f"bucketed: axis {axis!r} is {size} in {label}, but the largest bucket is "
                f"{ladder.sizes[-1]}: add a larger one to buckets, or leave buckets out"
            )
        found[axis] = bucket
    return found


def _name(axis: Any, where: str) -> str:
    """Return the name of an axis: a string, or a ``torch.export.Dim``, which has one."""
    name = axis if isinstance(axis, str) else getattr(axis, "__name__", None)
    if isinstance(name, str):
        return name
    raise TypeError(f"bucketed: {where} is {axis!r}, expected {{dim: name}}, such as {{1: 't'}}")


def _axis_names(spec: Any, where: str) -> Iterator[str]:
    """Yield every name in a declaration, in its order."""
    if isinstance(spec, Mapping):
        for key, inner in spec.items():
            yield from _axis_names(inner, f"{where}[{key!r}]")
    elif isinstance(spec, Sequence) and not isinstance(spec, str):
        for index, inner in enumerate(spec):
            yield from _axis_names(inner, f"{where}[{index}]")
    elif spec is not None:
        yield _name(spec, where)


def _input_of(
    index: int, label: str, tensor: torch.Tensor, axes: tuple[tuple[int, str], ...], fill: Any
) -> Input:
    """Describe a tensor."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    return Input(index, label, shape, axes, fill, tensor.device, dtype, tensor.requires_grad)


def _axes_of(tensor: torch.Tensor, spec: Any, where: str) -> tuple[tuple[int, str], ...]:
    if not isinstance(spec, (Mapping, list, tuple)):
        raise TypeError(
            f"bucketed: {where} is a tensor, but dims has {spec!r} for it, expected {{dim: name}}"
        )
    axes = []
    for dim, axis in _items(spec):
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(
                f"bucketed: {where} has shape {tuple(tensor.shape)}, but dims names its "
                f"dimension {dim}"
            )
        axes.append((dim % tensor.dim(), _name(axis, "dims")))
    return tuple(axes)


def _items(spec: Any) -> list[tuple[Any, Any]]:
    """Return what a declaration says, by key or by place."""
    items = spec.items() if isinstance(spec, Mapping) else enumerate(spec)
    return [(key, inner) for key, inner in items if inner is not None]


def _fill_of(fill: Any, key: Any) -> Any:
    if isinstance(fill, Mapping):
        return fill.get(key)
    if isinstance(fill, (list, tuple)):
        return fill[key] if key < len(fill) else None
    return fill


def _parameters(
    function: Callable[..., Any],
) -> tuple[dict[str, list[str]], frozenset[str]]:
    """Return the names of parameters by their kind, and of those without a default."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    try:
        listed = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # a builtin without a signature: anything goes
        by_kind |= {"VAR_POSITIONAL": ["args"], "VAR_KEYWORD": ["kwargs"]}
        listed = []
    for each in listed:
        by_kind[each.kind.name].append(each.name)
    return by_kind, frozenset(each.name for each in listed if each.default is each.empty)
