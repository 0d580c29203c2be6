"""What to do with a call: its inputs, how each is padded, which variant runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from torchguard.bucketing.decorator.circumstances import Circumstances
from torchguard.bucketing.decorator.compile import Variant
from torchguard.bucketing.decorator.output_shapes import Program, Sizes
from torchguard.bucketing.decorator.padders import Padder, padder
from torchguard.bucketing.decorator.trees import Path, parts
from torchguard.bucketing.padding import Fill, Side

__all__ = ["BucketCount", "Input", "Place", "Plan", "told"]

Place: TypeAlias = "int | str"
"""Of an argument in a call: its position or its name."""


@dataclass
class BucketCount:
    """What went through one combination of buckets."""

    calls: int = 0
    real: int = 0
    padded: int = 0


@dataclass(frozen=True)
class Input:
    """A tensor of a call that has a dim to pad."""

    place: Place
    path: Path
    label: str
    shape: tuple[int, ...]
    axes: tuple[tuple[int, str], ...]
    fill: Fill
    declared: bool
    """Whether the fill means something, because somebody has chosen it."""
    device: torch.device

    def path_in(self, before: int) -> Path:
        """Return where it is in (args, kwargs), with so many arguments before the caller's."""
        if isinstance(self.place, int):
            return (0, self.place + before, *self.path)
        return (1, self.place, *self.path)

    def of(self, args: Any, kwargs: Any) -> torch.Tensor:
        """Return the tensor itself out of a call."""
        value: Any = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        for key in self.path:
            value = dict(parts(value) or ())[key]
        return value  # type: ignore[no-any-return]

    def padded(self, buckets: Sizes) -> tuple[int, ...]:
        """Return its shape after padding."""
        named = dict(self.axes)
        return tuple(
            buckets[named[dim]] if dim in named else size for dim, size in enumerate(self.shape)
        )

    def symbolic(self, names: set[str]) -> tuple[int | str, ...]:
        """Return its shape with names in place of these axes' sizes."""
        named = dict(self.axes)
        return tuple(
            named[dim] if named.get(dim) in names else size for dim, size in enumerate(self.shape)
        )


@dataclass
class Plan:
    """What to do with a call whose inputs have certain shapes."""

    inputs: tuple[Input, ...]
    sizes: Sizes
    buckets: Sizes
    """Empty for a size above the largest bucket that runs without padding."""
    variant: Variant
    count: BucketCount
    extras: dict[str, torch.Tensor]
    """Masks and lengths by argument."""
    extra_places: dict[str, Place]
    circumstances: Circumstances
    """What else the graph and its outputs hang on."""
    seen: list[int]
    """How many calls had these sizes, in a list that plans for the same sizes share."""
    side: Side
    pads: tuple[tuple[Place, Path, Padder], ...] = ()
    flat: bool = False
    """Whether all pads are of arguments themselves, not of something inside."""
    programs: dict[Any, Program] = field(default_factory=dict)
    ready: bool = False
    owned: int = 0
    """How many arguments come before those of the caller: ``self``."""
    shortest: Sizes = field(default_factory=dict)
    """The smallest sizes that any rank of a group has."""
    real: int = 1
    padded: int = 1

    def __post_init__(self) -> None:
        pads = []
        for each in self.inputs if self.buckets else ():
            dims = tuple(
                (dim, self.buckets[axis])
                for dim, axis in each.axes
                if each.shape[dim] != self.buckets[axis]
            )
            if dims:
                pads.append((each.place, each.path, padder(each.shape, dims, each.fill, self.side)))
        self.pads = tuple(pads)
        self.flat = not any(path for _, path, _ in pads)
        for axis, size in self.sizes.items():
            self.real *= size
            self.padded *= self.buckets.get(axis, size)


def told(plan: Plan) -> str:
    """Say which sizes a call has: ``t: 37 -> 64 (ids)``."""
    said = []
    for axis, size in plan.sizes.items():
        label = next((e.label for e in plan.inputs for _, name in e.axes if name == axis), "")
        target = f" -> {plan.buckets[axis]}" if axis in plan.buckets else ""
        said.append(f"{axis}: {size}{target} in {label}")
    return ", ".join(said)
