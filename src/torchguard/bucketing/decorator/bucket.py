"""A bucket, and the plan of a call: how to pad it to its bucket, worked out once per shape.

Arguments, masks and paddings are addressed by the index of a leaf: the arguments given by
position come first, then those given by name, each flattened.
"""

from __future__ import annotations

import enum
import functools
import math
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from typing_extensions import Self

from torchguard._pytree import (
    TreeDef,
    all_reachable_modules,
    flatten,
    key_paths,
    keystr,
    unflatten,
)
from torchguard._torch import ShapeFormula, members_of
from torchguard.bucketing.dims import Axes
from torchguard.bucketing.padding import Fill, Side, check_number, pad_to_bucket
from torchguard.equivalence.outcome import Given

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.options import AxisSizes, Spec

COMPILE_LOCK = threading.RLock()
"""Held while a graph is compiled for the first time, and during a check: both change settings of
the whole process for a moment."""

PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
"""Types whose values ``torch.compile`` compiles in: each value is a graph of its own."""

_LIKE_PLAIN: Any = (
    (np.bool_, bool),
    ((int, np.integer), int),
    (str, str.__str__),
    (complex, lambda each: (number_key(each.real), number_key(each.imag))),
    ((bytes, torch.Size, range), lambda each: each),
    ((set, frozenset), lambda each: frozenset(map(leaf_key, each))),
    (np.ndarray, lambda each: (each.dtype.str, each.shape)),
    (slice, lambda each: (*map(leaf_key, (each.start, each.stop, each.step)),)),
    (functools.partial, lambda f: _keys_in((f.func, f.args, f.keywords))),
    # A method may be one of a partial, which has neither.
    ((FunctionType, MethodType), lambda f: (getattr(f, "__name__", 0), getattr(f, "__code__", 0))),
    ((BuiltinFunctionType, type), lambda f: f.__qualname__),
)
"""Types whose values count, besides the plain ones and floats, and what tells them apart."""


class TensorKey(NamedTuple):
    """What a graph depends on of a tensor whose dims are not named."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def number_key(number: float) -> Any:
    """Return a float, or its bits: a NaN is not equal to itself, and 0.0 is equal to -0.0."""
    return number if number and number == number else (number.hex(),)  # noqa: PLR0124


def leaf_key(leaf: Any) -> Any:
    """Return what a graph depends on of a leaf: something to hash and compare."""
    if isinstance(leaf, torch.Tensor):
        return TensorKey(leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
    if isinstance(leaf, torch.nn.Module):
        return _module_key(leaf)
    if isinstance(leaf, (float, np.floating)) and not isinstance(leaf, enum.Enum):
        return number_key(float(leaf))
    # By type, not isinstance(): a subclass of int may compare as it likes.
    if type(leaf) in PLAIN or isinstance(leaf, enum.Enum):
        return type(leaf), leaf
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


def _keys_in(values: Any) -> tuple[Any, ...]:
    leaves, treedef = flatten(values)
    return treedef, *map(leaf_key, leaves)


class Signature(NamedTuple):
    """How a call gives its arguments: equal for calls that share a plan."""

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
        return all_reachable_modules(function, (*self.owner, *self.arguments))

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

    def padded(self, buckets: AxisSizes) -> tuple[int, ...]:
        """Return its shape after padding."""
        named = dict(self.axes)
        return tuple(
            buckets[named[dim]] if dim in named else size for dim, size in enumerate(self.shape)
        )


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


@dataclass
class Graph:
    """What runs a bucket's inputs of certain padded shapes, in one global state."""

    run: Callable[..., Any]
    code: CodeType | None = None  # of its own, where it is compiled for static sizes
    compiles: bool = False
    cuda_graphs: bool = False
    compiled_for: set[Specialization] = field(default_factory=set)
    """What it has run for: for anything else it is compiled anew."""
    warmed_for: set[Specialization] = field(default_factory=set)
    """What its backward has run for too."""
    seconds: float = 0.0  # what the first call in each took, and warming up
    first_graphs: int = 0
    first_entries: int = 0


_GROWS = 2.0
"""A bucket is checked again if it gets more than so many times the padding it had then: in
bfloat16 one padded position of 256 may be rounding."""


@dataclass
class Bucket:
    """One size, or one for each axis, and what the first call or ``warmup()`` has made of it."""

    calls: int = 0
    real: float = 0.0
    padded: int = 0
    on_device: torch.Tensor | None = None
    """What else is real by masks on an accelerator: read by ``stats()`` only, which waits."""
    graphs: dict[Any, Graph] = field(default_factory=dict)
    """Graphs by padded shapes and global state. Dynamo compiles anew for each anyway, and it moves
    the entry it uses to the front of its list: another thread may miss its own."""
    proven: dict[Any, list[tuple[float, ...]]] = field(default_factory=dict)
    """How much padding was checked here for what was real: by kind of call, then by axis."""
    formulas: dict[Any, ShapeFormula | None] = field(default_factory=dict)
    """How the sizes of outputs depend on those of a call; None if torch can't tell."""

    def covers(self, plan: Plan) -> bool:
        """Whether it is proven for a call: with at least half the padding that the call has."""
        now = _share_of_padding(plan)
        # By one proof: two axes that were padded each on its own were not padded together.
        return any(
            all(n <= _GROWS * s for n, s in zip(now, shares, strict=True))
            for shares in self.proven.get(plan.kind, ())
        )

    def add_proof(self, plan: Plan) -> None:
        """Note that it is proven with the padding of a call."""
        self.proven.setdefault(plan.kind, []).append(_share_of_padding(plan))


def _share_of_padding(plan: Plan) -> tuple[float, ...]:
    """Return how much padding there is for what is real, by axis."""
    return tuple(
        (bucket - plan.sizes[axis]) / max(plan.sizes[axis], 1)
        for axis, bucket in plan.buckets.items()
    )


def _pad(each: Input, dims: Sequence[tuple[int, int]], side: Side) -> Callable[..., torch.Tensor]:
    """Return what pads these dims, (dim, size) each, of an input; it takes another fill too."""
    shape, fill = each.shape, 0 if each.fill is None else each.fill
    if fill == "repeat-last" and 0 in shape:
        fill = 0  # nothing is there to repeat, and nothing of it will be seen
    if isinstance(fill, (bool, int, float, complex)):
        if fill:  # each dtype has a 0
            check_number(fill, each.dtype)
        pads = [0] * (2 * len(shape))
        for dim, size in dims:
            # constant_pad_nd counts from the last dim, left before right.
            pads[2 * (len(shape) - 1 - dim) + (side == "right")] = size - shape[dim]
        constant_pad_nd = torch.constant_pad_nd

        def pad_with_number(x: torch.Tensor, value: Any = fill) -> torch.Tensor:
            return constant_pad_nd(x, pads, value)

        return pad_with_number

    def pad(x: torch.Tensor, value: Fill = fill) -> torch.Tensor:
        for dim, size in dims:
            x = pad_to_bucket(x, dim, size, value=value, side=side).tensor
        return x

    return pad


@dataclass
class Plan:
    """What to do with a call whose inputs have certain shapes."""

    signature: Signature
    inputs: tuple[Input, ...]
    sizes: AxisSizes
    buckets: AxisSizes
    side: Side
    bucket: Bucket
    graph: Graph
    specialization: Specialization
    kind: Any
    """What a proof is of, besides the bucket: what leads the function another way."""
    seen: list[int]
    """How many calls had these sizes, in a list that plans for the same sizes share."""
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    """Masks and lengths that the caller does not give, by argument."""
    pads: tuple[tuple[int, Callable[..., torch.Tensor]], ...] = ()
    """The index of each leaf to pad, and what pads it."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Label and padded shape of each input."""
    slices: dict[Any, Any] = field(default_factory=dict)
    """What to take of an output, by its structure and shapes."""
    ready: bool = False
    told: bool = False
    """Whether the caller says how much is real, by a mask or by lengths."""
    rows: int = 1
    """How many rows of a batch are counted, if that is not an axis."""
    open: bool = False
    """Whether the next call may arrive with padding that is not proven yet."""
    real: int = 1
    padded: int = 1

    def __post_init__(self) -> None:
        pads, shapes = [], []
        for each in self.inputs:
            shape = each.padded(self.buckets)
            shapes.append((each.label, shape))
            dims = [(dim, shape[dim]) for dim, _ in each.axes if shape[dim] != each.shape[dim]]
            if dims:
                pads.append((each.index, _pad(each, dims, self.side)))
        self.pads, self.shapes = tuple(pads), tuple(shapes)
        # The product stands for the work of a call: with a batch and a length it counts tokens.
        self.real = self.rows * math.prod(self.sizes.values())
        self.padded = self.rows * math.prod(self.buckets.values())

    def pad(self, leaves: list[Any], fills: Mapping[int, Any] | None = None) -> list[Any]:
        """Return leaves at the sizes of their buckets; ``fills`` replaces what is declared."""
        if not self.pads:
            return leaves
        leaves = list(leaves)
        for index, pad in self.pads:
            leaf = leaves[index]
            leaves[index] = pad(leaf, fills[index]) if fills and index in fills else pad(leaf)
        return leaves


class Case(NamedTuple):
    """A call to compare with and without padding."""

    plan: Plan
    call: Call
    """At its real sizes: what it has arrived with beyond them is cut."""
    content: Mapping[int, torch.Tensor]
    """What the padding holds with which it has arrived, by index of the leaf, at full size."""

    def region(self, index: int) -> torch.Tensor:
        """Return where an input is real, at its padded size."""
        ones = torch.ones_like(self.call.leaves[index].detach(), dtype=torch.bool)
        region: torch.Tensor = dict(self.plan.pads)[index](ones, False)
        return region

    def given(self, extras: Mapping[str, Any], fills: Mapping[int, Any] | None) -> Given:
        """Return what a function is called with, padded unless ``fills`` is None.

        If a leaf requires a gradient, a new leaf of autograd's graph takes its place.
        """
        sources = {
            place: leaf.detach().requires_grad_()
            for place, leaf in enumerate(self.call.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled()
        }
        given = self.call.with_leaves(sources).leaves
        if fills is not None:
            padded = {index for index, _ in self.plan.pads}
            given = self.plan.pad(given, fills)
            for index, content in self.content.items():
                if index in padded and index not in fills:
                    given[index] = torch.where(self.region(index), given[index], content)
        args, kwargs = self.call.bind(extras, given)
        return Given(given, args, kwargs, sources)


def kind_of_call(specialization: Specialization, inputs: Iterable[Input]) -> Any:
    """Return what a proof is of, besides the bucket.

    With labels a model computes a loss, so which inputs there are counts as well.
    """
    switches = [(label, _switch(key)) for label, key in specialization.unpadded]
    # What shows in unsigned numbers may not in others.
    kinds = [
        (each.label, each.dtype, each.requires_grad, _zero_one_more(each.shape, dict(each.axes)))
        for each in inputs
    ]
    return specialization.global_state, specialization.structure, *switches, *kinds


def _zero_one_more(shape: Sequence[int], named: Collection[int] = ()) -> tuple[int, ...]:
    """Return for each size without a name whether it is 0, 1 or more, as torch specialises them.

    https://docs.pytorch.org/docs/main/compile/dynamic_shapes_zero_one_specialization.html
    """
    return tuple(-1 if dim in named else min(size, 2) for dim, size in enumerate(shape))


def _switch(key: Any) -> Any:
    """Return what of an argument may lead the function another way: no size, but 0 and 1."""
    if isinstance(key, TensorKey):
        return TensorKey, key.dtype, key.requires_grad, _zero_one_more(key.shape)
    # A weight of 0 or 1 hides a term, and a threshold of another sign is another one.
    if isinstance(key, float) and key not in {0.0, 1.0}:
        return float, math.copysign(1, key), math.isfinite(key)
    return type(key), key


def sizes_of(plan: Plan) -> str:
    """Return the sizes of a call: ``t: 37 -> 64 in ids``."""
    shown = []
    for axis, size in plan.sizes.items():
        label = next((e.label for e in plan.inputs for _, name in e.axes if name == axis), "")
        shown.append(f"{axis}: {size} -> {plan.buckets[axis]} in {label}")
    return ", ".join(shown)
