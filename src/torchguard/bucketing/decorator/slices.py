"""How to slice an output, and what ``outputs=`` says of that.

Shapes: B batch, T the size of an axis.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from torchguard._pytree import KeyPath
from torchguard.bucketing.decorator.options import AxisSizes
from torchguard.bucketing.padding import Side

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.output_shapes import FlatOutput


class Narrow(NamedTuple):
    """The arguments of ``tensor.narrow``: the real part of one dim."""

    dim: int
    start: int
    length: int

    @classmethod
    def of(cls, dim: int, length: int, padded: int, side: Side) -> Narrow:
        """Return where ``length`` is real of a dim that is ``padded`` long."""
        return cls(dim, 0 if side == "right" else padded - length, length)


class Fold(NamedTuple):
    """A dim that is several flattened into one, (B, T) as B * T, and what of them is real."""

    dim: int
    sizes: tuple[int, ...]
    """The sizes of those dims after padding."""
    narrows: tuple[Narrow, ...]
    """What is real; dims are counted from the first of those flattened."""

    def slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the real part; a copy, where it is not one piece of memory."""
        tensor = tensor.unflatten(self.dim, self.sizes)
        for index, start, length in self.narrows:
            tensor = tensor.narrow(self.dim + index, start, length)
        # The dims have to be one again: the function returned one.
        return tensor.flatten(self.dim, self.dim + len(self.sizes) - 1)


Steps: TypeAlias = "tuple[Narrow | Fold, ...]"
"""How to slice a tensor, in order."""


# ---- what outputs= says ----


def declared_steps(
    declared: Any, output: FlatOutput, sizes: AxisSizes, buckets: AxisSizes, side: Side
) -> tuple[tuple[int, Steps], ...]:
    """Return how ``outputs=`` says to slice each leaf, by its index."""
    found: list[tuple[int, Steps]] = []
    for index, (leaf, path) in enumerate(zip(output.leaves, output.paths, strict=True)):
        spec = _declared_at(declared, path) if isinstance(leaf, torch.Tensor) else None
        if spec is None:
            continue
        label = output.label(index)
        steps: list[Narrow | Fold] = []
        # A dict may name few dims of many, a tuple names each in its place.
        for dim, size in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
            if size is None:
                continue
            if type(dim) is not int or not -leaf.dim() <= dim < leaf.dim():
                raise ValueError(
                    f"bucketed: outputs names dimension {dim!r} of {label}, which has shape "
                    f"{tuple(leaf.shape)}"
                )
            what = f"dimension {dim} of {label}"
            place, length = dim % leaf.dim(), leaf.shape[dim]
            step = _declared_step(size, place, length, what, sizes, buckets, side)
            if step is not None:
                steps.append(step)
        if steps:
            # A fold may copy, so it comes last: of less.
            found.append((index, tuple(sorted(steps, key=lambda step: isinstance(step, Fold)))))
    return tuple(found)


def _declared_step(  # noqa: PLR0917
    declared: Any, dim: int, size: int, what: str, sizes: AxisSizes, buckets: AxisSizes, side: Side
) -> Narrow | Fold | None:
    """Return what of a dim is real: of ``"t"``, of a function, or of ``(None, "t")``, a fold."""
    folds = isinstance(declared, tuple)
    parts = declared if folds else (declared,)
    if parts.count(None) > 1:
        raise ValueError(
            f"bucketed: outputs has {parts!r} for {what}, expected None for one part only"
        )
    fixed = (int, type(None)) if folds else ()
    padded, real = (
        [part if type(part) in fixed else _evaluated(part, each, what) for part in parts]
        for each in (buckets, sizes)
    )
    known = math.prod(each for each in padded if each is not None)
    if None in padded:  # of any size
        padded[parts.index(None)] = real[parts.index(None)] = size // known if known else 0
    if math.prod(padded) != size:
        shown = f"{parts!r} flattened," if folds else known
        multiple = f", which is no multiple of {known}" if folds else ""
        raise ValueError(
            f"bucketed: outputs says that {what} is {shown} for {_listed(buckets)}, but it is "
            f"{size}{multiple}"
        )
    narrows = []
    for index, (length, most) in enumerate(zip(real, padded, strict=True)):
        if not 0 <= length <= most:
            raise ValueError(
                f"bucketed: outputs gives {length} for {what} at {_listed(sizes)}, expected 0 to "
                f"{most}"
            )
        if length != most:
            narrows.append(Narrow.of(index, length, most, side))
    if folds and narrows:
        return Fold(dim, tuple(padded), tuple(narrows))
    return narrows[0]._replace(dim=dim) if narrows else None


def _declared_at(declared: Any, path: KeyPath) -> Any:
    """Return what is declared for one leaf of an output, None if nothing is."""
    for key in path:
        if isinstance(declared, Mapping):
            declared = declared.get(key)
        elif isinstance(declared, (tuple, list)) and isinstance(key, int) and key < len(declared):
            declared = declared[key]
        else:
            return None
    return declared


def _evaluated(size: Any, sizes: AxisSizes, what: str) -> int:
    if isinstance(size, str) and size in sizes:
        return sizes[size]
    if callable(size):
        wanted = inspect.signature(size).parameters
        if all(name in sizes for name in wanted):
            return int(size(**{name: sizes[name] for name in wanted}))
    raise TypeError(
        f"bucketed: outputs has {size!r} for {what}, expected one of {', '.join(sizes)}, or a "
        f"function of them, such as lambda {next(iter(sizes))}: {next(iter(sizes))} // 2, or "
        f"(None, {next(iter(sizes))!r}) for a batch and its rows flattened into one dim"
    )


def _listed(sizes: AxisSizes) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
