"""What is real of a call: of its inputs, by masks and lengths, and of what the function returns.

Masks and lengths are the arguments that tell a function where its input is padding. Outputs are
flattened, sized and sliced: ``outputs=`` says how. Otherwise the function runs once more on tensors
without data, whose sizes are symbols where that is possible: nothing is ever read off a size that
happens to equal a bucket.

Shapes: B batch, T the size of an axis, S the same after padding.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from torchguard import _torch
from torchguard._absent import ABSENT
from torchguard._pytree import KeyPath, flatten, key_paths, keystr, unflatten
from torchguard._torch import ShapeFormula, SymbolicSizes
from torchguard.bucketing.decorator.shape import (
    AxisSizes,
    Call,
    Input,
    Shape,
    mask_axes,
    padded,
)
from torchguard.bucketing.decorator.spec import Mask, Spec
from torchguard.bucketing.dims import declared_at
from torchguard.bucketing.padding import Side, length_mask
from torchguard.equivalence.outcome import Output, module_state_restored

# ---- masks and lengths that the caller leaves out ----


def make_extras(spec: Spec, call: Call, shape: Shape) -> dict[str, torch.Tensor]:
    """Make the lengths and the masks that the caller has not given, by argument."""
    made: dict[str, torch.Tensor] = {}
    given = dict(zip(call.signature.names, call.arguments, strict=True))
    for axis, argument in spec.lengths.items():
        if given.get(argument) is not None:
            continue
        with torch.inference_mode(False):
            # An inference tensor has no version counter, by which a write is seen.
            # https://docs.pytorch.org/docs/stable/notes/autograd.html#inference-mode
            device = _holder(shape.inputs, axis)[0].device
            made[argument] = torch.tensor(shape.sizes[axis], device=device)
    for argument, mask in spec.masks.items():
        if given.get(argument) is None:
            made[argument] = _made_mask(mask, shape, shape.buckets)
    return made


def extras_without_padding(
    spec: Spec, shape: Shape, extras: Mapping[str, torch.Tensor], *, with_masks: bool = False
) -> dict[str, torch.Tensor]:
    """Return what a call at the real sizes has to be given besides what the caller gave."""
    wanted = {}
    for argument, value in extras.items():
        mask = spec.masks.get(argument)
        if mask is None:
            wanted[argument] = value
        elif with_masks or argument in spec.required:
            wanted[argument] = _made_mask(mask, shape, shape.sizes)
    return wanted


def written(extras: Mapping[str, torch.Tensor]) -> bool:
    """Whether the function has written to what was made, which the next call must not see."""
    return any(_torch.version_of(value) != 0 for value in extras.values())


def _made_mask(mask: Mask, shape: Shape, buckets: AxisSizes) -> torch.Tensor:
    """Make a mask, (S,) or (B, S); rows that pad a batch are not real."""
    holder, dim = _holder(shape.inputs, mask.axis)
    side, device = shape.side, holder.device
    with torch.inference_mode(False), torch.no_grad():
        real: torch.Tensor
        [real] = length_mask([shape.sizes[mask.axis]], buckets[mask.axis], side=side, device=device)
        if dim:
            rows = holder.shape[0]
            [is_row] = length_mask([rows], holder.padded(buckets)[0], side=side, device=device)
            real = is_row[:, None] & real
        # A new tensor of version 0: a later one says that the function wrote to it.
        return ~real if mask.kind == "padding" else real.clone()


def _holder(inputs: Iterable[Input], axis: str) -> tuple[Input, int]:
    """Return the first input that has an axis, and the dim it is."""
    return next((each, dim) for each in inputs for dim, name in each.axes if name == axis)


# ---- masks and lengths that the caller gives ----


class Told(NamedTuple):
    """Which positions of an axis are real by a mask, or by lengths, of the caller's."""

    axis: str
    positions: torch.Tensor
    """(T,) or (B, T)."""
    rows: str | None = None
    """The axis of B, if that varies too."""


def told_by_caller(spec: Spec, inputs: Iterable[Input], call: Call) -> list[Told]:
    """Return what the caller's own masks and lengths say."""
    found = []
    for each in inputs:
        mask = spec.masks.get(each.label)
        if mask is None:
            continue
        real = mask.real(call.leaves[each.index].detach())
        # Without dims of 1 in front: (B, 1, 1, T) is (B, T).
        kept = (*(size for size in real.shape[:-1] if size != 1), real.shape[-1])
        if len(kept) <= 2:  # noqa: PLR2004
            found.append(Told(mask.axis, real.reshape(kept), dict(each.axes).get(0)))
    for axis, given in _given_lengths(spec, call):
        lengths = torch.as_tensor(given).detach()
        holder, dim = _holder(inputs, axis)
        positions = length_mask(lengths.reshape(-1), holder.shape[dim], side=spec.side)
        rows = dict(holder.axes).get(0) if lengths.dim() and dim else None
        found.append(Told(axis, positions if lengths.dim() else positions[0], rows))
    return found


def told_of_padding(spec: Spec, inputs: Iterable[Input], call: Call) -> list[Told]:
    """Return what the caller says, without a mask that masks nothing: that says nothing."""
    if not (spec.masks or spec.lengths):
        return []
    told = told_by_caller(spec, inputs, call)
    return [each for each in told if not bool(each.positions.all())]


def rows_of(told: Iterable[Told]) -> int:
    """Return how many rows of a batch are counted, if that is not an axis."""
    counted = (len(e.positions) for e in told if e.positions.dim() > 1 and e.rows is None)
    return next(counted, 1)


def count_real(spec: Spec, shape: Shape, call: Call, cells: int) -> Any:
    """Return how many of so many cells are real by what the caller says.

    On an accelerator it is a tensor, so that nothing waits for it.
    """
    real: Any = cells
    by_axis = {each.axis: each.positions for each in told_by_caller(spec, shape.inputs, call)}
    for positions in by_axis.values():
        found = positions.sum()
        # Not a fake one, nor one without data.
        if type(found) is torch.Tensor and not found.is_meta and positions.numel():
            real = real / positions.numel() * (found.item() if found.is_cpu else found)
    return real


def _given_lengths(spec: Spec, call: Call) -> Iterator[tuple[str, Any]]:
    """Yield each axis whose lengths the caller gives, and these."""
    given = dict(zip(call.signature.names, call.arguments, strict=True))
    for axis, argument in spec.lengths.items():
        lengths = given.get(argument)
        if isinstance(lengths, int) or (isinstance(lengths, torch.Tensor) and lengths.dim() <= 1):
            yield axis, lengths


def real_window(
    told: Iterable[Told], sizes: Mapping[str, int], side: str
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
    masks: Iterable[Told],
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


# ---- the real part of an output ----


_RETURNED = (
    *(bool, int, float, complex, str, bytes, range, slice, type(None), np.generic, enum.Enum),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)
"""Types of outputs that hold no tensor, which are returned as they are."""


@dataclass(frozen=True)
class FlatOutput:
    """An output and its leaves; two are equal that have the same structure."""

    leaves: list[Any] = field(compare=False)
    paths: list[KeyPath]
    whole: Any = field(compare=False)

    def label(self, index: int) -> str:
        """Return how to spell a leaf: ``output.logits``."""
        return keystr("output", self.paths[index], self.whole)

    @classmethod
    def of(cls, whole: Any) -> FlatOutput:
        """Flatten an output."""
        # Of any class, FakeTensor too: a tensor is one leaf.
        if isinstance(whole, torch.Tensor):
            return cls([whole], [()], whole)
        leaves, treedef = flatten(whole)
        output = cls(leaves, key_paths(treedef), whole)
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, (torch.Tensor, *_RETURNED)):
                raise TypeError(
                    f"bucketed: {output.label(index)} is of type {type(leaf).__name__}, which may "
                    "hold tensors that can't be sliced: return tensors, numbers, texts, and "
                    "tuples, lists, dicts or dataclasses of them (with Hugging Face models: "
                    "use_cache=False; call .numpy() on what bucketed returns)"
                )
        return output


class Narrow(NamedTuple):
    """The arguments of ``tensor.narrow``: the real part of one dim."""

    dim: int
    start: int
    length: int

    @classmethod
    def of(cls, dim: int, length: int, padded: int, side: Side) -> Narrow:
        """Return where ``length`` is real of a dim that is ``padded`` long."""
        return cls(dim, 0 if side == "right" else padded - length, length)


Slices: TypeAlias = tuple[tuple[int, tuple[Narrow, ...]], ...]
"""What to take of an output, by index of its leaves."""


# ---- in every call ----


def slice_output(known: Mapping[Any, Slices], whole: Any) -> Any:
    """Take the real part of an output; ``ABSENT`` if it is not known yet what that is."""
    if type(whole) is torch.Tensor:
        # Outputs of one route may differ in shape: a branch on data, or a loss in place of logits.
        slices = known.get(whole.shape)
        if slices is None:
            return ABSENT
        return _slice(whole, slices[0][1]) if slices else whole
    leaves, key = _flatten(whole)
    slices = known.get(key)
    if slices is None:
        return ABSENT
    for index, steps in slices:
        leaves[index] = _slice(leaves[index], steps)
    return unflatten(leaves, whole)


def _slice(tensor: torch.Tensor, steps: tuple[Narrow, ...]) -> torch.Tensor:
    for step in steps:
        tensor = tensor.narrow(*step)
    return tensor


def kind_of(whole: Any) -> Any:
    """Return what tells an output from others that are sliced otherwise."""
    return whole.shape if type(whole) is torch.Tensor else _flatten(whole)[1]


def _flatten(whole: Any) -> tuple[list[Any], Any]:
    """Return the leaves of an output, and its kind."""
    leaves, treedef = flatten(whole)
    kinds = [leaf.shape if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves]
    return leaves, (treedef, *kinds)


# ---- in the first call of a kind ----


_MOST_FORMULAS = 1024
"""Each is of a bucket and of one kind of call; with more of them all are made again."""


class _UnderivableError(ValueError):
    """Says why a run without data does not tell the sizes of an output."""


class OutputShapes:
    """Finds out how much of an output of a function is real."""

    def __init__(self, function: Callable[..., Any], spec: Spec) -> None:
        self._function, self.spec = function, spec
        self._formulas: dict[Any, ShapeFormula | None] = {}
        """How the sizes of outputs depend on those of a call; None if torch can't tell."""

    def slices(
        self, shape: Shape, call: Call, extras: Mapping[str, Any], output: FlatOutput
    ) -> Slices:
        """Find out what of an output like this one, not sliced, is real."""
        if not any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in output.leaves):
            return ()
        if self.spec.outputs is not None:
            return _declared_steps(self.spec.outputs, output, shape)
        # 0 and 1 are sizes of their own kind: torch's own code asks for them. Nor does a formula
        # hold where data or something outside has led the function another way.
        symbolic = min(shape.real) >= 2  # noqa: PLR2004
        if symbolic:
            formula = self._formula(shape, call, extras, output)
            if formula is not None:
                try:
                    return _fitted(formula, output, shape, [shape.buckets, shape.sizes])
                except _UnderivableError:
                    pass
        try:
            run = self._run_without_data(shape, call, extras, {})
            return _fitted(run, output, shape, [{}])
        except Exception as error:
            raise self._unknown(shape, output, error) from error

    def _formula(
        self, shape: Shape, call: Call, extras: Mapping[str, Any], output: FlatOutput
    ) -> ShapeFormula | None:
        """Return how outputs depend on the sizes, in this bucket; None if torch can't tell."""
        key = (shape.padded, shape.specialization, tuple(output.paths))
        if key not in self._formulas:
            if len(self._formulas) >= _MOST_FORMULAS:
                self._formulas.clear()
            try:
                formula = self._run_without_data(shape, call, extras, shape.sizes)
            except Exception:  # noqa: BLE001 - torch can't always; a run at each size is left
                formula = None
            self._formulas[key] = formula
        return self._formulas[key]

    def _run_without_data(
        self, shape: Shape, call: Call, extras: Mapping[str, Any], hints: AxisSizes
    ) -> ShapeFormula:
        """Run the function on tensors without data, at the real sizes or with symbols."""
        given = dict(extras) if hints else extras_without_padding(self.spec, shape, extras)
        # A mask is as long as the axis it masks, so its size is a symbol, too.
        masks = {
            argument: mask_axes(shape.inputs, mask, given[argument])
            for argument, mask in self.spec.masks.items()
            if hints and argument in given
        }
        # Buffers are real, and written.
        with (
            module_state_restored(call.modules(self._function), values=True),
            SymbolicSizes(dict(hints)) as world,
        ):
            inputs = {
                each.index: world.empty(each.shape, call.leaves[each.index], each.axes)
                for each in shape.inputs
            }
            for name, axes in masks.items():
                given[name] = world.empty(given[name].shape, given[name], axes)
            args, kwargs = call.with_leaves(inputs).bind(given)
            output = FlatOutput.of(self._function(*args, **kwargs))
            return world.formula(output.leaves, output.paths)

    def _unknown(self, shape: Shape, output: FlatOutput, reason: Exception) -> ValueError:
        """Return the error for an output that can't be sliced."""
        index, leaf = next(
            (index, leaf)
            for index, leaf in enumerate(output.leaves)
            if not isinstance(leaf, torch.Tensor) or leaf.dim()
        )
        # PyTorch asks for a bug report where it is outputs= that is meant.
        why = str(reason) if isinstance(reason, _UnderivableError) else type(reason).__name__
        guess = {}
        if isinstance(leaf, torch.Tensor) and output.paths == [()]:
            axes = {size: axis for axis, size in shape.buckets.items()}
            guess = {dim: axes[size] for dim, size in enumerate(leaf.shape) if size in axes}
        typed = f", here perhaps outputs={guess}" if guess else ""
        shown = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
        return ValueError(
            f"bucketed: how much of {output.label(index)} of {self.spec.name} ({shown} after "
            f"padding) is real can't be derived: say it in outputs={typed}. That is the structure "
            f"of what it returns: {{dim: axis}} with an axis of {', '.join(self.spec.ladders)}, "
            "or a function of them for another length. To derive it the function runs on tensors "
            f"without data, which ended in: {why}"
        )


def _fitted(
    run: ShapeFormula, output: FlatOutput, shape: Shape, sizes: Sequence[AxisSizes]
) -> Slices:
    """Slice to what a run without data says, of a padded call too if it knows both."""
    if run.paths != output.paths:
        raise _UnderivableError("another structure for the real sizes than for the padded ones")
    found = run.at(*sizes)
    if found is None:
        raise _UnderivableError("a size that depends on the data")
    *padded, real = found
    steps = []
    for index, leaf in enumerate(output.leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        here, whole = real[index], tuple(leaf.shape)
        fits = isinstance(here, tuple) and len(here) == leaf.dim()
        if not fits or not all(0 <= a <= b for a, b in zip(here, whole, strict=True)):
            raise _UnderivableError(
                f"{output.label(index)} is {whole} after padding, which has no part of the shape "
                f"{here} it would have without"
            )
        if padded and padded[0][index] != whole:
            raise _UnderivableError("another way through the function")
        both = enumerate(zip(here, whole, strict=True))
        cut = tuple(Narrow.of(dim, a, b, shape.side) for dim, (a, b) in both if a != b)
        if cut:
            steps.append((index, cut))
    return tuple(steps)


# ---- what outputs= says ----


def _declared_steps(declared: Any, output: FlatOutput, shape: Shape) -> Slices:
    """Return how ``outputs=`` says to slice each leaf, by its index."""
    sizes, buckets = shape.sizes, shape.buckets
    found: list[tuple[int, tuple[Narrow, ...]]] = []
    for index, (leaf, path) in enumerate(zip(output.leaves, output.paths, strict=True)):
        spec = declared_at(declared, path) if isinstance(leaf, torch.Tensor) else None
        if spec is None:
            continue
        label = output.label(index)
        steps: list[Narrow] = []
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
            padded, real = (_evaluated(size, each, what) for each in (buckets, sizes))
            if padded != leaf.shape[dim]:
                raise ValueError(
                    f"bucketed: outputs says that {what} is {padded} for {_listed(buckets)}, but "
                    f"it is {leaf.shape[dim]}"
                )
            if not 0 <= real <= padded:
                raise ValueError(
                    f"bucketed: outputs gives {real} for {what} at {_listed(sizes)}, expected 0 to "
                    f"{padded}"
                )
            if real != padded:
                steps.append(Narrow.of(dim % leaf.dim(), real, padded, shape.side))
        if steps:
            found.append((index, tuple(steps)))
    return tuple(found)


def _evaluated(size: Any, sizes: AxisSizes, what: str) -> int:
    if isinstance(size, str) and size in sizes:
        return sizes[size]
    if callable(size):
        wanted = inspect.signature(size).parameters
        if all(name in sizes for name in wanted):
            return int(size(**{name: sizes[name] for name in wanted}))
    raise TypeError(
        f"bucketed: outputs has {size!r} for {what}, expected one of {', '.join(sizes)}, or a "
        f"function of them, such as lambda {next(iter(sizes))}: {next(iter(sizes))} // 2"
    )


def _listed(sizes: AxisSizes) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())


# ---- a call at its real sizes ----


@dataclass(frozen=True)
class Real:
    """A call without the padding with which it may have arrived, and what its outputs are."""

    outputs: OutputShapes
    shape: Shape
    call: Call
    extras: Mapping[str, torch.Tensor]
    """The masks and lengths that are made for a padded run."""
    own: Mapping[str, torch.Tensor]
    """Those that are made for the sizes here."""
    content: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """What the padding holds with which it has arrived, by index of the leaf, at full size."""
    told: Sequence[Told] = ()
    """What of the real part itself is padding, in some rows."""
    slices: dict[Any, Slices] = field(default_factory=dict)
    """What to take of an output of a padded run, as far as it is known."""

    @property
    def spec(self) -> Spec:
        """The options."""
        return self.outputs.spec

    def read(
        self, narrows: dict[int, tuple[Narrow, ...]], whole: Any, *, padded: bool
    ) -> tuple[FlatOutput, list[Output]]:
        """Flatten the real part of an output, and say which elements count by the caller's masks.

        What was sliced of a padded run is noted in ``narrows``, for the run without padding.
        """
        if padded:
            kind = kind_of(whole)
            if kind not in self.slices:
                output = FlatOutput.of(whole)
                self.slices[kind] = self.outputs.slices(self.shape, self.call, self.own, output)
            whole = slice_output(self.slices, whole)
            narrows |= dict(self.slices[kind])
        output = FlatOutput.of(whole)
        leaves = [Output(leaf) for leaf in output.leaves]
        for index, leaf in enumerate(output.leaves) if self.told else ():
            if isinstance(leaf, torch.Tensor):
                taken = narrows.get(index, ())
                leaves[index] = Output(leaf, counting(self.told, self.shape.sizes, leaf, taken))
        return output, leaves


def real_of(
    outputs: OutputShapes, shape: Shape, call: Call, extras: Mapping[str, torch.Tensor]
) -> Real:
    """Cut off what is padding already, in every row, by the masks and lengths of the caller."""
    spec, side = outputs.spec, shape.side
    told = told_of_padding(spec, shape.inputs, call)
    # What is padded here as well is on the side that was asked for.
    sides = (side,) if shape.pads else (side, "left" if side == "right" else "right")
    found = (real_window(told, shape.sizes, each) for each in sides if told)
    windows: dict[str, tuple[int, int]] = next(filter(None, found), {})
    if not windows:
        return Real(outputs, shape, call, extras, extras, told=told)
    cut: dict[int, torch.Tensor] = {}
    for each in shape.inputs:
        leaf = call.leaves[each.index].detach()
        for dim, axis in each.axes:
            leaf = leaf.narrow(dim, *windows.get(axis, (0, leaf.shape[dim])))
        cut[each.index] = leaf.contiguous().requires_grad_(each.requires_grad)
    sizes = {axis: windows.get(axis, (0, size))[1] for axis, size in shape.sizes.items()}
    begins = any(start for start, _ in windows.values())
    resized = shape.resized(cut, sizes, "left" if begins else "right")
    shorter, whole = call.with_leaves(cut), padded(shape.pads, call.leaves)
    return Real(
        outputs,
        resized,
        shorter,
        extras,
        make_extras(spec, shorter, resized),
        {each.index: whole[each.index].detach() for each in shape.inputs},
        told_of_padding(spec, resized.inputs, shorter),
    )
