"""What the user declares: which dims of which arguments vary, and under which names.

``dims`` takes the form of ``dynamic_shapes`` of ``torch.export``:
https://pytorch.org/docs/stable/export.html#expressing-dynamism
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from torchguard.bucketing.decorator.trees import Path, parts, spelled
from torchguard.bucketing.decorator.warning import warn_user

__all__ = ["Declaration", "Dims", "Found", "axis_names"]

Dims: TypeAlias = Any
"""``{argument: {dim: name}}``, or a sequence in the order of the arguments; containers nest."""


_ALIKE = 0.8


class Found(NamedTuple):
    """A tensor of a call with dims that vary."""

    label: str
    path: Path
    tensor: torch.Tensor
    axes: tuple[tuple[int, str], ...]
    """(dim, name of its axis), dims counted from 0."""
    fill: Any
    """As declared; None where nothing is."""


def _is_dims(spec: Any) -> bool:
    return isinstance(spec, Mapping) and bool(spec) and all(type(key) is int for key in spec)


def _name(axis: Any, where: str) -> str | None:
    """Return the name of an axis: a string, or a ``torch.export.Dim``, which has one."""
    if axis is None or isinstance(axis, str):
        return axis
    name = getattr(axis, "__name__", None)
    if isinstance(name, str):
        return name
    raise TypeError(f"bucketed: {where} is {axis!r}, expected the name of an axis, such as 't'")


def axis_names(spec: Dims, where: str = "dims") -> Iterator[str]:
    """Yield every name in a declaration, in its order."""
    if spec is None:
        return
    if isinstance(spec, Mapping):
        for key, inner in spec.items():
            yield from axis_names(inner, f"{where}[{key!r}]")
    elif isinstance(spec, Sequence) and not isinstance(spec, str):
        for index, inner in enumerate(spec):
            yield from axis_names(inner, f"{where}[{index}]")
    else:
        name = _name(spec, where)
        if name is not None:
            yield name


@dataclass(frozen=True)
class Declaration:
    """The declared arguments of one function."""

    dims: Mapping[str, Dims]
    """By argument; those behind ``*args`` by position, ``"*2"``."""
    fill: Mapping[str, Any]
    parameters: tuple[str, ...]
    """Names of what can be given by position."""
    known: frozenset[str] | None
    """The names of all arguments, None where any name will do."""
    required: frozenset[str]
    """Those without a default."""
    explicit: frozenset[str] = frozenset()
    """The names in the signature."""
    others: str | None = None
    """The name of ``**kwargs``, if the function has it."""

    @classmethod
    def of(cls, function: Callable[..., Any], dims: Dims, fill: Any, *, bound: bool) -> Declaration:
        """Match ``dims`` and ``fill`` with the arguments of ``function``.

        Args:
            function: what is called.
            dims: as the user wrote them.
            fill: likewise.
            bound: leave out the first parameter, ``self``.

        Raises:
            TypeError: no declaration at all, or a name that the function does not have.
        """
        positional, keywords, variadic, others, required = _parameters(function)
        if bound and positional:
            positional = positional[1:]
        named = _by_name(dims, positional, variadic, _called(function))
        if variadic in named:
            for index, inner in enumerate(named.pop(variadic) or ()):
                named[f"*{len(positional) + index}"] = inner
        if others in named:
            named |= named.pop(others) or {}
        fills = dict(fill or {})
        known = None if others is not None else frozenset((*positional, *keywords))
        for name, what in (*((n, "dims") for n in named), *((n, "fill") for n in fills)):
            if known is not None and name not in known and not name.startswith("*"):
                raise TypeError(
                    f"bucketed: {what} names {name!r}, but {_called(function)} takes "
                    f"{', '.join(sorted(known)) or 'nothing'}"
                )
        for name in fills:
            if named.get(name) is None:
                raise TypeError(f"bucketed: fill names {name!r}, which dims does not pad")
        named = {name: spec for name, spec in named.items() if spec is not None}
        explicit = frozenset((*positional, *keywords))
        return cls(named, fills, tuple(positional), known, required, explicit, others)

    def check_arguments(self, masks: Sequence[str], lengths: Sequence[str]) -> None:
        """Raise unless the function takes all of these.

        A name that is much like one in the signature, but only ``**kwargs`` takes, warns:
        ``mask="mask"`` where the argument is called ``attention_mask`` would vanish.
        """
        given = {*masks, *lengths, *self.dims}
        for what, name in (*(("mask", n) for n in masks), *(("lengths", n) for n in lengths)):
            if self.known is not None and name not in self.known:
                raise TypeError(
                    f"bucketed: {what} names {name!r}, but the function takes "
                    f"{', '.join(sorted(self.known)) or 'nothing'}"
                )
            alike = [n for n in sorted(self.explicit - given) if _alike(n, name)]
            if name not in self.explicit and alike:
                warn_user(
                    f"bucketed: {what} names {name!r}, which only **{self.others} takes: is it "
                    f"{alike[0]!r}?"
                )

    def unknown(self, masks: Sequence[str]) -> str:
        """Say which masks nobody but ``**kwargs`` takes; empty where it is none."""
        found = [name for name in masks if name not in self.explicit]
        if not found or not self.explicit or self.others is None:
            return ""
        return (
            f". mask names {found[0]!r}, which the function takes as one of **{self.others} only: "
            f"if nothing reads it there, name one of {', '.join(sorted(self.explicit))}"
        )

    def locations(self, count: int, keywords: tuple[str, ...]) -> list[tuple[int | str, str]]:
        """Say where a call of this form has its declared arguments: (place, name)."""
        names = [self.parameters[i] if i < len(self.parameters) else f"*{i}" for i in range(count)]
        found: list[tuple[int | str, str]] = [
            (index, name) for index, name in enumerate(names) if name in self.dims
        ]
        found += [(name, name) for name in keywords if name in self.dims]
        return found

    def find(self, name: str, value: Any) -> Iterator[Found]:
        """Yield the tensors of one argument that have dims that vary.

        Raises:
            TypeError, IndexError, KeyError: the argument is not what was declared.
        """
        spec, fill = self.dims[name], self.fill.get(name)
        label = f"argument {name[1:]}" if name.startswith("*") else name
        yield from _find(label, value, spec, fill, path=(), whole=value)


def _alike(name: str, other: str) -> bool:
    """Whether one may be a misspelling of the other: ``mask`` of ``attention_mask``."""
    inside = f"_{other}_" in f"_{name}_"
    return inside or difflib.SequenceMatcher(None, name, other).ratio() > _ALIKE


def _by_name(
    dims: Dims, positional: Sequence[str], variadic: str | None, function: str
) -> dict[str, Dims]:
    """Return a declaration by name; those behind ``*args`` are called ``"*2"``."""
    if isinstance(dims, Mapping) and not _is_dims(dims):
        return dict(dims)
    if not isinstance(dims, Sequence) or isinstance(dims, str):
        raise TypeError(
            f"bucketed: dims is {dims!r}, expected {{argument: {{dim: name}}}}, such as "
            "{'ids': {1: 't'}}"
        )
    if len(dims) > len(positional) and variadic is None:
        raise TypeError(
            f"bucketed: dims has {len(dims)} entries, but {function} takes "
            f"{len(positional)} arguments"
        )
    names = [*positional, *(f"*{i}" for i in range(len(positional), len(dims)))]
    return dict(zip(names, dims, strict=False))


def _find(
    label: str, value: Any, spec: Dims, fill: Any, *, path: Path, whole: Any
) -> Iterator[Found]:
    if spec is None or value is None:
        return
    where = spelled(label, path, whole)
    if isinstance(value, torch.Tensor):
        axes = _axes_of(value, spec, where)
        if axes:
            yield Found(where, path, value, axes, fill)
        return
    inside = parts(value)
    if inside is None:
        raise TypeError(
            f"bucketed: {where} is a {type(value).__name__}, expected a tensor, as dims says"
        )
    children = dict(inside)
    for key, inner in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
        if inner is None:
            continue
        if key not in children:
            raise KeyError(f"bucketed: {where} has no part {key!r}, but dims names it")
        part = _part(fill, key)
        yield from _find(label, children[key], inner, part, path=(*path, key), whole=whole)


def _axes_of(tensor: torch.Tensor, spec: Dims, where: str) -> tuple[tuple[int, str], ...]:
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


def _part(fill: Any, key: Any) -> Any:
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
    variadic = next((p.name for p in listed if p.kind is p.VAR_POSITIONAL), None)
    others = next((p.name for p in listed if p.kind is p.VAR_KEYWORD), None)
    required = frozenset(p.name for p in listed if p.default is p.empty)
    return positional, keywords, variadic, others, required


def _called(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__) + "()"
