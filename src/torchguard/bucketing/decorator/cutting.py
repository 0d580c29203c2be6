"""Cut the real part out of what a padded run returns."""

from __future__ import annotations

from typing import Any

import torch

from torchguard._torch import SymbolicSizes
from torchguard.bucketing.decorator.compile import COMPILING, Source
from torchguard.bucketing.decorator.output_shapes import (
    Fold,
    Formula,
    Leaf,
    Program,
    Sizes,
    as_declared,
    as_measured,
    as_reasoned,
    leaves_of,
)
from torchguard.bucketing.decorator.planner import Planner
from torchguard.bucketing.decorator.plans import Plan
from torchguard.bucketing.decorator.trees import Path, flattened, replaced, spelled
from torchguard.bucketing.decorator.verification import Arguments
from torchguard.equivalence.isolate import (
    buffers_restored,
    module_state_restored,
    uncompiled,
    without_fake_tensor_logs,
)
from torchguard.equivalence.reachable import all_reachable_modules

__all__ = ["Cutter"]


class Cutter:
    """Finds out how much of an output is real, once per shape, and cuts.

    Args:
        source: what runs.
        planner: says what it is given.
        name: of the function, for messages.
    """

    def __init__(self, source: Source, planner: Planner, name: str) -> None:
        self.source = source
        self.planner = planner
        self.options = planner.options
        self.name = name
        self._formulas: dict[Any, Formula | None] = {}

    def cut(
        self,
        plan: Plan,
        output: Any,
        owner: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Take the real part out of an output; the arguments are not padded.

        Raises:
            TypeError, ValueError: it can't be told how much is real.
        """
        key: Any = output.shape if type(output) is torch.Tensor else _kind(output)
        program = plan.programs.get(key)
        if program is None:
            leaves = leaves_of(output)
            given = Arguments((*owner, *args), kwargs)
            program = self._program(plan, leaves, output, given)
            plan.programs[key] = program
        if not program.cuts and not program.numbers and not program.folds:
            return output
        if type(output) is torch.Tensor:
            for _, cuts in program.cuts:
                output = _cut(output, cuts)
            for _, folds in program.folds:
                output = _unfolded(output, folds)
            return output
        new: dict[Path, Any] = dict(program.numbers)
        values = dict(flattened(output))
        for path, cuts in program.cuts:
            new[path] = _cut(values[path], cuts)
        for path, folds in program.folds:
            new[path] = _unfolded(new.get(path, values[path]), folds)
        return replaced(output, new)

    def cuts(self, plan: Plan, output: Any) -> dict[Path, tuple[tuple[int, int, int], ...]]:
        """Return what :meth:`cut` has cut from an output like this one: (dim, start, length)."""
        key = output.shape if type(output) is torch.Tensor else _kind(output)
        return dict(plan.programs[key].cuts)

    def flattened(self, plan: Plan) -> str:
        """Name what was cut as one piece, but may be a batch and its rows in one dim."""
        for path, dim, length in (
            (path, dim, length)
            for program in plan.programs.values()
            for path, cuts in program.cuts
            for dim, _, length in cuts
        ):
            for axis, size in plan.sizes.items():
                if length > size > 0 and length % size == 0:
                    return (
                        f". {spelled('output', path)} has {length // size} times {axis!r} in "
                        f"dimension {dim}: if these are the rows of a batch flattened into one "
                        f"dim, say so in outputs=: {{{dim}: (None, {axis!r})}}"
                    )
        return ""

    def _program(self, plan: Plan, leaves: list[Leaf], whole: Any, given: Arguments) -> Program:
        """Find out how long the real part of each output is.

        Raises:
            ValueError: it can't be found out.
        """
        if all(
            (isinstance(value, torch.Tensor) and value.dim() == 0)
            or (not isinstance(value, torch.Tensor) and type(value) is not int)
            for _, value in leaves
        ):
            return Program((), ())
        side = self.options.side
        if self.options.outputs is not None:
            return as_declared(
                self.options.outputs, leaves, plan.sizes, plan.buckets, whole=whole, side=side
            )
        # 0 and 1 are sizes of their own kind: torch's own code asks for them.
        if min(plan.sizes.values()) >= 2:  # noqa: PLR2004
            program = self._reasoned(plan, leaves, given)
            if program is not None:
                return program
        try:
            measured = self._imagined(plan, given, {})
        except Exception as error:
            if 0 in plan.sizes.values():  # an empty input, which the function itself does not take
                program = self._reasoned(plan, leaves, given, anyhow=True)
                if program is not None:
                    return program
            raise self._unknown(leaves, whole, error) from error
        try:
            return as_measured(measured, leaves, whole, side)
        except ValueError as error:
            raise self._unknown(leaves, whole, error) from error

    def _reasoned(
        self, plan: Plan, leaves: list[Leaf], given: Arguments, *, anyhow: bool = False
    ) -> Program | None:
        """Find it out by formula; None if there is none, or not for these sizes."""
        formula = self._formula(plan, leaves, given)
        if formula is None:
            return None
        side = self.options.side
        return as_reasoned(formula, leaves, plan.sizes, plan.buckets, side, anyhow=anyhow)

    def _unknown(self, leaves: list[Leaf], whole: Any, reason: Exception) -> ValueError:
        """Return the error for an output that can't be cut."""
        path, value = next(
            (path, value)
            for path, value in leaves
            if not isinstance(value, torch.Tensor) or value.dim()
        )
        shown = tuple(value.shape) if isinstance(value, torch.Tensor) else value
        said = str(reason).partition("\n")[0] or type(reason).__name__
        return ValueError(
            f"bucketed: how much of {spelled('output', path, whole)} of {self.name} ({shown} "
            f"after padding) is real can't be told from the sizes of the inputs: {said}. Say it in "
            "outputs=, in the structure of what it returns: {dim: axis} with an axis of "
            f"{', '.join(self.planner.ladders)}, or a function of them for another length"
        )

    def _formula(self, plan: Plan, leaves: list[Leaf], given: Arguments) -> Formula | None:
        """Return how the outputs of this variant depend on the sizes; None if torch can't tell."""
        key = (id(plan.variant), plan.circumstances, tuple(path for path, _ in leaves))
        if key not in self._formulas:
            hints = {
                axis: size if size > 1 else max(plan.buckets[axis], 2)
                for axis, size in plan.sizes.items()
            }
            try:
                self._formulas[key] = self._imagined(plan, given, hints)
            except Exception:  # noqa: BLE001 - torch can't always; a run at each size is left
                self._formulas[key] = None
        return self._formulas[key]

    def _imagined(self, plan: Plan, given: Arguments, hints: Sizes) -> Formula:
        """Run the function on tensors without data, at the real sizes or with symbols."""
        before = plan.owned

        def run(world: SymbolicSizes) -> Any:
            new: dict[Path, Any] = {}
            names = set(hints)
            values = dict(given.leaves())
            for each in plan.inputs:
                path = each.path_in(before)
                new[path] = world.empty(each.symbolic(names), values[path])
            changed = given.with_parts(new)
            args, kwargs = list(changed.args), dict(changed.kwargs)
            extras = plan.extras if hints else self.planner.real_extras(plan)
            for argument, value in extras.items():
                place = plan.extra_places[argument]
                mask = self.planner.masks.get(argument)
                extra = value
                if mask is not None and hints:
                    extra = world.empty((*value.shape[:-1], mask.axis), value)
                if isinstance(place, int):
                    args[place + before] = extra
                else:
                    kwargs[place] = extra
            return self.source.function(*args, **kwargs)

        modules = all_reachable_modules(self.source.function, given.args)
        with (
            COMPILING,
            uncompiled(),
            without_fake_tensor_logs(),
            module_state_restored(modules),
            buffers_restored(modules),
        ):
            return Formula.of(run, hints)


def _kind(output: Any) -> tuple[Any, ...]:
    """Return what tells this output from others that are cut otherwise."""
    return tuple(
        (path, value.shape if isinstance(value, torch.Tensor) else type(value))
        for path, value in flattened(output)
    )


def _cut(tensor: torch.Tensor, cuts: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    for dim, start, length in cuts:
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _unfolded(tensor: torch.Tensor, folds: tuple[Fold, ...]) -> torch.Tensor:
    for fold in folds:
        tensor = fold.cut(tensor)
    return tensor
