"""How a call gives its arguments, and what tells it from other calls of the same form."""

from __future__ import annotations

from typing import Any

import torch

from torchguard.bucketing.decorator.circumstances import PLAIN, Circumstances, told_apart
from torchguard.bucketing.decorator.planner import Planner
from torchguard.bucketing.decorator.plans import Input, Place, Plan
from torchguard.bucketing.decorator.trees import flattened, spelled

__all__ = ["Form"]


class Form:
    """How many arguments are given by place, and which by name.

    Args:
        planner: knows which of them have dims to pad.
        count: of those given by place.
        keywords: the names of the others.
    """

    def __init__(self, planner: Planner, count: int, keywords: tuple[str, ...]) -> None:
        self.entries = planner.entries(count, keywords)
        """Where arguments with dims to pad are: (place, name)."""
        declared = {place for place, _ in self.entries}
        self._others: list[Place] = [p for p in (*range(count), *keywords) if p not in declared]
        names = planner.declaration.parameters
        self._names = [names[i] if i < len(names) else f"argument {i}" for i in range(count)]
        # Masks and lengths live where the inputs do.
        self._with_devices = bool(planner.masks or planner.lengths)
        self.plans: dict[Any, Plan] = {}

    def key(
        self, around: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return what tells this call from others, which need another plan; on every call's way."""
        key: list[Any] = [around]
        for place in self._others:
            value = args[place] if type(place) is int else kwargs[place]  # type: ignore[index]
            key.append(value if type(value) in PLAIN else told_apart(value))
        for place, _ in self.entries:
            value = args[place] if type(place) is int else kwargs[place]  # type: ignore[index]
            if isinstance(value, torch.Tensor):
                key.append(value.shape)
                key.append(value.dtype)
                if self._with_devices:
                    key.append(value.device)
            else:
                key.append(told_apart(value))
        return tuple(key)

    def circumstances(
        self,
        key: tuple[Any, ...],
        inputs: tuple[Input, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Circumstances:
        """Return what a key says besides the sizes of the inputs."""
        padded = {(each.place, *each.path) for each in inputs}
        names = [self._names[p] if isinstance(p, int) else p for p in self._others]
        others = list(zip(names, key[1:], strict=False))
        for place, name in self.entries:
            value = args[place] if isinstance(place, int) else kwargs[place]
            others += [
                (spelled(name, path, value), told_apart(part))
                for path, part in flattened(value)
                if (place, *path) not in padded
            ]
        return Circumstances(key[0], tuple(others))
