"""How long the real part of each output is.

The function runs once more on tensors without data whose sizes are symbols. What comes out
says how sizes of outputs depend on sizes of inputs: L, L - 1, 2 L, (L - 1) // 2. Nothing is
ever read off a size that happens to equal a bucket.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from torchguard._torch import SymbolicSizes
from torchguard.bucketing.decorator.trees import Path, flattened, is_leaf, parts, spelled
from torchguard.bucketing.padding import Side

__all__ = [
    "Fold",
    "Formula",
    "Leaf",
    "Program",
    "as_declared",
    "as_measured",
    "as_reasoned",
    "leaves_of",
]

Sizes: TypeAlias = dict[str, int]
"""Size by axis."""


class Leaf(NamedTuple):
    """A part of an output that is no container."""

    path: Path
    value: Any


class Fold(NamedTuple):
    """A dim that is several flattened into one, (B, T) as B * T, and what of them is real."""

    dim: int
    sizes: tuple[int, ...]
    """Of those dims, after padding."""
    cuts: tuple[tuple[int, int, int], ...]
    """(which of them, start, length)."""

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the real part; a copy, where it is not one piece of memory."""
        tensor = tensor.unflatten(self.dim, self.sizes)
        for index, start, length in self.cuts:
            tensor = tensor.narrow(self.dim + index, start, length)
        return tensor.flatten(self.dim, self.dim + len(self.sizes) - 1)


class Program(NamedTuple):
    """What to do to an output."""

    cuts: tuple[tuple[Path, tuple[tuple[int, int, int], ...]], ...]
    """For each tensor to cut: (dim, start, length) of its real part."""
    numbers: tuple[tuple[Path, int], ...]
    """Integers that say how long something is."""
    folds: tuple[tuple[Path, tuple[Fold, ...]], ...] = ()
    """Likewise, for dims that are several flattened into one."""


def leaves_of(output: Any) -> list[Leaf]:
    """Take an output apart.

    Raises:
        TypeError: it has something inside that may hold tensors, but can't be looked into.
    """
    leaves = [Leaf(path, value) for path, value in flattened(output)]
    for path, value in leaves:
        if isinstance(value, (Iterator, Awaitable)):
            where = spelled("output", path, output)
            raise TypeError(
                f"bucketed: {where} is a {type(value).__name__}: what comes out of it later can't "
                "be cut to size. Return tensors, tuples, lists, dicts or dataclasses"
            )
        if not is_leaf(value) and _holds_tensors(value):
            where = spelled("output", path, output)
            raise TypeError(
                f"bucketed: {where} is a {type(value).__name__}, which holds tensors that can't be "
                "cut to size: return tensors, tuples, lists, dicts or dataclasses (with Hugging "
                "Face models: use_cache=False)"
            )
    return leaves


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (type, torch.nn.Module)) or callable(value):
        return False
    inside = [part for _, part in parts(value) or ()]
    inside += getattr(value, "__dict__", {}).values()
    return any(_holds_tensors(part, depth - 1) for part in inside)


@dataclass(frozen=True)
class Formula:
    """How the sizes of every leaf of an output depend on the axes."""

    world: SymbolicSizes
    sizes: tuple[Any, ...]
    """For each leaf: expressions for its dims, or for an integer; None for anything else."""
    conditions: tuple[Any, ...]
    paths: tuple[Path, ...]

    @classmethod
    def of(cls, run: Callable[[SymbolicSizes], Any], hints: Sizes) -> Formula:
        """Run a function on symbols; whatever that raises is let through."""
        world = SymbolicSizes(hints)
        with world:
            leaves = leaves_of(run(world))
            sizes: list[Any] = []
            for _, value in leaves:
                if isinstance(value, torch.Tensor):
                    sizes.append(tuple(world.expression(size) for size in value.shape))
                elif isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
                    sizes.append(world.expression(value))
                else:
                    sizes.append(None)
            conditions = tuple(world.conditions())
        return cls(world, tuple(sizes), conditions, tuple(path for path, _ in leaves))

    def at(self, sizes: Sizes, *, anyhow: bool = False) -> list[Any] | None:
        """Put sizes in; None where the formula does not hold, unless it is to be used anyhow."""
        if not anyhow and any(
            self.world.value(each, sizes) is not True for each in self.conditions
        ):
            return None
        found: list[Any] = []
        for expressions in self.sizes:
            if isinstance(expressions, tuple):
                numbers = [self.world.value(each, sizes) for each in expressions]
                if None in numbers:
                    return None
                found.append(tuple(numbers))
            elif expressions is None:
                found.append(None)
            else:
                found.append(self.world.value(expressions, sizes))
        return found


def as_reasoned(
    formula: Formula,
    leaves: Sequence[Leaf],
    sizes: Sizes,
    buckets: Sizes,
    side: Side,
    *,
    anyhow: bool = False,
) -> Program | None:
    """Cut by formula; None where it does not hold or gives other sizes than the padded run."""
    if formula.paths != tuple(leaf.path for leaf in leaves):
        return None
    padded, real = formula.at(buckets, anyhow=anyhow), formula.at(sizes, anyhow=anyhow)
    if padded is None or real is None:
        return None
    for (_, value), expected in zip(leaves, padded, strict=True):
        if isinstance(value, torch.Tensor) and tuple(value.shape) != expected:
            return None
        if type(value) is int and value != expected:
            return None
    if any(isinstance(found, tuple) and min(found, default=0) < 0 for found in real):
        return None
    return _program(leaves, real, side)


def as_measured(formula: Formula, leaves: Sequence[Leaf], whole: Any, side: Side) -> Program:
    """Cut to the sizes of a run at the real sizes, without data.

    Raises:
        ValueError: that run has returned something else.
    """
    if formula.paths != tuple(leaf.path for leaf in leaves):
        raise ValueError(
            "bucketed: the function returns another structure for the real sizes than for the "
            "padded ones"
        )
    real = formula.at({})
    if real is None:
        raise ValueError("a size depends on the data")
    for leaf, sizes in zip(leaves, real, strict=True):
        if isinstance(leaf.value, torch.Tensor) and (
            not isinstance(sizes, tuple)
            or len(sizes) != leaf.value.dim()
            or any(a > b for a, b in zip(sizes, leaf.value.shape, strict=True))
        ):
            where = spelled("output", leaf.path, whole)
            raise ValueError(
                f"bucketed: {where} is {tuple(leaf.value.shape)} after padding, which has no part "
                f"of the shape {sizes} it would have without"
            )
    return _program(leaves, real, side)


def _program(leaves: Sequence[Leaf], real: Sequence[Any], side: Side) -> Program:
    cuts, numbers = [], []
    for (path, value), sizes in zip(leaves, real, strict=True):
        if isinstance(value, torch.Tensor):
            shape = value.shape
            changed = tuple(
                _cut(d, n, shape[d], side) for d, n in enumerate(sizes) if n != shape[d]
            )
            if changed:
                cuts.append((path, changed))
        elif type(value) is int and isinstance(sizes, int) and sizes != value:
            numbers.append((path, sizes))
    return Program(tuple(cuts), tuple(numbers))


def _cut(dim: int, length: int, padded: int, side: Side) -> tuple[int, int, int]:
    return dim, 0 if side == "right" else padded - length, length


def as_declared(
    outputs: Any, leaves: Sequence[Leaf], sizes: Sizes, buckets: Sizes, *, whole: Any, side: Side
) -> Program:
    """Cut as ``outputs=`` says.

    Raises:
        TypeError, ValueError: it does not fit what the function returned.
    """
    cuts, folds = [], []
    for path, value in leaves:
        spec = _spec_at(outputs, path) if isinstance(value, torch.Tensor) else None
        if spec is None:
            continue
        where = spelled("output", path, whole)
        cut, folded = [], []
        for dim, size in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
            if size is None:
                continue
            if type(dim) is not int or not -value.dim() <= dim < value.dim():
                raise ValueError(
                    f"bucketed: outputs names dimension {dim!r} of {where}, which has shape "
                    f"{tuple(value.shape)}"
                )
            what = _Declared(dim % value.dim(), value.shape[dim], dim, where, sizes, buckets)
            if isinstance(size, tuple):
                folded += what.fold(size, side)
            else:
                cut += what.cut(size, side)
        if cut:
            cuts.append((path, tuple(cut)))
        if folded:
            folds.append((path, tuple(folded)))
    return Program(tuple(cuts), (), tuple(folds))


class _Declared(NamedTuple):
    """A dim of an output that ``outputs=`` names."""

    dim: int
    size: int
    given: int
    """The dim as it was written."""
    where: str
    sizes: Sizes
    buckets: Sizes

    def cut(self, size: Any, side: Side) -> list[tuple[int, int, int]]:
        padded, length = self._sizes(size)
        if self.size != padded:
            raise ValueError(
                f"bucketed: outputs says that dimension {self.given} of {self.where} is {padded} "
                f"for {_spelled_sizes(self.buckets)}, but it is {self.size}"
            )
        return [] if length == padded else [_cut(self.dim, length, padded, side)]

    def fold(self, parts: tuple[Any, ...], side: Side) -> list[Fold]:
        """Read ``(None, "t")``: what was flattened into the dim, None for one of any size."""
        what = f"dimension {self.given} of {self.where}"
        if parts.count(None) > 1:
            raise ValueError(
                f"bucketed: outputs has {parts!r} for {what}, expected None for one part only"
            )
        pairs = [
            (part, part) if part is None or type(part) is int else self._sizes(part)
            for part in parts
        ]
        known = math.prod(padded for padded, _ in pairs if padded is not None)
        other = self.size // known if known else 0
        sizes = tuple(other if padded is None else padded for padded, _ in pairs)
        if math.prod(sizes) != self.size:
            raise ValueError(
                f"bucketed: outputs says that {what} is {parts!r} flattened, for "
                f"{_spelled_sizes(self.buckets)}, but it is {self.size}, which is no multiple of "
                f"{known}"
            )
        cuts = tuple(
            _cut(index, length, padded, side)
            for index, (padded, length) in enumerate(pairs)
            if padded is not None and length is not None and length != padded
        )
        return [Fold(self.dim, sizes, cuts)] if cuts else []

    def _sizes(self, size: Any) -> tuple[int, int]:
        """Return a declared size after padding, and how much of it is real."""
        padded, length = (_evaluated(size, each, self.where) for each in (self.buckets, self.sizes))
        if not 0 <= length <= padded:
            raise ValueError(
                f"bucketed: outputs gives {length} for dimension {self.given} of {self.where} at "
                f"{_spelled_sizes(self.sizes)}, expected 0 to {padded}"
            )
        return padded, length


def _spec_at(outputs: Any, path: Path) -> Any:
    """Return what is declared for one part of an output, None if nothing is."""
    for key in path:
        if isinstance(outputs, Mapping):
            outputs = outputs.get(key)
        elif isinstance(outputs, (tuple, list)) and isinstance(key, int) and key < len(outputs):
            outputs = outputs[key]
        else:
            return None
    return outputs


def _evaluated(size: Any, sizes: Sizes, where: str) -> int:
    if isinstance(size, str) and size in sizes:
        return sizes[size]
    if callable(size):
        wanted = inspect.signature(size).parameters
        if all(name in sizes for name in wanted):
            return int(size(**{name: sizes[name] for name in wanted}))
    raise TypeError(
        f"bucketed: outputs has {size!r} for {where}, expected one of {', '.join(sizes)}, or a "
        f"function of them, such as lambda {next(iter(sizes))}: {next(iter(sizes))} // 2, or "
        f"(None, {next(iter(sizes))!r}) for a batch and its rows flattened into one dim"
    )


def _spelled_sizes(sizes: Sizes) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
