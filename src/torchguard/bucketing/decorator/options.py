"""The options of bucketed(), listed once."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, get_args

from typing_extensions import Required

from torchguard.bucketing.padding import Side

__all__ = [
    "Dims",
    "MaskingOptions",
    "Options",
    "checked_options",
    "signature_with_options",
]


class NamedDim(Protocol):
    """A ``torch.export.Dim``, which has a name."""

    __name__: str


AxisName: TypeAlias = str | NamedDim | None
DimsOfArgument: TypeAlias = (
    Mapping[int, AxisName]
    | Mapping[str, "DimsOfArgument"]
    | Sequence["DimsOfArgument | AxisName"]
    | None
)
Dims: TypeAlias = Mapping[str, DimsOfArgument] | Sequence[DimsOfArgument]
"""``{argument: {dim: name}}``, or a sequence in the order of the arguments; containers nest."""

Overflow: TypeAlias = Literal["error", "eager", "grow", "dynamic"]
CheckPadding: TypeAlias = Literal["first", "always", "never"]
EngineName: TypeAlias = Literal["static", "ranges", "auto"]


class Options(TypedDict, total=False):
    """The options of :func:`bucketed`, which says what they mean."""

    dims: Required[Dims]
    buckets: Any
    fill: Mapping[str, Any] | None
    outputs: Any
    side: Side
    overflow: Overflow
    check_padding: CheckPadding
    compile: bool | Mapping[str, Any] | None
    engine: EngineName
    plan: str | os.PathLike[str] | None
    group: Any


class MaskingOptions(Options, total=False):
    """Likewise, with the arguments that are made where the caller leaves them out."""

    lengths: Any
    mask: Any


_DEFAULTS: Any = {
    **dict.fromkeys(MaskingOptions.__annotations__),
    "side": "right",
    "overflow": "error",
    "check_padding": "first",
    "engine": "static",
}


def checked_options(options: Mapping[str, Any]) -> MaskingOptions:
    """Return the options with the defaults filled in.

    Raises:
        TypeError: one that there is not, or none for ``dims``.
        ValueError: a word that is not one of those it can be.
    """
    # Python's own words: the signature shows each option, though **options takes any.
    unknown = sorted(options.keys() - _DEFAULTS.keys())
    if unknown:
        near = difflib.get_close_matches(unknown[0], _DEFAULTS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"bucketed() got an unexpected keyword argument {unknown[0]!r}{hint}")
    if "dims" not in options:
        raise TypeError("bucketed() missing 1 required keyword-only argument: 'dims'")
    if not isinstance(options["dims"], (Mapping, Sequence)) or isinstance(options["dims"], str):
        raise TypeError(
            f"bucketed: dims is {options['dims']!r}, expected {{argument: {{dim: name}}}}, such as "
            "{'x': {1: 't'}}"
        )
    checked: Any = {**_DEFAULTS, **options}
    for name, allowed in (
        ("side", get_args(Side)),
        ("overflow", get_args(Overflow)),
        ("check_padding", get_args(CheckPadding)),
        ("engine", get_args(EngineName)),
    ):
        if checked[name] not in allowed:
            listed = ", ".join(map(repr, allowed))
            raise ValueError(f"bucketed: {name} is {checked[name]!r}, expected one of {listed}")
    if checked["engine"] != "static" and checked["group"] is not None:
        raise ValueError(
            f"bucketed: engine={checked['engine']!r} with group=: without padding ranks have other "
            "sizes, and each would decide for itself what to compile; use engine='static'"
        )
    if checked["fill"] is not None and not isinstance(checked["fill"], Mapping):
        raise TypeError(
            f"bucketed: fill is {checked['fill']!r}, expected {{argument: value}}, such as "
            "{'labels': -100}"
        )
    return checked  # type: ignore[no-any-return]


def signature_with_options(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function with each option in place of its ``**options``."""
    signature = inspect.signature(function)
    first = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if name == "dims" else _DEFAULTS[name],
            annotation=annotation,
        )
        for name, annotation in {
            **Options.__annotations__,
            **MaskingOptions.__annotations__,
        }.items()
    ]
    return signature.replace(parameters=[*first, *options])
