"""What a graph and its outputs hang on besides the sizes that are padded.

Switches and other sizes among the arguments, and what is around the call: whether gradients are
on, whether modules train.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torchguard import _torch
from torchguard.bucketing.decorator.trees import parts

__all__ = ["PLAIN", "Circumstances", "Surroundings", "differing", "told_apart"]

PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
"""Types whose values ``torch.compile`` compiles in: each value is a graph of its own."""


class Circumstances(NamedTuple):
    """What a graph hangs on besides the sizes that are padded."""

    around: tuple[Any, ...]
    """As :meth:`Surroundings.now` says."""
    others: tuple[tuple[str, Any], ...]
    """Name and value of arguments, and of parts of them, that have no dim to pad."""

    @property
    def transformed(self) -> bool:
        """Whether a transform of ``torch.func`` runs the call, which nothing compiles."""
        return bool(self.around[3])

    @property
    def switches(self) -> tuple[Any, ...]:
        """What may lead the function another way: all but sizes and fractions."""
        return _switches(self.others)  # type: ignore[no-any-return]


def differing(circumstances: Iterable[Circumstances]) -> list[str]:
    """Return the names of the arguments that are not the same in all of these."""
    values: dict[str, set[Any]] = {}
    for each in circumstances:
        for name, value in each.others:
            values.setdefault(name, set()).add(value)
    return [name for name, found in values.items() if len(found) > 1]


class Surroundings:
    """What is around the calls of a function.

    Args:
        modules: those it can reach, which may train or not.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        # Weak: a function looks its globals up by name, so they may be gone before it is.
        self._modules = [weakref.ref(module) for module in modules]

    def now(self) -> tuple[Any, ...]:
        """Return whether gradients, inference mode, autocast, a transform and training are on."""
        settings = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _torch.autocast_is_on(),
            _torch.inside_transform(),
        )
        if not self._modules:
            return settings
        return (*settings, *[getattr(module(), "training", None) for module in self._modules])


class _Kind(NamedTuple):
    """Of a tensor whose dims nobody has named."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def told_apart(value: Any) -> Any:
    """Return something to compare arguments by, and to hash: all that a graph hangs on."""
    if isinstance(value, torch.Tensor):
        return _Kind(value.shape, value.dtype, value.device)
    if type(value) in PLAIN or isinstance(value, enum.Enum):
        return value
    if isinstance(value, torch.nn.Module):
        return value.training
    inside = parts(value)
    if inside is None:
        return type(value)
    return (type(value), *((key, told_apart(part)) for key, part in inside))


def _switches(value: Any) -> Any:
    if isinstance(value, (_Kind, float)):
        return None
    if isinstance(value, tuple):
        return tuple(_switches(part) for part in value)
    return value
