"""How long the real part of each output is.

The function runs once more on tensors without data whose sizes are symbols. What comes out
says how sizes of outputs depend on sizes of inputs: L, L - 1, 2 L, (L - 1) // 2. Nothing is
ever read off a size that happens to equal a bucket.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from torchguard.bucketed.trees import Path, flattened, is_leaf, parts, spelled
from torchguard.internals import SymbolicSizes
from torchguard.padding import Side

__all__ = ["Formula", "Leaf", "Program", "as_declared", "as_measured", "as_reasoned", "leaves_of"]

Sizes: TypeAlias = dict[str, int]
"""Size by axis."""


class Leaf(NamedTuple):
    """A part of an output that is no container."""

    path: Path
    value: Any


class Program(NamedTuple):
    """What to do to an output."""

    cuts: tuple[tuple[Path, tuple[tuple[int, int, int], ...]], ...]
    """For each tensor to cut: (dim, start, length) of its real part."""
    numbers: tuple[tuple[Path, int], ...]
    """Integers that say how long something is."""


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
    cuts = []
    for path, value in leaves:
        spec = _spec_at(outputs, path) if isinstance(value, torch.Tensor) else None
        if spec is None:
            continue
        where = spelled("output", path, whole)
        cut = []
        for dim, size in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
            if size is None:
                continue
            if type(dim) is not int or not -value.dim() <= dim < value.dim():
                raise ValueError(
                    f"bucketed: outputs names dimension {dim!r} of {where}, which has shape "
                    f"{tuple(value.shape)}"
                )
            padded, length = (_evaluated(size, given, where) for given in (buckets, sizes))
            if value.shape[dim] != padded:
                raise ValueError(
                    f"bucketed: outputs says that dimension {dim} of {where} is {padded} for "
                    f"{_spelled_sizes(buckets)}, but it is {value.shape[dim]}"
                )
            if not 0 <= length <= padded:
                raise ValueError(
                    f"bucketed: outputs gives {length} for dimension {dim} of {where} at "
                    f"{_spelled_sizes(sizes)}, expected 0 to {padded}"
                )
            if length != padded:
                cut.append(_cut(dim % value.dim(), length, padded, side))
        if cut:
            cuts.append((path, tuple(cut)))
    return Program(tuple(cuts), ())


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
        f"function of them, such as lambda {next(iter(sizes))}: {next(iter(sizes))} // 2"
    )


def _spelled_sizes(sizes: Sizes) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
