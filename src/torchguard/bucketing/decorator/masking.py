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

MaskKind: TypeAlias = Literal["real", "padding"]
"""Whether a mask is True (or 1) where the data is real, or where it is padding."""


@dataclass(frozen=True)
class Mask:
    """An argument that masks an axis."""

    argument: str
    axis: str
    kind: MaskKind

    @property
    def fill(self) -> float:
        """What to extend the caller's own mask with."""
        return float(self.kind == "padding")

    def real(self, given: torch.Tensor) -> torch.Tensor:
        """Return which positions of a mask that the caller gives are real."""
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
                f"bucketed: mask of {argument!r} is {value!r}, expected 'real' or "
                "'padding', or an axis and one of these"
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
    if axis is None and len(axes) == 1:
        return axes[0]
    if axis not in axes:
        raise ValueError(
            f"bucketed: {what} names {argument!r} for axis {axis!r}, expected one of "
            f"{', '.join(axes)}"
        )
    return str(axis)


# ---- masks and lengths that the caller leaves out ----


def make_extras(
    spec: Spec, call: Call, inputs: Sequence[Input], sizes: AxisSizes, buckets: AxisSizes
) -> dict[str, torch.Tensor]:
    """Make the lengths and the masks that the caller has not given, by argument."""
    made: dict[str, torch.Tensor] = {}
    given = dict(zip(call.signature.names, call.arguments, strict=True))
    for axis, argument in spec.lengths.items():
        if given.get(argument) is not None:
            continue
        with torch.inference_mode(False):
            # An inference tensor has no version counter, by which fresh_extras() sees a write.
            # https://docs.pytorch.org/docs/stable/notes/autograd.html#inference-mode
            made[argument] = torch.tensor(sizes[axis], device=_holder(inputs, axis)[0].device)
    for argument, mask in spec.masks.items():
        if given.get(argument) is None:
            made[argument] = _made_mask(spec, mask, inputs, sizes, buckets)
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


# ---- masks and lengths that the caller gives ----


class Real(NamedTuple):
    """Which positions of an axis are real by a mask, or by lengths, of the caller's."""

    axis: str
    positions: torch.Tensor
    """(T,) or (B, T)."""
    rows: str | None = None
    """The axis of B, if that varies too."""


def told_by_caller(spec: Spec, inputs: Iterable[Input], call: Call) -> list[Real]:
    """Return what the caller's own masks and lengths say."""
    found = []
    for each in inputs:
        mask = spec.masks.get(each.label)
        if mask is None:
            continue
        real = mask.real(call.leaves[each.index].detach())
        kept = _without_ones(real.shape)
        if len(kept) <= 2:  # noqa: PLR2004
            found.append(Real(mask.axis, real.reshape(kept), dict(each.axes).get(0)))
    for axis, given in _given_lengths(spec, call):
        lengths = torch.as_tensor(given).detach()
        holder, dim = _holder(inputs, axis)
        positions = length_mask(lengths.reshape(-1), holder.shape[dim], side=spec.options["side"])
        rows = dict(holder.axes).get(0) if lengths.dim() and dim else None
        found.append(Real(axis, positions if lengths.dim() else positions[0], rows))
    return found


def real_by_caller(spec: Spec, inputs: Iterable[Input], call: Call) -> list[Real]:
    """Return what the caller says, without a mask that masks nothing: that says nothing."""
    told = told_by_caller(spec, inputs, call)
    return [each for each in told if not bool(each.positions.all())]


def rows_of(told: Iterable[Real]) -> int:
    """Return how many rows of a batch are counted, if that is not an axis."""
    counted = (len(e.positions) for e in told if e.positions.dim() > 1 and e.rows is None)
    return next(counted, 1)


def count_real(spec: Spec, plan: Plan, call: Call) -> Any:
    """Return how much of a call is real by what the caller says.

    On an accelerator it is a tensor, so that nothing waits for it.
    """
    real: Any = plan.real
    by_axis = {each.axis: each.positions for each in told_by_caller(spec, plan.inputs, call)}
    for positions in by_axis.values():
        found = positions.sum()
        # Not a fake one, nor one without data.
        if type(found) is torch.Tensor and not found.is_meta and positions.numel():
            real = real / positions.numel() * (found.item() if found.is_cpu else found)
    return real


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a mask without dims of 1 in front: (B, 1, 1, T) is (B, T)."""
    return (*(size for size in shape[:-1] if size != 1), shape[-1])


def _given_lengths(spec: Spec, call: Call) -> Iterable[tuple[str, Any]]:
    """Yield each axis whose lengths the caller gives, and these."""
    given = dict(zip(call.signature.names, call.arguments, strict=True))
    for axis, argument in spec.lengths.items():
        lengths = given.get(argument)
        if isinstance(lengths, int) or (isinstance(lengths, torch.Tensor) and lengths.dim() <= 1):
            yield axis, lengths


def real_window(
    told: Iterable[Real], sizes: Mapping[str, int], side: str
) -> dict[str, tuple[int, int]]:
    """Return where each axis begins and how long it is without what is padding in every row.

    Only what is on one side is cut, and only axes that are shorter then are returned.
    """
    windows: dict[str, tuple[int, int]] = {}
    for real in told:
        by_axis = [(real.axis, real.positions.reshape(-1, real.positions.shape[-1]).any(0))]
        if real.rows is not None and real.positions.dim() > 1:
            by_axis.append((real.rows, real.positions.any(1)))
        for axis, positions in by_axis:
            there = positions.nonzero()
            if not len(there):
                continue  # nothing is real, so nothing can be left
            first = 0 if side == "right" else int(there[0])
            last = sizes[axis] if side == "left" else int(there[-1]) + 1
            start, length = windows.get(axis, (first, last - first))
            begin, end = min(start, first), max(start + length, last)
            windows[axis] = (begin, end - begin)
    return {axis: each for axis, each in windows.items() if each[1] < sizes[axis]}


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
    for each in masks:
        # A row that pads the batch: of a model's answer for nothing, such as NaN, all is arbitrary.
        if each.positions.dim() > 1 and tensor.dim() and len(each.positions) == len(tensor):
            rows = each.positions.any(1)
            if not bool(rows.all()):
                counts = rows.to(tensor.device).reshape(-1, *[1] * (tensor.dim() - 1))
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
