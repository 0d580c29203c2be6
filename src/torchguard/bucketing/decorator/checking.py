"""Check one call: the padded answer has to be the real one.

What is to be shown: the real part of the output, the gradients and the buffers do not depend on
how much padding there is, nor on what it holds; or they rely on 0 in it, and 0 is neutral.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from torchguard.bucketing.decorator.comparing import Verdict, Wording, compared
from torchguard.bucketing.decorator.compile import COMPILING
from torchguard.bucketing.decorator.cutting import Cutter
from torchguard.bucketing.decorator.other_inputs import (
    OTHER_VALUES,
    Fills,
    counting,
    given_masks,
    other_fills,
    shortened,
)
from torchguard.bucketing.decorator.plans import Input, Plan, told
from torchguard.bucketing.decorator.proven import Proven
from torchguard.bucketing.decorator.trees import Path
from torchguard.bucketing.decorator.verification import Arguments, Run, ran, with_other_last_digits
from torchguard.equivalence.collective import largest_of_all_ranks
from torchguard.equivalence.isolate import uncompiled
from torchguard.equivalence.perturb import perturbed
from torchguard.equivalence.reachable import all_reachable_modules
from torchguard.errors import PaddingLeakError

__all__ = ["check"]

_TURNS = 4
"""How often a leak has to be seen. A right function that jumps looks like one now and then."""

_ROUNDING = 1 / 16
"""Above this share of what is allowed, a difference may be the beginning of a leak."""

_SIGNS = 2
"""So many of OTHER_VALUES are tried on every function, the others on those that rely on 0."""


class _NothingElse(Exception):  # noqa: N818 - it is an answer, not an error
    """There are no other last digits to check with."""


@dataclass(frozen=True)
class _Case:
    """A call to compare with and without padding."""

    plan: Plan
    given: Arguments
    said: str = ""
    """How its data differs from the caller's."""
    others: tuple[str, ...] = ()
    """The inputs that have other data than the caller's."""
    short: bool = False
    """Whether the caller's inputs are cut short."""


class _First(NamedTuple):
    """What the runs of the call itself have found, before anything is confirmed."""

    leak: PaddingLeakError | None
    dependence: PaddingLeakError | None
    """Of the answer on what the padding holds."""
    suspicious: bool
    """Whether there is a difference that more padding might make larger."""


def check(
    cutter: Cutter,
    plan: Plan,
    owner: tuple[Any, ...],
    given: Arguments,
    proven: Proven,
    *,
    anew: bool = False,
) -> None:
    """Raise unless padding leaves the answer, the gradients and the buffers as they are.

    All ranks of a group make the same runs: what decides about the next ones is agreed on.

    Args:
        cutter: knows what runs and what it is given, and cuts what it returns.
        plan: how.
        owner: what it is given first, ``self``.
        given: the call, not padded.
        proven: what was proven before; what is proven now is added to it.
        anew: whether to try again what was tried before.

    Raises:
        PaddingLeakError: padding changes something.
        RuntimeError: it does so on another rank only.
    """
    checker = _Checker(
        cutter, owner, all_reachable_modules(cutter.source.function, (*owner, *given.args))
    )
    case = _Case(plan, given)
    neutral = () if anew else proven.neutral(plan)
    open_inputs = [
        each
        for each in plan.inputs
        if not each.declared
        and each.shape != each.padded(plan.buckets)
        and each.label not in neutral
    ]
    first, failure = _First(None, None, suspicious=False), None
    try:
        first = checker.first(case, open_inputs)
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
    if depends or anew or not proven.tried(plan):
        if checker.try_other_values(case, open_inputs, first.dependence, depends=depends):
            proven.add_tried(plan)
        if depends:
            proven.add_neutral(plan, checker.relying(case, open_inputs))
    if suspicious:
        plan = checker.with_more_padding(case)
    proven.add(plan)


class _Checker:
    """Makes the runs of one check.

    Args:
        cutter: as of :func:`check`.
        owner: likewise.
        modules: those the function may change.
    """

    def __init__(
        self, cutter: Cutter, owner: tuple[Any, ...], modules: list[torch.nn.Module]
    ) -> None:
        self._cutter = cutter
        self._modules = modules
        self._planner = cutter.planner
        self._owner = owner
        self._group = cutter.planner.options.group

    def agreed(self, *found: bool) -> list[bool]:
        """Return what any rank has found."""
        if self._group is None:
            return list(found)
        numbers = [int(each) for each in found]
        return [bool(each) for each in largest_of_all_ranks(self._group, numbers)]

    def elsewhere(self) -> RuntimeError:
        """Return the error for what another rank has found."""
        return RuntimeError(
            f"bucketed: the check of {self._cutter.name} has failed on another rank; its own error "
            "says why"
        )

    # ---- what is tried ----

    def first(self, case: _Case, inputs: Sequence[Input]) -> _First:
        """Run the call without padding, padded, and padded with other values, above and below."""
        fills = [other_fills(inputs, case.given, largest=largest) for largest in (True, False)]
        with self._turn(case, 0) as (once, _):
            without, padded = self._both(case, once)
            leak = self._compare(case, without, padded)
            del without
            dependence, strain = None, leak.strain - _ROUNDING
            for index, other in enumerate(fills):
                if self._group is None and (not other or other in fills[:index]):
                    continue
                verdict = self._other(case, once, padded, other)
                dependence = dependence or verdict.error
                strain = max(strain, verdict.strain)
        return _First(leak.error, dependence, suspicious=strain > 0)

    def try_other_values(
        self,
        case: _Case,
        inputs: Sequence[Input],
        dependence: PaddingLeakError | None,
        *,
        depends: bool,
    ) -> bool:
        """Look whether padding with 0 is neutral for other data, too; return whether any was tried.

        Raises:
            PaddingLeakError: it is not, or it could not be shown.
        """
        tried = False
        for values in OTHER_VALUES if depends else OTHER_VALUES[:_SIGNS]:
            other = values.made(inputs, case.given, negative_if_some_are=not depends)
            if other is None and self._group is None:
                continue
            labels = tuple(each.label for each in inputs)
            other_case = _Case(case.plan, other or case.given, values.said, labels)
            tried |= self._try(other_case)
        (tried,) = self.agreed(tried)
        if depends and not tried:
            raise dependence or self.elsewhere()
        return tried

    def _try(self, case: _Case) -> bool:
        """Compare one more call with and without padding; return whether it could be run."""
        leak, ran_through = None, True
        try:
            leak = self._pair(case, 0)
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
            fills = [other_fills([each], case.given, largest=largest) for largest in (True, False)]
            with self._turn(case, 0) as (once, _):
                padded = once({})
                if any(fill and self._other(case, once, padded, fill).error for fill in fills):
                    found.append(each.label)
        return found or labels

    def with_more_padding(self, case: _Case) -> Plan:
        """Compare with the inputs cut short; return the plan that says how short.

        Raises:
            PaddingLeakError: then padding changes something.
        """
        shorter = shortened(self._planner, case.plan, case.given)
        if shorter is None and self._group is None:
            return case.plan
        plan, given = shorter or (case.plan, case.given)
        short = _Case(plan, given, short=True)
        leak, ran_through = None, True
        try:
            leak = self._pair(short, 0)
        except Exception:  # noqa: BLE001 - the function does not take such short inputs
            ran_through = False
        if any(self.agreed(leak is not None)):
            self.confirm(short, leak)
        return plan if ran_through else case.plan

    def confirm(self, case: _Case, leak: PaddingLeakError | None) -> None:
        """Raise a leak if it is there with other last digits in the weights as well.

        All ranks take as many turns as the one that takes most.

        Raises:
            PaddingLeakError: it is there.
            RuntimeError: it is there on another rank only.
        """
        found = leak is not None
        for turn in range(1, _TURNS):
            with contextlib.suppress(Exception):  # a turn that can't be taken excuses nothing
                found &= self._pair(case, turn) is not None
            if not any(self.agreed(found)):
                return
        if leak is not None and found:
            raise leak
        raise self.elsewhere()

    # ---- the runs ----

    def _pair(self, case: _Case, turn: int) -> PaddingLeakError | None:
        """Run without padding and padded; from the second turn on with other last digits.

        Raises:
            _NothingElse: nothing differs, and nothing was other than in the first turn.
        """
        with self._turn(case, turn) as (once, is_new):
            without, padded = self._both(case, once)
        error = self._compare(case, without, padded).error
        if error is None and not is_new:
            raise _NothingElse
        return error

    def _both(self, case: _Case, once: Any) -> tuple[Run, Run]:
        if any(each.label in self._planner.masks for each in case.plan.inputs):
            # What counts of an output is known once it was cut.
            padded = once({})
            return once(None), padded
        return once(None), once({})

    @contextlib.contextmanager
    def _turn(self, case: _Case, turn: int) -> Iterator[tuple[Any, bool]]:
        """Yield what runs the function, and whether anything is other than in the first turn."""
        with COMPILING, uncompiled(), contextlib.ExitStack() as scope:
            is_new = turn == 0
            if turn > 0:
                given, is_new = with_other_last_digits(case.given, turn)
                case = replace(case, given=given)
                held = (p for module in self._modules for p in module.parameters(recurse=False))
                weights = [*held, *self._run(case, {}, None).outcome.parameters]
                is_new |= scope.enter_context(perturbed(weights, turn))
            yield functools.partial(self._run, case, {}), is_new

    def _run(self, case: _Case, cuts: dict[Path, Any], fills: Fills | None) -> Run:
        """Run the function; not padded where ``fills`` is None.

        Args:
            case: what to run it on.
            cuts: of outputs, from a padded run that came before; written by one.
            fills: other values for the padding.
        """
        owner, plan = self._owner, case.plan
        args, kwargs = case.given
        before = len(owner)

        def prepare(given: Arguments) -> Arguments:
            real = given.args[before:]
            if fills is None:
                # Of other data only the padding is in question. Some functions do something else
                # with a mask, even one in which all is real, than without: for transformers
                # position_ids without a mask that do not count up are several packed sequences.
                with_masks = bool(case.others)
                changed, named = self._planner.unpadded(
                    plan, real, given.kwargs, with_masks=with_masks
                )
            else:
                changed, named = self._planner.padded(plan, real, given.kwargs, fills)
            return Arguments((*owner, *changed), named)

        def cut(output: Any) -> tuple[Any, dict[Path, torch.Tensor]]:
            if fills is not None:
                whole = output
                output = self._cutter.cut(plan, whole, owner, args, kwargs)
                cuts.update(self._cutter.cuts(plan, whole))
            return output, self._counting(case, output, cuts)

        return ran(
            self._cutter.source.function,
            Arguments((*owner, *args), kwargs),
            prepare=prepare,
            cut=cut,
            names={each.path_in(before): each.label for each in plan.inputs},
            modules=self._modules,
        )

    def _counting(
        self, case: _Case, output: Any, cuts: dict[Path, Any]
    ) -> dict[Path, torch.Tensor]:
        masks = given_masks(self._planner, case.plan, case.given)
        found: dict[Path, torch.Tensor] = {}
        if not masks:
            return found
        for path, value in Arguments((output,), {}).leaves():
            here = path[2:]
            if here in cuts and isinstance(value, torch.Tensor):
                counts = counting(masks, case.plan, value, cuts[here])
                if counts is not None:
                    found[here] = counts
        return found

    def _compare(
        self, case: _Case, expected: Run, got: Run, *, fills: Fills | None = None
    ) -> Verdict:
        plan = case.plan
        what = told(plan)
        if fills is not None:
            what += f"; with another value in the padding of {_labels(plan, fills)}"
        elif case.short:
            what += "; inputs cut short, to see what a small difference becomes with more padding"
        elif case.others:
            what += f"; with other data, where {' and '.join(case.others)} {case.said}"
        labels = {*plan.extras, *(each.label for each in plan.inputs)}
        masked = tuple(name for name in self._planner.masks if name in labels)
        said = Wording(what, self._cutter.name, self._modules, masked, case.others)
        return compared(expected, got, said)

    def _other(self, case: _Case, once: Any, padded: Run, fills: Fills) -> Verdict:
        """Compare a padded run with one that has other values in the padding."""
        try:
            return self._compare(case, padded, once(fills), fills=fills)
        except Exception as error:  # noqa: BLE001 - then it matters what the padding holds
            message = (
                f"bucketed: {self._cutter.name} fails with another value than 0 in the padding of "
                f"{_labels(case.plan, fills)} ({told(case.plan)}): {type(error).__name__}: {error}"
            )
            return Verdict(PaddingLeakError(message), _ROUNDING)


def _labels(plan: Plan, fills: Fills) -> str:
    return ", ".join(each.label for each in plan.inputs if (each.place, each.path) in fills)
