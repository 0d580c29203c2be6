"""Masks and lengths: the arguments that tell a function where its input is padding.

Shapes: B batch, T the size of an axis, S the same after padding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from torchguard import _torch
from torchguard.bucketing.padding import length_mask

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.bucket import Call, Input, Plan
    from torchguard.bucketing.decorator.options import AxisSizes, Spec

MaskKind: TypeAlias = Literal["real", "padding", "additive"]
"""A mask is True (or 1) where the data is real, True where it is padding, or holds 0 and -inf
to add to scores."""

_MASKED_BELOW = -1000.0
"""What is added to scores that are not to count is below this."""


@dataclass(frozen=True)
class Mask:
    """An argument that masks an axis."""

    argument: str
    axis: str
    kind: MaskKind

    @property
    def fill(self) -> float:
        """What to extend the caller's own mask with."""
        return {"real": 0, "padding": 1, "additive": float("-inf")}[self.kind]

    def real(self, given: torch.Tensor) -> torch.Tensor:
        """Return which positions of a mask that the caller gives are real."""
        if self.kind == "additive":
            return given > _MASKED_BELOW  # 0, a bias, or -inf, the smallest number, -10,000
        return (given != 0) if self.kind == "real" else (given == 0)


def masks_of(given: Any, axes: Sequence[str]) -> list[Mask]:
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
                f"bucketed: mask of {argument!r} is {value!r}, expected 'real', 'padding' or "
                "'additive', or an axis and one of these"
            )
        masks.append(Mask(argument, _axis(axis, axes, "mask", argument), kind))
    return masks


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


# ---- masks and lengths that the caller leaves out ----


def make_extras(
    spec: Spec, call: Call, inputs: Sequence[Input], sizes: AxisSizes, buckets: AxisSizes
) -> dict[str, torch.Tensor]:
    """Make the lengths, and the masks that the caller has not given, by argument."""
    made: dict[str, torch.Tensor] = {}
    for axis, argument in spec.lengths.items():
        with torch.inference_mode(False):
            # An inference tensor has no version counter, by which fresh_extras() sees a write.
            # https://docs.pytorch.org/docs/stable/notes/autograd.html#inference-mode
            made[argument] = torch.tensor(sizes[axis], device=_holder(inputs, axis)[0].device)
    given = dict(zip(call.signature.names, call.arguments, strict=True))
    for argument, mask in spec.masks.items():
        # Above the largest bucket nothing is padded, but the function may insist on a mask.
        if given.get(argument) is None and (buckets or argument in spec.required):
            made[argument] = _made_mask(spec, mask, inputs, sizes, buckets or sizes)
    return made


def _made_mask(
    spec: Spec, mask: Mask, inputs: Sequence[Input], sizes: AxisSizes, buckets: AxisSizes
) -> torch.Tensor:
    """Make a mask, (S,) or (B, S); rows that pad a batch are not real."""
    holder, dim = _holder(inputs, mask.axis)
    side, device = spec.options["side"], holder.device
    with torch.inference_mode(False), torch.no_grad():
        real: torch.Tensor
        [real] = length_mask([sizes[mask.axis]], buckets[mask.axis], side=side, device=device)
        if dim:
            rows = holder.shape[0]
            [is_row] = length_mask([rows], holder.padded(buckets)[0], side=side, device=device)
            real = is_row[:, None] & real
        if mask.kind == "additive":
            return torch.zeros(real.shape, device=device).masked_fill(~real, float("-inf"))
        # A new tensor of version 0: a later one says that the function wrote to it.
        return ~real if mask.kind == "padding" else real.clone()


def mask_axes(inputs: Iterable[Input], mask: Mask, value: Any) -> tuple[tuple[int, str], ...]:
    """Return the dims of a mask whose sizes vary, the batch and the last: (dim, its axis)."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        raise TypeError(f"bucketed: {mask.argument} is {value!r}, expected a mask, a tensor")
    last = (value.dim() - 1, mask.axis)
    masked = (dict(each.axes) for each in inputs)
    batch = next((names.get(0) for names in masked if mask.axis in names.values()), None)
    # One row, as of a mask (1, 1, T, T), is that of every row of the batch.
    rows = value.dim() == 2 or (value.dim() > 2 and value.shape[0] != 1)  # noqa: PLR2004
    return (last,) if batch is None or batch == mask.axis or not rows else ((0, batch), last)


def fresh_extras(spec: Spec, call: Call, plan: Plan) -> dict[str, torch.Tensor]:
    """Return the extras of a plan, made anew if the function has written to one."""
    for value in plan.extras.values():
        if _torch.version_of(value) != 0:
            # The next call must not see what the function has written.
            plan.extras = make_extras(spec, call, plan.inputs, plan.sizes, plan.buckets)
            break
    return plan.extras


def real_extras(spec: Spec, plan: Plan, *, with_masks: bool = False) -> dict[str, torch.Tensor]:
    """Return what a call at the real sizes has to be given besides what the caller gave."""
    wanted = {}
    for argument, value in plan.extras.items():
        mask = spec.masks.get(argument)
        if mask is None:
            wanted[argument] = value
        elif with_masks or argument in spec.required:
            wanted[argument] = _made_mask(spec, mask, plan.inputs, plan.sizes, plan.sizes)
    return wanted


def _holder(inputs: Iterable[Input], axis: str) -> tuple[Input, int]:
    """Return the first input that has an axis, and the dim it is."""
    return next((each, dim) for each in inputs for dim, name in each.axes if name == axis)


# ---- masks that the caller gives ----


class Real(NamedTuple):
    """Which positions of an axis are real by a mask of the caller's."""

    axis: str
    positions: torch.Tensor
    """(T,) or (B, T)."""


def given_masks(
    masks: Mapping[str, Mask], inputs: Iterable[Input], leaves: Sequence[Any]
) -> list[Real]:
    """Return what the caller's own masks say; one that masks nothing says nothing."""
    found = []
    for each in inputs:
        mask = masks.get(each.label)
        if mask is None:
            continue
        real = mask.real(leaves[each.index].detach())
        # (B, 1, 1, T), as attention takes it.
        kept = [size for size in real.shape[:-1] if size != 1]
        if len(kept) <= 1 and not bool(real.all()):
            found.append(Real(mask.axis, real.reshape(*kept, real.shape[-1])))
    return found


def counting(
    masks: Iterable[Real],
    sizes: Mapping[str, int],
    tensor: torch.Tensor,
    narrows: Iterable[tuple[int, int, int]],
) -> torch.Tensor | None:
    """Return which elements of an output are at positions that the caller's masks call real.

    At the others models return anything, and with more padding something else. The output is
    sliced; ``narrows`` say what was taken of it, and ``sizes`` are not padded.
    """
    counts: torch.Tensor | None = None
    for dim, _, length in narrows:
        found = (_spread(m.positions, tensor, dim) for m in masks if sizes[m.axis] == length)
        # Of two axes of the same size either may be meant: what one of them calls real counts.
        here = [each for each in found if each is not None]
        if here:
            real = functools.reduce(torch.logical_or, here)
            counts = real if counts is None else counts & real
    return counts


def _spread(positions: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Bring a mask (T,) or (B, T) into a form that broadcasts to an output."""
    shape = [1] * tensor.dim()
    shape[dim] = positions.shape[-1]
    if positions.dim() > 1:
        size = positions.shape[0]
        batches = {d for d in range(tensor.dim()) if d != dim and tensor.shape[d] == size}
        batch = next((d for d in (0, dim - 1, dim + 1) if d in batches), None)
        if batch is None:
            return None
        shape[batch] = size
        positions = positions if batch < dim else positions.T
    return positions.to(tensor.device).reshape(shape)
