"""What the user declared, checked once: which dims of which arguments vary, and what pads them.

Nothing here knows a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, get_args

import torch
from typing_extensions import Required

from torchguard._pytree import KeyPath
from torchguard.bucketing.buckets import Buckets, buckets_by_axis
from torchguard.bucketing.dims import Axes, declared_dims
from torchguard.bucketing.padding import Side


class NamedDim(Protocol):
    """A ``torch.export.Dim``, which has a name."""

    __name__: str


DimsOfArgument: TypeAlias = (
    Mapping[int, str | NamedDim]
    | Mapping[str, "DimsOfArgument"]
    | Sequence["DimsOfArgument"]
    | None
)
Dims: TypeAlias = Mapping[str, DimsOfArgument] | Sequence[DimsOfArgument]
"""``{argument: {dim: name}}``, or a sequence in the order of the arguments; containers nest."""

CheckPadding: TypeAlias = Literal["first", "always", "never"]

MaskKind: TypeAlias = Literal["real", "padding"]
"""Whether a mask is True (or 1) where the data is real, or where it is padding."""


class BucketedOptions(TypedDict, total=False):
    """The options of :func:`bucketed`, which says what they mean."""

    dims: Required[Dims]
    buckets: Any
    fill: Mapping[str, Any] | None
    lengths: Any
    mask: Any
    outputs: Any
    side: Side
    check_padding: CheckPadding
    compile: bool | Mapping[str, Any] | None


@dataclass(frozen=True)
class Mask:
    """An argument that masks an axis."""

    argument: str
    axis: str
    kind: MaskKind

    @property
    def fill(self) -> float:
        """What to extend the caller's own mask with."""
        return float(self.kind == "padding")

    def real(self, given: torch.Tensor) -> torch.Tensor:
        """Return which positions of a mask that the caller gives are real."""
        return (given != 0) if self.kind == "real" else (given == 0)


@dataclass(frozen=True)
class Spec:
    """The options of one function."""

    name: str
    parameters: tuple[str, ...]
    """What can be given by position."""
    required: frozenset[str]
    dims: Mapping[str, Mapping[KeyPath, Axes]]
    """The named dims of each tensor in an argument; behind ``*args`` it is called ``*2``."""
    ladders: Mapping[str, Buckets | None]
    """By axis; None for powers of two as they are needed."""
    fill: Mapping[str, Any]
    masks: Mapping[str, Mask]
    lengths: Mapping[str, str]
    """The argument that takes the size of an axis, by axis."""
    outputs: Any
    side: Side
    check_padding: CheckPadding

    @classmethod
    def of(cls, function: Callable[..., Any], options: BucketedOptions, *, bound: bool) -> Spec:
        """Match options with the arguments of a function, ``bound`` to the first of them."""
        name = getattr(function, "__qualname__", type(function).__name__) + "()"
        parameters = _parameters(function)
        kinds = {each.kind for each in parameters}
        positional = [
            each.name
            for each in parameters
            if each.kind in {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}
        ][bound:]
        given: Any = options["dims"]
        if not isinstance(given, Mapping):
            if len(given) > len(positional) and Parameter.VAR_POSITIONAL not in kinds:
                raise TypeError(
                    f"bucketed: dims has {len(given)} entries, but {name} takes {len(positional)} "
                    "arguments"
                )
            behind = (f"*{i}" for i in range(len(positional), len(given)))
            given = dict(zip([*positional, *behind], given, strict=False))
        dims: dict[str, dict[KeyPath, Axes]] = {}
        for (argument, *path), named in declared_dims(given, "bucketed").items():
            dims.setdefault(argument, {})[tuple(path)] = named
        every = (named for inside in dims.values() for named in inside.values())
        axes = tuple(dict.fromkeys(axis for named in every for _, axis in named))
        if not axes:
            raise ValueError("bucketed: dims names no axis to pad")
        ladders: Mapping[str, Buckets | None] = dict.fromkeys(axes)
        if options["buckets"] is not None:
            ladders = buckets_by_axis(axes, options["buckets"], "bucketed")
        fill, lengths = options["fill"] or {}, _lengths_of(options["lengths"], axes)
        masks = {mask.argument: mask for mask in _masks_of(options["mask"], axes)}
        explicit = {*positional, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}
        if Parameter.VAR_KEYWORD not in kinds:
            # Dims of None too.
            names = {"dims": given, "fill": fill, "mask": masks, "lengths": lengths.values()}
            _check_names(names, explicit, name)
        for argument in fill:
            if argument not in dims:
                raise TypeError(f"bucketed: fill names {argument!r}, which dims does not pad")
        return cls(
            name=name,
            parameters=tuple(positional),
            required=frozenset(each.name for each in parameters if each.default is each.empty),
            dims=dims,
            ladders=ladders,
            fill=dict(fill),
            masks=masks,
            lengths=lengths,
            outputs=options["outputs"],
            side=options["side"],
            check_padding=options["check_padding"],
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for an option of another type, or a word that is not one of those it can be."""
    dims, fill = options["dims"], options["fill"]
    of_a_tensor = isinstance(dims, Mapping) and dims and all(type(key) is int for key in dims)
    if not isinstance(dims, (Mapping, Sequence)) or isinstance(dims, str) or of_a_tensor:
        raise TypeError(
            f"bucketed: dims is {dims!r}, expected {{argument: {{dim: name}}}}, such as "
            "{'x': {1: 't'}}"
        )
    for name, words in (("side", Side), ("check_padding", CheckPadding)):
        if options[name] not in get_args(words):
            listed = ", ".join(map(repr, get_args(words)))
            raise ValueError(f"bucketed: {name} is {options[name]!r}, expected one of {listed}")
    if fill is not None and not isinstance(fill, Mapping):
        raise TypeError(
            f"bucketed: fill is {fill!r}, expected {{argument: value}}, such as {{'labels': -100}}"
        )


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # a builtin without a signature: anything goes
        return [
            Parameter("args", Parameter.VAR_POSITIONAL),
            Parameter("kwargs", Parameter.VAR_KEYWORD),
        ]


def _check_names(named: Mapping[str, Any], explicit: set[str], function: str) -> None:
    """Raise unless the function takes all that was named."""
    taken = ", ".join(sorted(explicit)) or "nothing"
    for option, names in named.items():
        for name in names:
            if name not in explicit and not name.startswith("*"):
                raise TypeError(f"bucketed: {option} names {name!r}, but {function} takes {taken}")


def _masks_of(given: Any, axes: Sequence[str]) -> list[Mask]:
    """Read ``mask=``: an argument's name, or ``{argument: kind or (axis, kind)}``."""
    if given is None:
        return []
    if isinstance(given, str):
        given = {given: "real"}
    if not isinstance(given, Mapping):
        raise TypeError(f"bucketed: mask is {given!r}, expected the name of an argument")
    masks = []
    for argument, value in given.items():
        axis, kind = value if isinstance(value, tuple) else (None, value)
        if kind not in get_args(MaskKind):
            raise ValueError(
                f"bucketed: mask of {argument!r} is {value!r}, expected 'real' or "
                "'padding', or an axis and one of these"
            )
        masks.append(Mask(argument, _axis(axis, axes, "mask", argument), kind))
    return masks


def _lengths_of(given: Any, axes: Sequence[str]) -> dict[str, str]:
    """Read ``lengths=``: an argument's name, or ``{axis: argument}``; return the latter."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {_axis(None, axes, "lengths", given): given}
    if not isinstance(given, Mapping):
        raise TypeError(f"bucketed: lengths is {given!r}, expected the name of an argument")
    return {_axis(axis, axes, "lengths", name): name for axis, name in given.items()}


def _axis(axis: Any, axes: Sequence[str], what: str, argument: str) -> str:
    if axis is None and len(axes) == 1:
        return axes[0]
    if axis not in axes:
        raise ValueError(
            f"bucketed: {what} names {argument!r} for axis {axis!r}, expected one of "
            f"{', '.join(axes)}"
        )
    return str(axis)
