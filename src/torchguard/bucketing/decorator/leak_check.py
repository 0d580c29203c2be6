"""Check one call: the padded answer has to be the real one.

What is to be shown: the real part of the output, the gradients and the buffers do not depend on
how much padding there is, nor on what it holds; or they rely on 0 in it, and 0 is neutral.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from torchguard._pytree import (
    all_reachable_modules,
    flatten,
    key_paths,
    keystr,
    reachable_tensors,
)
from torchguard._torch import uncompiled
from torchguard.bucketing.decorator.compile import COMPILING
from torchguard.bucketing.decorator.leak_error import Context, Run, leak_error
from torchguard.bucketing.decorator.masking import counting, given_masks
from torchguard.bucketing.decorator.other_inputs import (
    OTHER_VALUES,
    Fills,
    other_fills,
    shortened,
)
from torchguard.bucketing.decorator.output_shapes import OutputShapes
from torchguard.bucketing.decorator.outputs import UNKNOWN, Output, slice_output
from torchguard.bucketing.decorator.plan import Call, Input, Plan, given_by, real_extras, sizes_of
from torchguard.bucketing.decorator.proofs import Proven
from torchguard.equivalence.collective import largest_of_all_ranks
from torchguard.equivalence.compare import PADDING, judge
from torchguard.equivalence.perturb import perturb_, perturbed
from torchguard.equivalence.run import Output as Compared
from torchguard.equivalence.run import run_undoing_mutations
from torchguard.errors import PaddingLeakError

__all__ = ["check_padding"]

_TURNS = 4
"""How often a leak has to be seen. A right function that jumps looks like one now and then."""

_ROUNDING = 1 / 16
"""Above this share of what is allowed, a difference may be the beginning of a leak."""

_SIGNS = 2
"""So many of OTHER_VALUES are tried on every function, the others on those that rely on 0."""


@dataclass(frozen=True)
class _Case:
    """A call to compare with and without padding."""

    plan: Plan
    call: Call
    description: str = ""
    """How its data differs from the caller's."""
    others: tuple[str, ...] = ()
    """The inputs that have other data than the caller's."""
    short: bool = False
    """Whether the caller's inputs are cut short."""


class _Leak(NamedTuple):
    """What a comparison has found."""

    error: PaddingLeakError | None
    strain: float
    """The largest difference as a share of what is allowed; 0 means equal to the last bit."""


class _First(NamedTuple):
    """What the runs of the call itself have found, before anything is confirmed."""

    leak: PaddingLeakError | None
    dependence: PaddingLeakError | None
    """Of the answer on what the padding holds."""
    suspicious: bool
    """Whether there is a difference that more padding might make larger."""


def check_padding(
    shapes: OutputShapes, plan: Plan, call: Call, proven: Proven, *, anew: bool = False
) -> None:
    """Raise unless padding leaves the answer, the gradients and the buffers as they are.

    All ranks of a group make the same runs: what decides about the next ones is agreed on.

    Args:
        shapes: knows what runs, what was declared of it, and how much of an output is real.
        plan: how the call is padded.
        call: not padded.
        proven: what was proven before; what is proven now is added to it.
        anew: whether to try again what was tried before.

    Raises:
        PaddingLeakError: padding changes something.
        RuntimeError: it does so on another rank only.
    """
    checker = _Checker(shapes, plan, call)
    case = _Case(plan, call)
    neutral = () if anew else proven.neutral
    padded = {pad.leaf for pad in plan.pads}
    undeclared = [
        each
        for each in plan.inputs
        if not each.declared and each.index in padded and each.label not in neutral
    ]
    first, failure = _First(None, None, suspicious=False), None
    try:
        first = checker.first(case, undeclared)
    except Exception as error:  # noqa: BLE001 - it has to wait for the other ranks
        failure = error
    leaks, depends, suspicious, failed = checker.agreed(
        first.leak is not None,
        first.dependence is not None,
        first.suspicious,
        failure is not None,
    )
    if failure is not None:
        raise failure
    if failed:
        raise checker.elsewhere()
    if leaks:
        checker.confirm(case, first.leak)
    if depends or anew or not proven.tried:
        if checker.try_other_values(case, undeclared, first.dependence, depends=depends):
            proven.tried = True
        if depends:
            proven.neutral = proven.neutral.union(checker.relying(case, undeclared))
    if suspicious:
        plan = checker.with_more_padding(case)
    proven.add(plan)


class _Checker:
    """Makes the runs of one check."""

    def __init__(self, shapes: OutputShapes, plan: Plan, call: Call) -> None:
        self._shapes = shapes
        self._spec = shapes.spec
        self._group = shapes.spec.options["group"]
        self._modules = all_reachable_modules(shapes.function, (*call.owner, *call.arguments))
        # ``self`` may be a dataclass of tensors.
        owned = key_paths(flatten(call.owner)[1]) if call.owner else []
        labels = [*plan.labels, *(keystr("self", path[1:], call.owner[0]) for path in owned)]
        self._names = dict(enumerate(labels))

    def agreed(self, *found: bool) -> list[bool]:
        """Return what any rank has found."""
        if self._group is None:
            return list(found)
        numbers = [int(each) for each in found]
        return [bool(each) for each in largest_of_all_ranks(self._group, numbers)]

    def elsewhere(self) -> RuntimeError:
        """Return the error for what another rank has found."""
        return RuntimeError(
            f"bucketed: the check of {self._shapes.name} has failed on another rank; its own error "
            "says why"
        )

    # ---- what is tried ----

    def first(self, case: _Case, inputs: Sequence[Input]) -> _First:
        """Run the call without padding, padded, and padded with other values, above and below."""
        fills = [other_fills(inputs, case.call, largest=largest) for largest in (True, False)]
        with self._turn(case, 0) as (runs, _):
            without, padded = runs.both()
            leak = self._compare(case, without, padded)
            del without
            dependence, strain = None, leak.strain - _ROUNDING
            for index, other in enumerate(fills):
                if self._group is None and (not other or other in fills[:index]):
                    continue
                found = self._other(case, runs, padded, other)
                dependence = dependence or found.error
                strain = max(strain, found.strain)
        return _First(leak.error, dependence, suspicious=strain > 0)

    def try_other_values(
        self,
        case: _Case,
        inputs: Sequence[Input],
        dependence: PaddingLeakError | None,
        *,
        depends: bool,
    ) -> bool:
        """Try whether padding with 0 is neutral for other data, too; return whether any was tried.

        Raises:
            PaddingLeakError: it is not, or it could not be shown.
        """
        tried = False
        for values in OTHER_VALUES if depends else OTHER_VALUES[:_SIGNS]:
            other = values.made(inputs, case.call)
            if other is None and self._group is None:
                continue
            labels = tuple(each.label for each in inputs)
            tried |= self._try(_Case(case.plan, other or case.call, values.description, labels))
        (tried,) = self.agreed(tried)
        if depends and not tried:
            raise dependence or self.elsewhere()
        return tried

    def _try(self, case: _Case) -> bool:
        """Compare one more call with and without padding; return whether it could be run."""
        leak, ran_through = None, True
        try:
            leak, _ = self._pair(case, 0)
        except Exception:  # noqa: BLE001 - the function does not take such data
            ran_through = False
        if any(self.agreed(leak is not None)):
            self.confirm(case, leak)
        return ran_through

    def relying(self, case: _Case, inputs: Sequence[Input]) -> list[str]:
        """Return the labels of the inputs whose padding the answer depends on."""
        labels = [each.label for each in inputs]
        if self._group is not None or len(labels) == 1:
            return labels
        found = []
        for each in inputs:
            fills = [other_fills([each], case.call, largest=largest) for largest in (True, False)]
            with self._turn(case, 0) as (runs, _):
                padded = runs.padded()
                if any(fill and self._other(case, runs, padded, fill).error for fill in fills):
                    found.append(each.label)
        return found or labels

    def with_more_padding(self, case: _Case) -> Plan:
        """Compare with the inputs cut short; return the plan that says how short.

        Raises:
            PaddingLeakError: then padding changes something.
        """
        shorter = shortened(self._spec, case.plan, case.call)
        if shorter is None and self._group is None:
            return case.plan
        plan, call = shorter or (case.plan, case.call)
        return plan if self._try(_Case(plan, call, short=True)) else case.plan

    def confirm(self, case: _Case, leak: PaddingLeakError | None) -> None:
        """Raise a leak if it is there with perturbed weights as well.

        All ranks take as many turns as the one that takes most.

        Raises:
            PaddingLeakError: it is there.
            RuntimeError: it is there on another rank only.
        """
        found = leak is not None
        for turn in range(1, _TURNS):
            with contextlib.suppress(Exception):  # a turn that can't be taken excuses nothing
                error, is_new = self._pair(case, turn)
                # Equal runs of the same numbers as in the first turn excuse nothing either.
                found &= error is not None or not is_new
            if not any(self.agreed(found)):
                return
        if leak is not None and found:
            raise leak
        raise self.elsewhere()

    # ---- the runs ----

    def _pair(self, case: _Case, turn: int) -> tuple[PaddingLeakError | None, bool]:
        """Run without padding and padded; from the second turn on with perturbed weights.

        Returns:
            The leak, and whether any number is other than in the first turn.
        """
        with self._turn(case, turn) as (runs, is_new):
            without, padded = runs.both()
        return self._compare(case, without, padded).error, is_new

    @contextlib.contextmanager
    def _turn(self, case: _Case, turn: int) -> Iterator[tuple[_Runs, bool]]:
        """Yield what runs the function, and whether any number is other than in the first turn."""
        runs = _Runs(self._shapes, case, self._modules, self._names)
        with COMPILING, uncompiled(), contextlib.ExitStack() as scope:
            is_new = turn == 0
            if turn > 0:
                call, is_new = _with_perturbed_inputs(case.call, turn)
                runs.case = replace(case, call=call)
                held = (p for module in self._modules for p in module.parameters(recurse=False))
                weights = [*held, *runs.padded(None).outcome.parameters]
                is_new |= scope.enter_context(perturbed(weights, turn))
            yield runs, is_new

    def _compare(
        self, case: _Case, expected: Run, got: Run, *, fills: Fills | None = None
    ) -> _Leak:
        verdict = judge(expected.outcome, got.outcome, PADDING)
        if verdict.equal:
            return _Leak(None, verdict.strain)
        plan = case.plan
        what = sizes_of(plan)
        if fills is not None:
            what += f"; with another value in the padding of {_labels(plan, fills)}"
        elif case.short:
            what += "; inputs cut short, to see what a small difference becomes with more padding"
        elif case.others:
            what += f"; with other data, where {' and '.join(case.others)} {case.description}"
        labels = {*plan.extras, *(each.label for each in plan.inputs)}
        masked = [name for name in self._spec.masks if name in labels]
        context = Context(what, self._shapes.name, self._modules, masked, case.others)
        error = leak_error(verdict.differences[0], expected, got, context)
        return _Leak(error, math.inf)

    def _other(self, case: _Case, runs: _Runs, padded: Run, fills: Fills) -> _Leak:
        """Compare a padded run with one that has other values in the padding."""
        try:
            return self._compare(case, padded, runs.padded(fills), fills=fills)
        except Exception as error:  # noqa: BLE001 - then it matters what the padding holds
            message = (
                f"bucketed: {self._shapes.name} fails with another value than 0 in the padding of "
                f"{_labels(case.plan, fills)} ({sizes_of(case.plan)}): {type(error).__name__}: "
                f"{error}"
            )
            return _Leak(PaddingLeakError(message), _ROUNDING)


class _Runs:
    """Runs one case, padded or not.

    Args:
        shapes: as of :class:`_Checker`.
        case: what to run.
        modules: those the function may change.
        names: what to call the leaves of the call, and then those of ``self``.
    """

    def __init__(
        self,
        shapes: OutputShapes,
        case: _Case,
        modules: Sequence[torch.nn.Module],
        names: Mapping[int, str],
    ) -> None:
        self.case = case
        self._shapes = shapes
        self._spec = shapes.spec
        self._modules = modules
        self._names = names
        self._narrows: Mapping[int, Any] = {}

    def both(self) -> tuple[Run, Run]:
        """Run without padding and padded."""
        if any(each.label in self._spec.masks for each in self.case.plan.inputs):
            # What counts of an output is known once one was sliced.
            padded = self.padded()
            return self.padded(None), padded
        return self.padded(None), self.padded()

    def padded(self, fills: Fills | None = {}) -> Run:  # noqa: B006 - it is not changed
        """Run with padding, where ``fills`` replaces what it holds; without, if that is None."""
        plan, call = self.case.plan, self.case.call
        # Of other data only the padding is in question. Some functions do something else with a
        # mask, even one in which all is real, than without: for transformers position_ids without
        # a mask that do not count up are several packed sequences.
        extras = plan.extras
        if fills is None and extras:
            extras = real_extras(self._spec, plan, with_masks=bool(self.case.others))
        owned = flatten(call.owner)[0] if call.owner else []
        found: list[Output] = []

        def read(whole: Any) -> tuple[Any, list[Compared]]:
            if fills is not None:
                real = slice_output(plan, whole)
                if real is UNKNOWN:
                    # This may run the function on tensors without data.
                    self._shapes.learn(plan, whole, call)
                    real = slice_output(plan, whole)
                if self._spec.masks:
                    self._narrows = self._shapes.narrows(plan, whole)
                whole = real
            output = Output.of(whole)
            found.append(output)
            if self._spec.masks:
                return output.paths, self._counted(output.leaves)
            return output.paths, [Compared(leaf) for leaf in output.leaves]

        outcome = run_undoing_mutations(
            self._shapes.function,
            [*call.leaves, *owned],
            prepare=functools.partial(given_by, plan, call, extras, fills),
            read=read,
            names=self._names,
            modules=self._modules,
            held=lambda: reachable_tensors(self._shapes.function, (*call.owner, *call.arguments)),
        )
        lost = [each.label for each in plan.inputs if each.index in outcome.mutated]
        if lost:
            raise ValueError(
                f"bucketed: the function writes to its input {lost[0]}; what it gets is a padded "
                "copy, so the write would be lost: return the new value instead"
            )
        return Run(found[0], outcome)

    def _counted(self, leaves: Sequence[Any]) -> list[Compared]:
        """Pair each leaf with the elements that count by the caller's masks."""
        plan, call = self.case.plan, self.case.call
        masks = given_masks(self._spec.masks, plan.inputs, call.leaves)
        counts = {
            index: counting(masks, plan.sizes, leaves[index], narrows)
            for index, narrows in self._narrows.items()
            if isinstance(leaves[index], torch.Tensor)
        }
        return [Compared(leaf, counts.get(index)) for index, leaf in enumerate(leaves)]


def _with_perturbed_inputs(call: Call, seed: int) -> tuple[Call, bool]:
    """Return the call with perturbed values in what requires a gradient, and if any changed."""
    new: dict[int, Any] = {}
    changed = False
    for index, leaf in enumerate(call.leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            copy = leaf.detach().clone()
            perturb_(copy, seed)
            changed |= not torch.equal(copy, leaf)
            new[index] = copy.requires_grad_()
    return call.with_leaves(new), changed


def _labels(plan: Plan, fills: Fills) -> str:
    return ", ".join(each.label for each in plan.inputs if each.index in fills)
