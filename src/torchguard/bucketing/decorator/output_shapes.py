"""How much of each output is real: outputs are flattened, sized and sliced.

To size them the function runs once more on tensors without data whose sizes are symbols: nothing
is ever read off a size that happens to equal a bucket. ``outputs=`` says it instead.

Shapes: B batch, T the size of an axis.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from torchguard._pytree import KeyPath, flatten, key_paths, keystr, unflatten
from torchguard._torch import ShapeFormula, SymbolicSizes
from torchguard.bucketing.decorator.bucket import Call, Plan
from torchguard.bucketing.decorator.masking import Real, counting, mask_axes, real_extras
from torchguard.bucketing.decorator.options import AxisSizes, Spec
from torchguard.bucketing.dims import declared_at
from torchguard.bucketing.padding import Side
from torchguard.equivalence.isolate import module_state_restored
from torchguard.equivalence.outcome import Output

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


UNKNOWN: Any = object()
"""What :func:`slice_output` returns for an output of a kind that was not seen yet."""


def slice_output(plan: Plan, whole: Any) -> Any:
    """Take the real part of an output; ``UNKNOWN`` if it is not known yet what that is."""
    if type(whole) is torch.Tensor:
        # Outputs of one plan may differ in shape: a branch on data, or a loss in place of logits.
        slices = plan.slices.get(whole.shape)
        if slices is None:
            return UNKNOWN
        return _slice(whole, slices[0][1]) if slices else whole
    leaves, key = _flatten(whole)
    slices = plan.slices.get(key)
    if slices is None:
        return UNKNOWN
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


class OutputShapes(NamedTuple):
    """Finds out how much of an output of a function is real."""

    function: Callable[..., Any]
    spec: Spec
    name: str

    def slice(self, plan: Plan, call: Call, whole: Any) -> Any:
        """Take the real part of an output, which may be of a new kind."""
        real = slice_output(plan, whole)
        if real is UNKNOWN:
            plan.slices[kind_of(whole)] = self.slices(plan, call, FlatOutput.of(whole))
            real = slice_output(plan, whole)
        return real

    def real_output(
        self,
        plan: Plan,
        call: Call,
        masks: Sequence[Real],
        narrows: dict[int, tuple[Narrow, ...]],
        whole: Any,
        *,
        padded: bool,
    ) -> tuple[FlatOutput, list[Output]]:
        """Flatten the real part of an output, and say which elements count by the caller's masks.

        What was sliced of a padded run is noted in ``narrows``, for the run without padding.
        """
        if padded:
            kind = kind_of(whole)
            whole = self.slice(plan, call, whole)
            narrows |= dict(plan.slices[kind])
        output = FlatOutput.of(whole)
        found = [Output(leaf) for leaf in output.leaves]
        for index, leaf in enumerate(output.leaves) if masks else ():
            if isinstance(leaf, torch.Tensor):
                taken = narrows.get(index, ())
                found[index] = Output(leaf, counting(masks, plan.sizes, leaf, taken))
        return output, found

    def slices(self, plan: Plan, call: Call, output: FlatOutput) -> Slices:
        """Find out what of an output like this one, not sliced, is real."""
        if not any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in output.leaves):
            return ()
        side = plan.side
        declared = self.spec.options["outputs"]
        if declared is not None:
            return _declared_steps(declared, output, plan.sizes, plan.buckets, side)
        # 0 and 1 are sizes of their own kind: torch's own code asks for them.
        if min(plan.sizes.values()) >= 2:  # noqa: PLR2004
            slices = self._derived(plan, call, output)
            if slices is not None:
                return slices
        try:
            run = self._run_without_data(plan, call, {})
        except Exception as error:
            raise self._unknown(plan, output, error) from error
        try:
            return _measured(run, output, side)
        except ValueError as error:
            raise self._unknown(plan, output, error) from error

    def _derived(self, plan: Plan, call: Call, output: FlatOutput) -> Slices | None:
        """Slice by formula; None if there is none, or it gives other sizes than the padded run."""
        formula = self._formula(plan, call, output)
        if formula is None or formula.paths != output.paths:
            return None
        found = formula.at(plan.buckets, plan.sizes)
        if found is None:
            return None
        padded, real = found
        # The formula is of one way through the function: a branch on data may take another.
        for leaf, expected in zip(output.leaves, padded, strict=True):
            if isinstance(leaf, torch.Tensor) and tuple(leaf.shape) != expected:
                return None
        if any(isinstance(each, tuple) and min(each, default=0) < 0 for each in real):
            return None
        return _slices_to(output.leaves, real, plan.side)

    def _formula(self, plan: Plan, call: Call, output: FlatOutput) -> ShapeFormula | None:
        """Return how outputs depend on the sizes, in this bucket; None if torch can't tell."""
        formulas = plan.bucket.formulas
        key = (plan.shapes, plan.specialization, tuple(output.paths))
        if key not in formulas:
            # A symbol stands for 2 or more: torch makes a number of a size that is 0 or 1.
            # https://docs.pytorch.org/docs/main/compile/dynamic_shapes_zero_one_specialization.html
            hints = {
                axis: size if size > 1 else max(plan.buckets[axis], 2)
                for axis, size in plan.sizes.items()
            }
            try:
                formulas[key] = self._run_without_data(plan, call, hints)
            except Exception:  # noqa: BLE001 - torch can't always; a run at each size is left
                formulas[key] = None
        return formulas[key]

    def _run_without_data(self, plan: Plan, call: Call, hints: AxisSizes) -> ShapeFormula:
        """Run the function on tensors without data, at the real sizes or with symbols."""
        extras: dict[str, Any] = dict(plan.extras) if hints else real_extras(self.spec, plan)
        # A mask is as long as the axis it masks, so its size is a symbol, too.
        masks = {
            argument: mask_axes(plan.inputs, mask, extras[argument])
            for argument, mask in self.spec.masks.items()
            if hints and argument in extras
        }
        modules = call.modules(self.function)
        # Buffers are real, and written.
        with (
            module_state_restored(modules, values=True),
            SymbolicSizes(hints) as world,
        ):
            inputs = {
                each.index: world.empty(each.shape, call.leaves[each.index], each.axes)
                for each in plan.inputs
            }
            for name, axes in masks.items():
                extras[name] = world.empty(extras[name].shape, extras[name], axes)
            args, kwargs = call.with_leaves(inputs).bind(extras)
            output = FlatOutput.of(self.function(*args, **kwargs))
            return world.formula(output.leaves, output.paths)

    def _unknown(self, plan: Plan, output: FlatOutput, reason: Exception) -> ValueError:
        """Return the error for an output that can't be sliced."""
        index, leaf = next(
            (index, leaf)
            for index, leaf in enumerate(output.leaves)
            if not isinstance(leaf, torch.Tensor) or leaf.dim()
        )
        # PyTorch asks for a bug report where it is outputs= that is meant.
        why = re.sub(r"[^.]*(issue|report|bug)[^.]*(\.|$)", "", str(reason).partition("\n")[0])
        guess = {}
        if isinstance(leaf, torch.Tensor) and output.paths == [()]:
            axes = {size: axis for axis, size in plan.buckets.items()}
            guess = {dim: axes[size] for dim, size in enumerate(leaf.shape) if size in axes}
        typed = f", here perhaps outputs={guess}" if guess else ""
        shown = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
        return ValueError(
            f"bucketed: how much of {output.label(index)} of {self.name} ({shown} after padding) "
            f"is real can't be derived: say it in outputs={typed}. That is the structure of what "
            f"it returns: {{dim: axis}} with an axis of {', '.join(self.spec.ladders)}, or a "
            "function of them for another length. To derive it the function runs on tensors "
            f"without data, which ended in {type(reason).__name__}: {why.strip()}"
        )


def _measured(run: ShapeFormula, output: FlatOutput, side: Side) -> Slices:
    """Slice to the sizes of a run at the real sizes, without data."""
    found = run.at({}) if run.paths == output.paths else None
    if run.paths != output.paths:
        raise ValueError("it returns another structure for the real sizes than for the padded ones")
    if found is None:
        raise ValueError("a size depends on the data")
    for index, (leaf, sizes) in enumerate(zip(output.leaves, found[0], strict=True)):
        if isinstance(leaf, torch.Tensor) and (
            not isinstance(sizes, tuple)
            or len(sizes) != leaf.dim()
            or any(a > b for a, b in zip(sizes, leaf.shape, strict=True))
        ):
            raise ValueError(
                f"{output.label(index)} is {tuple(leaf.shape)} after padding, which has no part of "
                f"the shape {sizes} it would have without"
            )
    return _slices_to(output.leaves, found[0], side)


def _slices_to(leaves: Sequence[Any], real: Sequence[Any], side: Side) -> Slices:
    found = []
    for index, (leaf, sizes) in enumerate(zip(leaves, real, strict=True)):
        if isinstance(leaf, torch.Tensor):
            steps = tuple(
                Narrow.of(dim, size, leaf.shape[dim], side)
                for dim, size in enumerate(sizes)
                if size != leaf.shape[dim]
            )
            if steps:
                found.append((index, steps))
    return tuple(found)


# ---- what outputs= says ----


def _declared_steps(
    declared: Any, output: FlatOutput, sizes: AxisSizes, buckets: AxisSizes, side: Side
) -> Slices:
    """Return how ``outputs=`` says to slice each leaf, by its index."""
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
                steps.append(Narrow.of(dim % leaf.dim(), real, padded, side))
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
