"""The shape of a call: its bucket, what is padded there, and what else a graph depends on.

:func:`shape_of` is a function of a call and of nothing else; what it returns can be hashed.

Arguments, masks and paddings are addressed by the index of a leaf: the arguments given by
position come first, then those given by name, each flattened.
"""

from __future__ import annotations

import enum
import functools
import math
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from typing_extensions import Self

from torchguard._pytree import (
    KeyPath,
    TreeDef,
    flatten,
    key_paths,
    keystr,
    unflatten,
)
from torchguard._torch import members_of
from torchguard.bucketing.decorator.spec import Mask, Spec
from torchguard.bucketing.dims import Axes, axes_in, declared_at, lengths_by_axis, part_of
from torchguard.bucketing.padding import Fill, Side, check_number, pad_to_bucket
from torchguard.equivalence.outcome import Given
from torchguard.state.walk import modules_reached, reachable, with_submodules

AxisSizes: TypeAlias = Mapping[str, int]
"""Size by axis."""

# ---- what tells calls apart ----

PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
"""Types whose values ``torch.compile`` compiles in: each value is a graph of its own."""

_LIKE_PLAIN: Any = (
    (np.bool_, bool),
    ((int, np.integer), int),
    (str, str.__str__),
    (complex, lambda each: (number_key(each.real), number_key(each.imag))),
    ((bytes, torch.Size, range), lambda each: each),
    ((set, frozenset), lambda each: frozenset(map(leaf_key, each))),
    (slice, lambda each: (*map(leaf_key, (each.start, each.stop, each.step)),)),
    (functools.partial, lambda f: _keys_in((f.func, f.args, f.keywords))),
    # A method may be one of a partial, which has neither.
    ((FunctionType, MethodType), lambda f: (getattr(f, "__name__", 0), getattr(f, "__code__", 0))),
    ((BuiltinFunctionType, type), lambda f: f.__qualname__),
)
"""Types whose values count, besides the plain ones and floats, and what tells them apart."""


class TensorKey(NamedTuple):
    """What a graph depends on of a tensor whose dims are not named, or of an array."""

    shape: tuple[int, ...]
    dtype: Any
    device: Any = "numpy"
    requires_grad: bool = False


def number_key(number: float) -> Any:
    """Return a float, or its bits: a NaN is not equal to itself, and 0.0 is equal to -0.0."""
    return number if number and number == number else (number.hex(),)  # noqa: PLR0124


def leaf_key(leaf: Any) -> Any:
    """Return what a graph depends on of a leaf: something to hash and compare."""
    if isinstance(leaf, torch.Tensor):
        return TensorKey(leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
    # By type, not isinstance(): a subclass of int may compare as it likes.
    if isinstance(leaf, enum.Enum) or (type(leaf) in PLAIN and type(leaf) is not float):
        return type(leaf), leaf
    for kinds, plain in _KEYS:
        if isinstance(leaf, kinds):
            return plain(leaf)
    for kinds, plain in _LIKE_PLAIN:
        if isinstance(leaf, kinds):
            return type(leaf), plain(leaf)
    return type(leaf)


def _module_key(module: torch.nn.Module) -> Any:
    # One without tensors and children, such as nn.MSELoss(), may be made for each call: its type
    # and its options tell it apart.
    if any(members_of(module)):
        return weakref.ref(module), module.training
    return type(module), *((k, leaf_key(v)) for k, v in vars(module).items() if type(v) in PLAIN)


_KEYS: Any = (
    ((float, np.floating), lambda each: number_key(float(each))),
    (np.ndarray, lambda each: TensorKey(each.shape, each.dtype)),
    (torch.nn.Module, _module_key),
)


def _keys_in(values: Any) -> tuple[Any, ...]:
    leaves, treedef = flatten(values)
    return treedef, *map(leaf_key, leaves)


# ---- a call ----


class Signature(NamedTuple):
    """How a call gives its arguments: equal for calls that share a route."""

    names: tuple[str, ...]  # "*2" for one behind *args
    positional: int  # how many of them are given by position
    treedefs: tuple[TreeDef, ...]
    starts: tuple[int, ...]
    """The index of each argument's first leaf, and how many leaves there are."""


class Call(NamedTuple):
    """The arguments of one call, flattened; padding has not happened yet."""

    signature: Signature
    owner: tuple[Any, ...]  # what comes before the caller's arguments: self
    arguments: list[Any]
    leaves: list[Any]

    @classmethod
    def of(cls, spec: Spec, owner: tuple[Any, ...], args: Any, kwargs: Mapping[str, Any]) -> Self:
        """Flatten the arguments of a call."""
        arguments = [*args, *kwargs.values()]
        leaves: list[Any] = []
        treedefs, starts = [], [0]
        for argument in arguments:
            treedef = None
            if type(argument) is torch.Tensor:
                leaves.append(argument)
            else:
                inside, treedef = flatten(argument)
                leaves += inside
            treedefs.append(treedef)
            starts.append(len(leaves))
        known = spec.parameters
        # By keyword in the order of the call: the leaves come in that order as well.
        names = (*(known[i] if i < len(known) else f"*{i}" for i in range(len(args))), *kwargs)
        signature = Signature(names, len(args), tuple(treedefs), tuple(starts))
        return cls(signature, owner, arguments, leaves)

    def with_leaves(self, new: Mapping[int, Any]) -> Self:
        """Return the same call with some leaves replaced."""
        return self._replace(leaves=[new.get(i, leaf) for i, leaf in enumerate(self.leaves)])

    def argument_of(self, index: int) -> str:
        """Return the name of the argument that a leaf is in."""
        return self.signature.names[bisect_right(self.signature.starts, index) - 1]

    def labels(self) -> list[str]:
        """Return how to spell each leaf: ``batch['ids']``."""
        found = []
        for name, argument, treedef in zip(
            self.signature.names, self.arguments, self.signature.treedefs, strict=True
        ):
            label = f"argument {name[1:]}" if name.startswith("*") else name
            if treedef is None:
                found.append(label)
            else:
                found += [keystr(label, path, argument) for path in key_paths(treedef)]
        return found

    def modules(self, function: Callable[..., Any]) -> list[torch.nn.Module]:
        """Return the modules that a function can reach in this call."""
        return with_submodules(modules_reached(function, (*self.owner, *self.arguments)))

    def tensors(self, function: Callable[..., Any]) -> list[torch.Tensor]:
        """Return the tensors that it can reach, without those inside modules."""
        found = reachable(function, (*self.owner, *self.arguments))
        return [each for each in found if isinstance(each, torch.Tensor)]

    def given(
        self,
        extras: Mapping[str, Any],
        pads: Mapping[int, Callable[..., torch.Tensor]] | None,
        fills: Mapping[int, Any],
        content: Mapping[int, torch.Tensor],
    ) -> Given:
        """Return what a function is called with, padded if there are ``pads``.

        If a leaf requires a gradient, a new leaf of autograd's graph takes its place. ``content``
        is what the padding holds otherwise than is declared.
        """
        sources = {
            place: leaf.detach().requires_grad_()
            for place, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()
        }
        leaves = self.with_leaves(sources).leaves
        if pads is not None:
            leaves = padded(pads, leaves, fills)
            for index in content.keys() & pads.keys() - fills.keys():
                region = region_of(self.leaves[index], pads[index])
                leaves[index] = torch.where(region, leaves[index], content[index])
        args, kwargs = self.bind(extras, leaves)
        return Given(leaves, args, kwargs, sources)

    def bind(
        self, extras: Mapping[str, Any] | None = None, leaves: list[Any] | None = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments, containers built anew."""
        names, positional, treedefs, starts = self.signature
        values = self.leaves if leaves is None else leaves
        # Otherwise each argument is one leaf, and goes as it is.
        if len(values) != len(names) or any(treedefs):
            values = [
                values[start] if treedef is None else unflatten(values[start:end], argument)
                for start, end, treedef, argument in zip(
                    starts, starts[1:], treedefs, self.arguments, strict=False
                )
            ]
        if not extras and positional == len(names):
            return [*self.owner, *values], {}
        args = [*self.owner, *values[:positional]]
        named = dict(zip(names[positional:], values[positional:], strict=True))
        if extras:
            for argument, value in extras.items():
                place = names.index(argument) if argument in names else positional
                if place < positional:
                    args[len(self.owner) + place] = value
                else:
                    named[argument] = value
        return args, named


@dataclass(frozen=True)
class Input:
    """A tensor of a call that has a dim to pad."""

    index: int  # of the leaf
    label: str
    shape: tuple[int, ...]
    axes: Axes
    fill: Fill | None  # None where none is declared, which stands for 0
    device: torch.device
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, index: int, label: str, tensor: torch.Tensor, axes: Axes, fill: Any) -> Self:
        """Note what matters of a tensor."""
        shape, dtype = tuple(tensor.shape), tensor.dtype
        return cls(index, label, shape, axes, fill, tensor.device, dtype, tensor.requires_grad)

    def padded(self, buckets: AxisSizes) -> tuple[int, ...]:
        """Return its shape after padding."""
        named = dict(self.axes)
        return tuple(
            buckets[named[dim]] if dim in named else size for dim, size in enumerate(self.shape)
        )

    def pad(self, buckets: AxisSizes, side: Side) -> Callable[..., torch.Tensor] | None:
        """Return what pads it, which takes another fill too; None if it is as long already."""
        shape, fill = self.padded(buckets), 0 if self.fill is None else self.fill
        dims = [(dim, shape[dim]) for dim, _ in self.axes if shape[dim] != self.shape[dim]]
        if not dims:
            return None
        if fill == "repeat-last" and 0 in self.shape:
            fill = 0  # nothing is there to repeat, and nothing of it will be seen
        if not isinstance(fill, (bool, int, float, complex)):

            def pad(x: torch.Tensor, value: Fill = fill) -> torch.Tensor:
                for dim, size in dims:
                    x = pad_to_bucket(x, dim, size, value=value, side=side).tensor
                return x

            return pad
        if fill:  # each dtype has a 0
            check_number(fill, self.dtype)
        pads = [0] * (2 * len(shape))
        for dim, size in dims:
            # constant_pad_nd counts from the last dim, left before right.
            pads[2 * (len(shape) - 1 - dim) + (side == "right")] = size - self.shape[dim]
        constant_pad_nd = torch.constant_pad_nd

        def pad_with_number(x: torch.Tensor, value: Any = fill) -> torch.Tensor:
            return constant_pad_nd(x, pads, value)

        return pad_with_number


def mask_axes(inputs: Iterable[Input], mask: Mask, value: Any) -> Axes:
    """Return the dims of a mask whose sizes vary, the batch and the last: (dim, its axis)."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        raise TypeError(f"bucketed: {mask.argument} is {value!r}, expected a mask, a tensor")
    last = (value.dim() - 1, mask.axis)
    masked = (dict(each.axes) for each in inputs)
    batch = next((names.get(0) for names in masked if mask.axis in names.values()), None)
    # One row, as of a mask (1, 1, T, T), is that of every row of the batch.
    rows = value.dim() == 2 or (value.dim() > 2 and value.shape[0] != 1)  # noqa: PLR2004
    return (last,) if batch is None or batch == mask.axis or not rows else ((0, batch), last)


def find_inputs(spec: Spec, call: Call) -> tuple[Input, ...]:
    """Return the tensors of a call that have dims to pad."""
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
            found[name] = [*_declared(spec, name, argument, places)]
        elif name in spec.masks:
            mask = spec.masks[name]
            in_order = (each for known in spec.dims for each in found.get(known, ()))
            axes = mask_axes(in_order, mask, argument)
            found[name] = [Input.of(start, name, argument, axes, mask.fill)]
    return tuple(each for tensors in found.values() for each in tensors)


def _declared(
    spec: Spec, name: str, argument: Any, places: Mapping[KeyPath, int]
) -> Iterator[Input]:
    """Yield the tensors of an argument that ``dims`` names; ``places`` are its leaves."""
    mask = spec.masks.get(name)
    label = f"argument {name[1:]}" if name.startswith("*") else name
    for path, named in spec.dims[name].items():
        value = part_of(argument, path, label, "bucketed") if path else argument
        if value is None:
            continue
        where = keystr(label, path, argument) if path else label
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"bucketed: {where} is of type {type(value).__name__}, expected a tensor, as "
                "dims says"
            )
        fill = declared_at(spec.fill[name], path) if name in spec.fill else None
        if fill is None and mask is not None:
            fill = mask.fill
        yield Input.of(places[path], where, value, axes_in(value, named, where, "bucketed"), fill)


def _sizes_of(spec: Spec, names: Sequence[str], inputs: Iterable[Input]) -> dict[str, int]:
    """Return how long each axis is."""
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
    return {axis: sizes[axis] for axis in spec.ladders}


def _bucket_for(spec: Spec, axis: str, size: int, inputs: Iterable[Input]) -> int:
    ladder = spec.ladders[axis]
    if ladder is None:
        return 1 << max(size - 1, 0).bit_length()
    if size > ladder.sizes[-1]:
        label = next(e.label for e in inputs if any(axis == name for _, name in e.axes))
        raise ValueError(
            f"bucketed: axis {axis!r} is {size} in {label}, but the largest bucket is "
            f"{ladder.sizes[-1]}: add a larger one to buckets, or leave buckets out"
        )
    return ladder.sizes[bisect_left(ladder.sizes, size)]


# ---- the shape of a call ----


class Specialization(NamedTuple):
    """What a compiled graph is specialised on besides the sizes that are padded."""

    global_state: tuple[Any, ...]
    """Grad mode, inference mode, autocast, a transform of torch.func, ``training`` of modules."""
    structure: tuple[TreeDef, ...]
    unpadded: tuple[tuple[str, Any], ...]  # label and key of the leaves that have no dim to pad

    @property
    def transformed(self) -> bool:
        """Whether a transform of ``torch.func`` runs the call, which nothing compiles."""
        return bool(self.global_state[3])


@dataclass(frozen=True)
class Shape:
    """Which bucket a call is in, and what else a graph or a proof depends on."""

    inputs: tuple[Input, ...]
    real: tuple[int, ...]
    """The size of each axis."""
    bucket: tuple[int, ...]
    """The size to which each is padded."""
    side: Side
    specialization: Specialization
    sizes: AxisSizes = field(compare=False)
    buckets: AxisSizes = field(compare=False)
    """The same two, by the names of the axes."""
    padded: tuple[tuple[str, tuple[int, ...]], ...] = field(compare=False)
    """The label of each input, and its shape in the bucket."""
    pads: Mapping[int, Callable[..., torch.Tensor]] = field(compare=False)
    """What pads an input, by the index of its leaf; empty if the call fits its bucket."""

    @classmethod
    def of(
        cls,
        inputs: Sequence[Input],
        sizes: AxisSizes,
        buckets: AxisSizes,
        side: Side,
        specialization: Specialization,
    ) -> Self:
        """Work out what is padded."""
        pads = ((each.index, each.pad(buckets, side)) for each in inputs)
        return cls(
            inputs=tuple(inputs),
            real=tuple(sizes.values()),
            bucket=tuple(buckets.values()),
            side=side,
            specialization=specialization,
            sizes=sizes,
            buckets=buckets,
            padded=tuple((each.label, each.padded(buckets)) for each in inputs),
            pads={index: pad for index, pad in pads if pad is not None},
        )

    def kind(self) -> Any:
        """Return what a proof is of: the bucket, and what leads the function another way.

        With labels a model computes a loss, so which inputs there are counts as well.
        """
        # What shows in unsigned numbers may not in others.
        kinds = [
            (each.label, each.dtype, each.requires_grad, _zero_one_more(each.shape, each.axes))
            for each in self.inputs
        ]
        state, structure, unpadded = self.specialization
        switches = [(label, _switch(key)) for label, key in unpadded]
        return self.bucket, state, structure, *switches, *kinds

    def share(self) -> tuple[float, ...]:
        """Return how much padding there is for what is real, by axis."""
        sizes = zip(self.bucket, self.real, strict=True)
        return tuple((bucket - size) / max(size, 1) for bucket, size in sizes)

    def resized(self, leaves: Mapping[int, torch.Tensor], sizes: AxisSizes, side: Side) -> Self:
        """Return it for shorter inputs, by index, in the same bucket."""
        inputs = [replace(each, shape=tuple(leaves[each.index].shape)) for each in self.inputs]
        return self.of(inputs, sizes, self.buckets, side, self.specialization)

    def __str__(self) -> str:
        """Return the sizes of a call: ``t: 37 -> 64 in ids``."""
        shown = []
        for axis, size in self.sizes.items():
            label = next((e.label for e in self.inputs for _, name in e.axes if name == axis), "")
            shown.append(f"{axis}: {size} -> {self.buckets[axis]} in {label}")
        return ", ".join(shown)


def shape_of(spec: Spec, call: Call, global_state: tuple[Any, ...]) -> Shape:
    """Look at a call: its tensors that have dims to pad, the size of each axis, and its bucket."""
    inputs = find_inputs(spec, call)
    sizes = _sizes_of(spec, call.signature.names, inputs)
    buckets = {axis: _bucket_for(spec, axis, size, inputs) for axis, size in sizes.items()}
    padded = {each.index for each in inputs}
    unpadded = tuple(
        (label, leaf_key(leaf))
        for index, (label, leaf) in enumerate(zip(call.labels(), call.leaves, strict=True))
        if index not in padded
    )
    specialization = Specialization(global_state, call.signature.treedefs, unpadded)
    return Shape.of(inputs, sizes, buckets, spec.side, specialization)


def padded(
    pads: Mapping[int, Callable[..., torch.Tensor]],
    leaves: list[Any],
    fills: Mapping[int, Any] | None = None,
) -> list[Any]:
    """Return leaves at the sizes of their buckets; ``fills`` replaces what is declared."""
    if not pads:
        return leaves
    leaves = list(leaves)
    for index, pad in pads.items():
        leaf = leaves[index]
        leaves[index] = pad(leaf, fills[index]) if fills and index in fills else pad(leaf)
    return leaves


def region_of(leaf: torch.Tensor, pad: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return where an input is real, at its padded size."""
    return pad(torch.ones_like(leaf.detach(), dtype=torch.bool), False)


def _zero_one_more(shape: Sequence[int], axes: Axes = ()) -> tuple[int, ...]:
    """Return for each size without a name whether it is 0, 1 or more, as torch specialises them.

    https://docs.pytorch.org/docs/main/compile/dynamic_shapes_zero_one_specialization.html
    """
    named = {dim for dim, _ in axes}
    return tuple(-1 if dim in named else min(size, 2) for dim, size in enumerate(shape))


def _switch(key: Any) -> Any:
    """Return what of an argument may lead the function another way: no size, but 0 and 1."""
    if isinstance(key, TensorKey):
        return TensorKey, key.dtype, key.requires_grad, _zero_one_more(key.shape)
    # A weight of 0 or 1 hides a term, and a threshold of another sign is another one.
    if isinstance(key, float) and key != 1.0:
        return float, math.copysign(1, key), math.isfinite(key)
    return type(key), key
