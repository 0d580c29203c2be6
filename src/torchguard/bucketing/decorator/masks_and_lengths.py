"""What a padded call is told about its padding: a mask, the true sizes.

Shapes: B batch, S the padded size of the axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from torchguard.bucketing.padding import Side

__all__ = ["Kind", "Mask", "lengths_of", "masks_of"]

Kind = Literal["real", "padding", "additive"]
"""A mask is True (or 1) where the data is real, True where it is padding, or holds 0 and -inf
to add to scores."""

_MASKED_BELOW = -1000.0
"""What is added to scores that are not to count is below this."""


@dataclass(frozen=True)
class Mask:
    """An argument that masks an axis."""

    argument: str
    axis: str
    kind: Kind

    @property
    def fill(self) -> float:
        """What to extend the caller's own mask with."""
        return {"real": 0, "padding": 1, "additive": float("-inf")}[self.kind]

    def real(self, given: torch.Tensor) -> torch.Tensor:
        """Say which positions of a mask that the caller gives are real."""
        if self.kind == "additive":
            return given > _MASKED_BELOW  # 0, a bias, or -inf, the smallest number, -10,000
        return (given != 0) if self.kind == "real" else (given == 0)

    def make(
        self, shape: tuple[int, ...], length: int, size: int, side: Side, device: torch.device
    ) -> torch.Tensor:
        """Make the mask for a caller who gave none: (S,), or (B, S) for a batch.

        Args:
            shape: of what comes before the axis: () or (B,).
            length: how much is real.
            size: S.
            side: where the padding is.
            device: of the mask.
        """
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(size, device=device)
            real = positions < length if side == "right" else positions >= size - length
            if self.kind == "additive":
                mask = torch.zeros(size, device=device)
                mask.masked_fill_(~real, float("-inf"))
            else:
                mask = ~real if self.kind == "padding" else real
            return mask.expand(*shape, size).clone()


def masks_of(given: Any, axes: Sequence[str]) -> tuple[Mask, ...]:
    """Read ``mask=``: an argument's name, or ``{argument: kind or (axis, kind)}``.

    Raises:
        TypeError, ValueError: it says something else, or leaves open which axis it means.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        given = {given: "real"}
    if not isinstance(given, Mapping):
        raise TypeError(f"bucketed: mask is {given!r}, expected the name of an argument")
    masks = []
    for argument, said in given.items():
        axis, kind = said if isinstance(said, tuple) else (None, said)
        if kind not in get_args(Kind):
            raise ValueError(
                f"bucketed: mask of {argument!r} is {said!r}, expected 'real', 'padding' or "
                "'additive', or an axis and one of these"
            )
        masks.append(Mask(argument, _axis(axis, axes, "mask", argument), kind))
    return tuple(masks)


def lengths_of(given: Any, axes: Sequence[str]) -> dict[str, str]:
    """Read ``lengths=``: an argument's name, or ``{axis: argument}``; return the latter."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {_axis(None, axes, "lengths", given): given}
    if not isinstance(given, Mapping):
        raise TypeError(f"bucketed: lengths is {given!r}, expected the name of an argument")
    return {_axis(axis, axes, "lengths", name): name for axis, name in given.items()}


def _axis(axis: Any, axes: Sequence[str], what: str, argument: str) -> str:
    if axis is None:
        if len(axes) > 1:
            raise ValueError(
                f"bucketed: {what} names {argument!r}, but there are axes {', '.join(axes)}: say "
                "which one it is for"
            )
        return axes[0]
    if axis not in axes:
        raise ValueError(f"bucketed: {what} names axis {axis!r}, but dims has {', '.join(axes)}")
    return str(axis)
