"""How much of each output is real.

The function runs once more on tensors without data whose sizes are symbols. What comes out
says how sizes of outputs depend on sizes of inputs: L, L - 1, 2 L, (L - 1) // 2. Nothing is
ever read off a size that happens to equal a bucket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from torchguard._pytree import KeyPath
from torchguard._torch import SavedSizes, SymbolicSizes, uncompiled
from torchguard.bucketing.decorator.compile import COMPILING
from torchguard.bucketing.decorator.kept import KeptWork
from torchguard.bucketing.decorator.masking import mask_shape, real_extras
from torchguard.bucketing.decorator.outputs import (
    Narrow,
    Output,
    Slices,
    declared_steps,
    kind_of,
)
from torchguard.bucketing.decorator.plan import Call, Plan
from torchguard.bucketing.decorator.spec import Sizes, Spec
from torchguard.bucketing.padding import Side
from torchguard.equivalence.isolate import (
    buffers_restored,
    module_state_restored,
)

__all__ = [
    "OutputShapes",
    "flattened_rows",
    "running_without_data",
]


_Modules: TypeAlias = "Sequence[torch.nn.Module]"
"""Those that the function can reach."""


@dataclass(frozen=True)
class _Formula:
    """How the sizes of every leaf of an output depend on the axes."""

    world: SymbolicSizes | SavedSizes
    sizes: tuple[Any, ...]
    """For each leaf: expressions for its dims, or for an integer; None for anything else."""
    conditions: tuple[Any, ...]
    paths: list[KeyPath]
    spelled: dict[str, Any] | None = None
    """The same as what JSON can hold; None if it can't."""

    @classmethod
    def of(cls, world: SymbolicSizes, output: Output) -> _Formula:
        """Read the sizes of an output that was computed without data."""
        sizes: list[Any] = []
        for leaf in output.leaves:
            if isinstance(leaf, torch.Tensor):
                sizes.append(tuple(world.expression(size) for size in leaf.shape))
            elif isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool):
                sizes.append(world.expression(leaf))
            else:
                sizes.append(None)
        conditions = tuple(world.conditions())
        spelled = None
        # A key that is neither a text nor a number can't be spelled either.
        if all(type(key) in (str, int) for path in output.paths for key in path):
            with contextlib.suppress(ValueError):
                spelled = {
                    "paths": output.paths,
                    "sizes": [
                        [world.spell(size) for size in each]
                        if isinstance(each, tuple)
                        else None
                        if each is None
                        else {"is": world.spell(each)}
                        for each in sizes
                    ],
                    "conditions": [world.spell(each) for each in conditions],
                }
        return cls(world, tuple(sizes), conditions, output.paths, spelled)

    @classmethod
    def read(cls, kept: Any, axes: Iterable[str]) -> _Formula:
        """Return what :meth:`spell` has spelled.

        Raises:
            ValueError: it is none.
        """
        if "error" in kept:
            raise ValueError(kept["error"])
        world = SavedSizes(axes)
        sizes = [
            tuple(map(world.read, each)) if type(each) is list else each and world.read(each["is"])
            for each in kept["sizes"]
        ]
        conditions = tuple(map(world.read, kept["conditions"]))
        return cls(world, tuple(sizes), conditions, [tuple(path) for path in kept["paths"]])

    def at(self, *sizes: Sizes, unconditionally: bool = False) -> list[list[Any]] | None:
        """Put sizes in, one set of them or several.

        Returns:
            For each set the sizes of every leaf. None where the conditions do not hold for one of
            the sets, unless ``unconditionally``, or a size depends on something else.
        """
        value = self.world.value
        found: list[list[Any]] = []
        for each in sizes:
            if not unconditionally and any(value(c, each) is not True for c in self.conditions):
                return None
            leaves = [
                tuple(value(e, each) for e in expressions)
                if isinstance(expressions, tuple)
                else None
                if expressions is None
                else value(expressions, each)
                for expressions in self.sizes
            ]
            if any(isinstance(leaf, tuple) and None in leaf for leaf in leaves):
                return None
            found.append(leaves)
        return found


class OutputShapes:
    """Finds out how much of an output is real.

    Args:
        function: what runs, not compiled.
        spec: what was declared of it.
        name: of the function, for messages.
        kept: what another process has found out, and what the next one may use.
    """

    def __init__(self, function: Callable[..., Any], spec: Spec, name: str, kept: KeptWork) -> None:
        self.function = function
        self.spec = spec
        self.name = name
        self._kept = kept
        self._formulas: dict[Any, _Formula | None] = {}

    def narrows(self, plan: Plan, whole: Any) -> dict[int, list[Narrow]]:
        """Return what :func:`slice_output` takes of an output like this, by index of its leaf."""
        key = kind_of(whole)
        slices: Slices = plan.slices[key]
        found = {
            index: [s for s in steps if isinstance(s, Narrow)] for index, steps in slices.steps
        }
        return {index: narrows for index, narrows in found.items() if narrows}

    def slices(self, plan: Plan, call: Call, modules: _Modules, output: Output) -> Slices:
        """Find out what of an output like this one is real.

        Args:
            plan: how the call was padded.
            call: not padded.
            modules: those the function can reach.
            output: not sliced.

        Raises:
            TypeError, ValueError: it can't be found out.
        """
        if all(
            leaf.dim() == 0 if isinstance(leaf, torch.Tensor) else type(leaf) is not int
            for leaf in output.leaves
        ):
            return Slices()
        side = self.spec.options["side"]
        declared = self.spec.options["outputs"]
        if declared is not None:
            return Slices(declared_steps(declared, output, plan.sizes, plan.buckets, side))
        # 0 and 1 are sizes of their own kind: torch's own code asks for them.
        if min(plan.sizes.values()) >= 2:  # noqa: PLR2004
            slices = self._derived(plan, call, modules, output)
            if slices is not None:
                return slices
        try:
            measured = self._run_without_data(plan, call, modules, {})
        except Exception as error:
            if 0 in plan.sizes.values():  # an empty input, which the function itself does not take
                slices = self._derived(plan, call, modules, output, unconditionally=True)
                if slices is not None:
                    return slices
            raise self._unknown(output, error) from error
        try:
            return _measured(measured, output, side)
        except ValueError as error:
            raise self._unknown(output, error) from error

    def _derived(
        self,
        plan: Plan,
        call: Call,
        modules: _Modules,
        output: Output,
        *,
        unconditionally: bool = False,
    ) -> Slices | None:
        """Slice by formula; None if there is none, or it gives other sizes than the padded run."""
        formula = self._formula(plan, call, modules, output)
        if formula is None or formula.paths != output.paths:
            return None
        found = formula.at(plan.buckets, plan.sizes, unconditionally=unconditionally)
        if found is None:
            return None
        padded, real = found
        # The formula is of one way through the function: a branch on data may take another.
        for leaf, expected in zip(output.leaves, padded, strict=True):
            if isinstance(leaf, torch.Tensor) and tuple(leaf.shape) != expected:
                return None
            if type(leaf) is int and leaf != expected:
                return None
        if any(isinstance(each, tuple) and min(each, default=0) < 0 for each in real):
            return None
        return _slices_to(output.leaves, real, self.spec.options["side"])

    def _formula(
        self, plan: Plan, call: Call, modules: _Modules, output: Output
    ) -> _Formula | None:
        """Return how the outputs of this variant depend on the sizes; None if torch can't tell."""
        # The id is not given again: the cache keeps every variant as long as this lives.
        key = (id(plan.variant), plan.specialization, tuple(output.paths))
        if key not in self._formulas:
            # A symbol stands for 2 or more: torch makes a number of a size that is 0 or 1.
            # https://docs.pytorch.org/docs/main/compile/dynamic_shapes_zero_one_specialization.html
            hints = {
                axis: size if size > 1 else max(plan.buckets[axis], 2)
                for axis, size in plan.sizes.items()
            }
            try:
                self._formulas[key] = self._run_without_data(plan, call, modules, hints)
            except Exception:  # noqa: BLE001 - torch can't always; a run at each size is left
                self._formulas[key] = None
        return self._formulas[key]

    def _run_without_data(
        self, plan: Plan, call: Call, modules: _Modules, hints: Sizes
    ) -> _Formula:
        """Run the function on tensors without data, at the real sizes or with symbols.

        Where another process has done so, and the function is the same, nothing is run.
        """
        kept = self._kept.formula(plan, call, hints) if self.spec.plan is not None else None
        if kept is not None:
            return _Formula.read(kept, plan.sizes)
        try:
            formula = self._derive(plan, call, modules, hints)
        except Exception as error:
            told = str(error).partition("\n")[0]
            self._kept.note_formula(plan, call, hints, {"error": told or type(error).__name__})
            raise
        if formula.spelled is not None:  # else it is derived again by the next process
            self._kept.note_formula(plan, call, hints, formula.spelled)
        return formula

    def _derive(self, plan: Plan, call: Call, modules: _Modules, hints: Sizes) -> _Formula:
        extras: dict[str, Any] = dict(plan.extras) if hints else real_extras(self.spec, plan)
        shapes = {each.index: each.symbolic(hints) for each in plan.inputs}
        # A mask is as long as the axis it masks, so its size is a symbol, too.
        masks = {
            argument: mask_shape(plan.inputs, mask)
            for argument, mask in self.spec.masks.items()
            if hints and argument in extras
        }
        with running_without_data(modules), SymbolicSizes(hints) as world:
            inputs = {index: world.empty(shapes[index], call.leaves[index]) for index in shapes}
            extras |= {name: world.empty(shape, extras[name]) for name, shape in masks.items()}
            args, kwargs = call.with_leaves(inputs).bind(extras)
            return _Formula.of(world, Output.of(self.function(*args, **kwargs)))

    def _unknown(self, output: Output, reason: Exception) -> ValueError:
        """Return the error for an output that can't be sliced."""
        index, leaf = next(
            (index, leaf)
            for index, leaf in enumerate(output.leaves)
            if not isinstance(leaf, torch.Tensor) or leaf.dim()
        )
        shown = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
        said = str(reason).partition("\n")[0] or type(reason).__name__
        return ValueError(
            f"bucketed: how much of {output.label(index)} of {self.name} ({shown} "
            f"after padding) is real can't be told from the sizes of the inputs: {said}. Say it in "
            "outputs=, in the structure of what it returns: {dim: axis} with an axis of "
            f"{', '.join(self.spec.ladders)}, or a function of them for another length"
        )


@contextlib.contextmanager
def running_without_data(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let a function run on tensors without data, and leave the modules it reaches as they were."""
    with (
        COMPILING,
        uncompiled(),
        module_state_restored(modules),
        buffers_restored(modules),  # they are real, and written
    ):
        yield


def _measured(formula: _Formula, output: Output, side: Side) -> Slices:
    """Slice to the sizes of a run at the real sizes, without data.

    Raises:
        ValueError: that run has returned something else.
    """
    if formula.paths != output.paths:
        raise ValueError(
            "bucketed: the function returns another structure for the real sizes than for the "
            "padded ones"
        )
    found = formula.at({})
    if found is None:
        raise ValueError("a size depends on the data")
    (real,) = found
    for index, (leaf, sizes) in enumerate(zip(output.leaves, real, strict=True)):
        if isinstance(leaf, torch.Tensor) and (
            not isinstance(sizes, tuple)
            or len(sizes) != leaf.dim()
            or any(a > b for a, b in zip(sizes, leaf.shape, strict=True))
        ):
            raise ValueError(
                f"bucketed: {output.label(index)} is {tuple(leaf.shape)} after padding, which has "
                f"no part of the shape {sizes} it would have without"
            )
    return _slices_to(output.leaves, real, side)


def _slices_to(leaves: Sequence[Any], real: Sequence[Any], side: Side) -> Slices:
    steps, numbers = [], []
    for index, (leaf, sizes) in enumerate(zip(leaves, real, strict=True)):
        if isinstance(leaf, torch.Tensor):
            changed = tuple(
                Narrow.of(dim, size, leaf.shape[dim], side)
                for dim, size in enumerate(sizes)
                if size != leaf.shape[dim]
            )
            if changed:
                steps.append((index, changed))
        elif type(leaf) is int and isinstance(sizes, int) and sizes != leaf:
            numbers.append((index, sizes))
    return Slices(tuple(steps), tuple(numbers))


def flattened_rows(plan: Plan) -> str:
    """Name what was sliced as one piece, but may be a batch and its rows in one dim."""
    steps = [
        step
        for slices in plan.slices.values()
        for _, steps in slices.steps
        for step in steps
        if isinstance(step, Narrow)
    ]
    for dim, _, length in steps:
        for axis, size in plan.sizes.items():
            if length > size > 0 and length % size == 0:
                return (
                    f". The output has {length // size} times {axis!r} in dimension {dim}: if "
                    "these are the rows of a batch flattened into one dim, say so in outputs=: "
                    f"{{{dim}: (None, {axis!r})}}"
                )
    return ""
