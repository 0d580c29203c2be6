"""What the user declared, checked once: which dims of which arguments vary, and what pads them.

``dims`` takes the form of ``dynamic_shapes`` of ``torch.export``:
https://pytorch.org/docs/stable/export.html#expressing-dynamism
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torchguard._pytree import KeyPath, children, key_paths, keystr
from torchguard._torch import warn_user
from torchguard.bucketing.decorator.bucket import Call, Input
from torchguard.bucketing.decorator.ladders import (
    Ladder,
    ladders_of,
    read_buckets,
)
from torchguard.bucketing.decorator.masking import Mask, lengths_of, masks_of

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.api import MaskingOptions

# ---- the declaration, matched with the arguments of a function ----

AxisSizes: TypeAlias = dict[str, int]
"""Size by axis."""

# difflib's ratio of a name of four letters and one with a letter more or less is 0.86 or above.
_ALIKE = 0.8


@dataclass(frozen=True)
class Spec:
    """The declared arguments of one function, and the buckets of each axis."""

    options: MaskingOptions
    dims: Mapping[str, Any]
    """The declaration by argument; behind ``*args`` by position, ``"*2"``."""
    fill: Mapping[str, Any]
    masks: Mapping[str, Mask]
    lengths: Mapping[str, str]
    """The argument that takes the size of an axis, by axis."""
    ladders: dict[str, Ladder]
    """The buckets of each axis, which may change; two axes may share them."""
    parameters: tuple[str, ...]
    """Names of what can be given by position."""
    required: frozenset[str]
    explicit: frozenset[str]
    var_keyword: str | None
    """The name of ``**kwargs``, if the function has it."""

    @classmethod
    def of(cls, function: Callable[..., Any], options: MaskingOptions, *, bound: bool) -> Spec:
        """Match options with the arguments of a function."""
        axes = tuple(dict.fromkeys(_axis_names(options["dims"], "dims")))
        saved = None if options["plan"] is None else read_buckets(options["plan"])
        growing = options["overflow"] == "grow"
        ladders = ladders_of(axes, options["buckets"], saved, growing=growing)
        positional, keywords, args, kwargs, required = _parameters(function)
        if bound and positional:
            positional = positional[1:]
        dims = _by_name(options["dims"], positional, args, _name_of(function))
        # dims={"args": [...]} names what is behind *args by position.
        if args in dims:
            for index, inner in enumerate(dims.pop(args) or ()):
                dims[f"*{len(positional) + index}"] = inner
        # dims={"kwargs": {...}} names what is behind **kwargs.
        if kwargs in dims:
            dims |= dims.pop(kwargs) or {}
        masks = masks_of(options["mask"], axes)
        spec = cls(
            options=options,
            dims={name: each for name, each in dims.items() if each is not None},
            fill=dict(options["fill"] or {}),
            masks={mask.argument: mask for mask in masks},
            lengths=lengths_of(options["lengths"], axes),
            ladders=ladders,
            parameters=tuple(positional),
            required=required,
            explicit=frozenset((*positional, *keywords)),
            var_keyword=kwargs,
        )
        spec._check_names(dims, _name_of(function))
        return spec

    def _check_names(self, dims: Mapping[str, Any], function: str) -> None:
        """Raise unless the function takes all that was named.

        A name that is much like one in the signature, but only ``**kwargs`` takes, warns:
        ``mask="mask"`` where the argument is called ``attention_mask`` would vanish.
        """
        taken = ", ".join(sorted(self.explicit)) or "nothing"
        made = [("mask", name) for name in self.masks]
        made += [("lengths", name) for name in self.lengths.values()]
        given = [("dims", name) for name in dims] + [("fill", name) for name in self.fill]
        for what, name in given + made:
            if self.var_keyword is None and name not in self.explicit and not name.startswith("*"):
                raise TypeError(f"bucketed: {what} names {name!r}, but {function} takes {taken}")
            if what == "fill" and dims.get(name) is None:
                raise TypeError(f"bucketed: fill names {name!r}, which dims does not pad")
        unused = sorted(self.explicit - {*self.masks, *self.lengths.values(), *self.dims})
        for what, name in made:
            alike = [other for other in unused if _alike(other, name)]
            if name not in self.explicit and alike:
                warn_user(
                    f"bucketed: {what} names {name!r}, which only **{self.var_keyword} takes: is "
                    f"it {alike[0]!r}?"
                )

    def unread_masks(self) -> str:
        """Return a hint about masks that only ``**kwargs`` takes; empty where there is none."""
        found = [name for name in self.masks if name not in self.explicit]
        if not found or not self.explicit or self.var_keyword is None:
            return ""
        return (
            f". mask names {found[0]!r}, which the function takes as one of **{self.var_keyword} "
            f"only: if nothing reads it there, name one of {', '.join(sorted(self.explicit))}"
        )

    def find(self, name: str, value: Any) -> Iterator[tuple[KeyPath, Input]]:
        """Yield the tensors of one argument that have dims to pad, and where in it they are."""
        mask = self.masks.get(name)
        if name in self.dims:
            label = f"argument {name[1:]}" if name.startswith("*") else name
            spec, fill = self.dims[name], self.fill.get(name)
            for path, each in _find(label, value, spec, fill, path=(), whole=value):
                if mask is not None and not each.declared:
                    yield path, replace(each, fill=mask.fill, declared=True)
                else:
                    yield path, each
        elif mask is not None and value is not None:
            if not isinstance(value, torch.Tensor) or not value.dim():
                raise TypeError(f"bucketed: {name} is {value!r}, expected a mask, a tensor")
            axes = [(value.dim() - 1, mask.axis)]
            batch = _batch_axis(self.dims.values(), mask.axis)
            # One row, as of a mask (1, 1, T, T), is that of every row of the batch.
            if batch is not None and value.dim() > 1 and (value.dim() == 2 or value.shape[0] != 1):  # noqa: PLR2004
                axes.insert(0, (0, batch))
            yield (), _input(name, value, tuple(axes), mask.fill)


# ---- the tensors of a call that have dims to pad ----


def find_inputs(spec: Spec, call: Call) -> tuple[tuple[Input, ...], AxisSizes]:
    """Look at a call: its tensors that have dims to pad, and the size of each axis."""
    inputs = []
    sizes: dict[str, tuple[int, str]] = {}
    names, _, treedefs, starts = call.signature
    for name, argument, treedef, start in zip(
        names, call.arguments, treedefs, starts, strict=False
    ):
        if name not in spec.dims and name not in spec.masks:
            continue
        paths = [()] if treedef is None else key_paths(treedef)
        for path, found in spec.find(name, argument):
            for dim, axis in found.axes:
                size = found.shape[dim]
                before, label = sizes.setdefault(axis, (size, found.label))
                if before != size:
                    raise ValueError(
                        f"bucketed: axis {axis!r} is {before} in {label} and {size} in "
                        f"{found.label}"
                    )
            inputs.append(replace(found, index=start + paths.index(path)))
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


def find_buckets(spec: Spec, sizes: AxisSizes, inputs: Iterable[Input]) -> AxisSizes | None:
    """Return each axis' bucket; None if a size is above the largest and may run without."""
    found: AxisSizes = {}
    # Two axes may share a ladder, which is asked once for both sizes.
    for ladder in dict.fromkeys(spec.ladders.values()):
        bucket = ladder.bucket_for(sizes)
        if bucket is None and spec.options["overflow"] == "error":
            label = next(
                each.label for each in inputs if any(axis in ladder.axes for _, axis in each.axes)
            )
            raise ValueError(
                f"bucketed: {ladder.too_large(sizes, label)}, or pass overflow='grow', 'eager' or "
                "'dynamic'"
            )
        if bucket is None:
            return None
        found |= bucket
    # In the order of the axes, by which buckets are compared and counted.
    return {axis: found[axis] for axis in sizes}


def _batch_axis(dims: Iterable[Any], axis: str) -> str | None:
    """Return the axis of dim 0 of the first tensor that has ``axis`` behind it, if it has one."""
    of_tensors = (names for spec in dims for names in _dims_of_tensors(spec))
    first = next((names.get(0) for names in of_tensors if axis in names.values()), None)
    return None if first == axis else first


def _dims_of_tensors(spec: Any) -> Iterator[dict[int, str | None]]:
    if isinstance(spec, Mapping) and all(type(key) is int for key in spec):
        yield {dim: _name(each, "dims") for dim, each in spec.items()}
    elif isinstance(spec, (Mapping, list, tuple)):
        for inner in spec.values() if isinstance(spec, Mapping) else spec:
            yield from _dims_of_tensors(inner)


def _name(axis: Any, where: str) -> str | None:
    """Return the name of an axis: a string, or a ``torch.export.Dim``, which has one."""
    if axis is None or isinstance(axis, str):
        return axis
    name = getattr(axis, "__name__", None)
    if isinstance(name, str):
        return name
    raise TypeError(f"bucketed: {where} is {axis!r}, expected the name of an axis, such as 't'")


def _axis_names(spec: Any, where: str) -> Iterator[str]:
    """Yield every name in a declaration, in its order."""
    if isinstance(spec, Mapping):
        for key, inner in spec.items():
            if type(inner) is int and isinstance(key, str):
                # Turned around, or without a name.
                right = f"{{{key!r}: {{{inner}: 't'}}}}" if where == "dims" else {inner: key}
                raise TypeError(
                    f"bucketed: {where} is {{{key!r}: {inner}}}, expected the dimension and then "
                    f"its name: {right}"
                )
            yield from _axis_names(inner, f"{where}[{key!r}]")
    elif isinstance(spec, Sequence) and not isinstance(spec, str):
        for index, inner in enumerate(spec):
            yield from _axis_names(inner, f"{where}[{index}]")
    else:
        name = _name(spec, where)
        if name is not None:
            yield name


def _alike(name: str, other: str) -> bool:
    """Whether one may be a misspelling of the other: ``mask`` of ``attention_mask``."""
    inside = f"_{other}_" in f"_{name}_"
    return inside or difflib.SequenceMatcher(None, name, other).ratio() > _ALIKE


def _by_name(
    dims: Any, positional: Sequence[str], args: str | None, function: str
) -> dict[str, Any]:
    """Return a declaration by name; those behind ``*args`` are called ``"*2"``."""
    of_a_tensor = isinstance(dims, Mapping) and dims and all(type(key) is int for key in dims)
    if isinstance(dims, Mapping) and not of_a_tensor:
        return dict(dims)
    if not isinstance(dims, Sequence) or isinstance(dims, str):
        raise TypeError(
            f"bucketed: dims is {dims!r}, expected {{argument: {{dim: name}}}}, such as "
            "{'ids': {1: 't'}}"
        )
    if len(dims) > len(positional) and args is None:
        raise TypeError(
            f"bucketed: dims has {len(dims)} entries, but {function} takes "
            f"{len(positional)} arguments"
        )
    names = [*positional, *(f"*{i}" for i in range(len(positional), len(dims)))]
    return dict(zip(names, dims, strict=False))


def _input(label: str, tensor: torch.Tensor, axes: tuple[tuple[int, str], ...], fill: Any) -> Input:
    """Describe a tensor; which leaf of the call it is is not known yet."""
    declared = fill is not None
    shape, device, dtype = tuple(tensor.shape), tensor.device, tensor.dtype
    return Input(-1, label, shape, axes, fill if declared else 0, declared, device, dtype)


def _find(
    label: str, value: Any, spec: Any, fill: Any, *, path: KeyPath, whole: Any
) -> Iterator[tuple[KeyPath, Input]]:
    if spec is None or value is None:
        return
    where = keystr(label, path, whole) if path else label
    if isinstance(value, torch.Tensor):
        axes = _axes_of(value, spec, where)
        if axes:
            yield path, _input(where, value, axes, fill)
        return
    inside = children(value)
    if inside is None:
        raise TypeError(
            f"bucketed: {where} is of type {type(value).__name__}, expected a tensor, as dims says"
        )
    parts = dict(inside)
    for key, inner in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
        if inner is None:
            continue
        if key not in parts:
            raise KeyError(f"bucketed: {where} has no part {key!r}, but dims names it")
        part = _fill_of(fill, key)
        yield from _find(label, parts[key], inner, part, path=(*path, key), whole=whole)


def _axes_of(tensor: torch.Tensor, spec: Any, where: str) -> tuple[tuple[int, str], ...]:
    if not isinstance(spec, (Mapping, list, tuple)):
        raise TypeError(
            f"bucketed: {where} is a tensor, but dims has {spec!r} for it, expected {{dim: name}}"
        )
    axes = []
    for dim, axis in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
        name = _name(axis, f"dims of {where}")
        if name is None:
            continue
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(
                f"bucketed: {where} has shape {tuple(tensor.shape)}, but dims names its "
                f"dimension {dim}"
            )
        axes.append((dim % tensor.dim(), name))
    return tuple(axes)


def _fill_of(fill: Any, key: Any) -> Any:
    if isinstance(fill, Mapping):
        return fill.get(key)
    if isinstance(fill, (list, tuple)):
        return fill[key] if key < len(fill) else None
    return fill


def _parameters(
    function: Callable[..., Any],
) -> tuple[list[str], list[str], str | None, str | None, frozenset[str]]:
    """Return names by position, by keyword only, of ``*args``, of ``**kwargs``, and required."""
    try:
        listed = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: anything goes
        return [], [], "args", "kwargs", frozenset()
    positional = [p.name for p in listed if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    keywords = [p.name for p in listed if p.kind is p.KEYWORD_ONLY]
    args = next((p.name for p in listed if p.kind is p.VAR_POSITIONAL), None)
    kwargs = next((p.name for p in listed if p.kind is p.VAR_KEYWORD), None)
    required = frozenset(p.name for p in listed if p.default is p.empty)
    return positional, keywords, args, kwargs, required


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__) + "()"
