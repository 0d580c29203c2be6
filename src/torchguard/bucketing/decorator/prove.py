"""Check one call: the padded answer has to be the real one.

What is to be shown: the real part of the output, the gradients and the buffers do not depend on
how much padding there is, nor on what it holds; or they rely on 0 in it, and 0 is neutral.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from torchguard._pytree import flatten, key_paths, keystr, reachable_tensors
from torchguard.bucketing.decorator.bucket import Call, Input, Known, Plan, given_by
from torchguard.bucketing.decorator.explain import Case, FirstDifference, Leak, leak_of
from torchguard.bucketing.decorator.masking import Real, given_masks, make_extras, real_extras
from torchguard.bucketing.decorator.other_data import (
    COMPARING,
    STEPS,
    battery,
    may_be_probabilities,
    note_compared,
    shortened,
)
from torchguard.bucketing.decorator.output_shapes import OutputShapes
from torchguard.equivalence.collective import largest_of_all_ranks
from torchguard.equivalence.compare import PADDING, Verdict, judge
from torchguard.equivalence.isolate import isolated, run_undoing_mutations
from torchguard.equivalence.outcome import Outcome
from torchguard.equivalence.perturb import perturbed
from torchguard.errors import PaddingLeakError

Fills = dict[int, Any]
"""What padding holds, by index of the leaf."""

_TURNS = 4
"""How often a leak has to be seen. A discontinuous function that is right may look like one."""

_ROUNDING = 1 / 16
"""Above this share of what is allowed, a difference may be the beginning of a leak."""


class _First(NamedTuple):
    """What the runs of the call itself have found, before anything is confirmed."""

    leak: Leak | None = None
    dependence: Leak | None = None
    """How the answer depends on what the padding holds."""
    suspicious: bool = False
    """Whether there is a difference that more padding might make larger."""
    operators: frozenset[str] = frozenset()


def check_padding(
    shapes: OutputShapes, plan: Plan, call: Call, known: Known, *, anew: bool
) -> None:
    """Raise unless padding leaves the answer, the gradients and the buffers as they are.

    All ranks of a group make the same runs: what decides about the next ones is agreed on. Compiled
    functions inside have to run eagerly: the caller says so, with ``uncompiled()``.
    """
    # Meta and fake tensors have no numbers to compare, and prove nothing.
    if any(call.leaves[each.index].untyped_storage().device.type == "meta" for each in plan.inputs):
        return
    checker = _Checker(shapes, plan, call, () if anew else known.neutral)
    case = Case(plan, call)
    first, failure = _First(), None
    try:
        first = checker.first(case)
    except Exception as error:  # noqa: BLE001 - it has to wait for the other ranks
        failure = error
    found = (first.leak is not None, first.dependence is not None, first.suspicious)
    leaks, depends, suspicious, failed = checker.agreed(*found, failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise checker.elsewhere()
    if leaks:
        checker.confirm(case, first.leak)
    # Other data is tried once for all buckets: it is the function that is in question, not a size.
    if depends or anew or not known.tried:
        if checker.try_other_data(case, first, depends=depends):
            known.tried = True
        if depends:
            known.neutral = known.neutral.union(checker.relying(case))
    if suspicious:
        plan = checker.with_more_padding(case)
    plan.bucket.add_proof(plan)


def _other_fill(tensor: torch.Tensor, *, largest: bool) -> Any:
    """Return a value other than 0 for the padding of an input; None if there is none to try.

    It is above all data, or below.
    """
    if tensor.numel() == 0 or tensor.dtype == torch.bool or tensor.dtype.is_complex:
        return None
    if tensor.dtype.is_floating_point:
        finite = tensor.detach()[tensor.detach().isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        if not tensor.is_cpu and may_be_probabilities(tensor):
            return 1.0 if largest else None
        value = 1.0 + 2.0 * scale
        if value >= torch.finfo(tensor.dtype).max:
            return None
        return value if largest else -value
    # Numbers of tokens: only those that are there are known to be valid.
    other = tensor[tensor != 0]
    if not other.numel():
        return None
    return int(other.max() if largest else other.min())


class _Checker:
    """Makes the runs of one check; ``neutral`` are the inputs that 0 is known to be neutral for."""

    def __init__(
        self, shapes: OutputShapes, plan: Plan, call: Call, neutral: Container[str]
    ) -> None:
        padded = dict(plan.pads)
        self._inputs = [
            each
            for each in plan.inputs
            if each.fill is None and each.index in padded and each.label not in neutral
        ]
        """The inputs whose padding gets other values."""
        self._shapes = shapes
        self._spec = shapes.spec
        self._group = shapes.spec.options["group"]
        self._modules = call.modules(shapes.function)
        # ``self`` may be a dataclass of tensors.
        owned = key_paths(flatten(call.owner)[1]) if call.owner else []
        labels = [*call.labels(), *(keystr("self", path[1:], call.owner[0]) for path in owned)]
        self._names = dict(enumerate(labels))
        # With a mask of the caller the padded run is first: slicing it shows which elements count.
        masked = any(each.label in self._spec.masks for each in plan.inputs)
        self._pair_of_runs: list[Fills | None] = [{}, None] if masked else [None, {}]
        """The runs without padding and padded, as :meth:`_runs` takes them."""
        self._compared: set[int] = set()
        """The integers that the function compares its integers with."""

    def agreed(self, *found: bool) -> list[bool]:
        """Return what any rank has found."""
        if self._group is None:
            return list(found)
        return [bool(each) for each in largest_of_all_ranks(self._group, [*map(int, found)])]

    def elsewhere(self) -> RuntimeError:
        """Return the error for what another rank has found."""
        return RuntimeError(
            f"bucketed: the check of {self._shapes.name} has failed on another rank; its own error "
            "says why"
        )

    # ---- what is tried ----

    def first(self, case: Case) -> _First:
        """Run the call without padding, padded, and padded with other values, above and below."""
        variants = self._other_fills(case, self._inputs)
        runs = self._runs(case, [*self._pair_of_runs, *variants])
        without, padded = self._both(runs)
        verdict, leak = self._compare(case, without, padded, {})
        suspicious = not verdict.equal or verdict.strain > _ROUNDING
        del without  # a run may hold a gradient of every weight
        dependence = None
        for fills in variants:
            other = next(runs)
            verdict, found = self._compare(case, padded, other, fills)
            dependence = dependence or found
            suspicious |= not verdict.equal or verdict.strain > 0
            del other
        return _First(leak, dependence, suspicious, padded.operators)

    def try_other_data(self, case: Case, first: _First, *, depends: bool) -> bool:
        """Try whether 0 in the padding is neutral for other data; return whether any was tried."""
        tried = False
        names = {name.rpartition("::")[2].rstrip("_") for name in first.operators}
        steps, compares = self.agreed(bool(STEPS & names), bool(self._compared))
        # A copy: the runs go on noting what they compare.
        compared = set(self._compared) if compares else None
        masked = bool(self._spec.masks)
        labels = tuple(each.label for each in self._inputs)
        for data in battery(depends=depends, steps=steps, masked=masked, compared=compared):
            other = data.made(self._inputs, case.call)
            if other is not None or self._group is not None:  # all ranks make as many runs
                tried |= self._try(Case(case.plan, other or case.call, data.description, labels))
        (tried,) = self.agreed(tried)
        if depends and not tried:
            if first.dependence is None:
                raise self.elsewhere()
            raise self.explained(case, first.dependence)
        return tried

    def _try(self, case: Case) -> bool:
        """Compare one more call with and without padding; return whether it could be run."""
        leak, ran_through = None, True
        try:
            leak, _ = self._pair(case, 0)
        except Exception:  # noqa: BLE001 - the function does not take such data
            ran_through = False
        if any(self.agreed(leak is not None)):
            self.confirm(case, leak)
        return ran_through

    def relying(self, case: Case) -> list[str]:
        """Return the labels of the inputs whose padding the answer depends on."""
        labels = [each.label for each in self._inputs]
        # Each rank might find other inputs, and would make another number of runs.
        if self._group is not None or len(labels) == 1:
            return labels
        found = []
        for each in self._inputs:
            variants = self._other_fills(case, [each])
            runs = self._runs(case, [{}, *variants])
            padded = next(runs)
            if any(not judge(padded, next(runs), PADDING).equal for _ in variants):
                found.append(each.label)
        return found or labels

    def with_more_padding(self, case: Case) -> Plan:
        """Compare with the inputs cut short; return the plan that says how short."""
        shorter = shortened(self._spec, case.plan, case.call)
        if shorter is None and self._group is None:
            return case.plan
        # Another rank may be able to.
        plan, call = shorter or (case.plan, case.call)
        return plan if self._try(Case(plan, call, short=True)) else case.plan

    def confirm(self, case: Case, leak: Leak | None) -> None:
        """Raise a leak if it is there with perturbed weights as well.

        All ranks take as many turns as the one that takes most.
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
            raise self.explained(case, leak)
        raise self.elsewhere()

    # ---- the runs ----

    def _pair(self, case: Case, turn: int) -> tuple[Leak | None, bool]:
        """Run without padding and padded; from the second turn on with perturbed weights."""
        is_new = turn == 0
        with contextlib.ExitStack() as scope:
            if turn > 0:
                # A discontinuous function, such as argmax, does not differ again: see perturb.py.
                call, is_new = case.call.perturbed(turn)
                case = replace(case, call=call)
                held = (p for module in self._modules for p in module.parameters(recurse=False))
                (without,) = self._runs(case, [None])
                is_new |= scope.enter_context(perturbed([*held, *without.parameters], turn))
            without, padded = self._both(self._runs(case, self._pair_of_runs))
        _, leak = self._compare(case, without, padded, {})
        return leak, is_new

    def _compare(
        self, case: Case, expected: Outcome, got: Outcome, fills: Fills
    ) -> tuple[Verdict, Leak | None]:
        verdict = judge(expected, got, PADDING)
        if verdict.equal:
            return verdict, None
        return verdict, leak_of(self._shapes, case, verdict, expected, got, fills)

    def _other_fills(self, case: Case, inputs: Sequence[Input]) -> list[Fills]:
        """Return what else to put into the padding of these inputs: above all data, and below."""
        above, below = (
            {
                each.index: fill
                for each in inputs
                if (fill := _other_fill(case.call.leaves[each.index], largest=largest)) is not None
            }
            for largest in (True, False)
        )
        if self._group is not None:
            return [above, below]  # every rank makes as many runs
        return [fills for fills in ([above] if above == below else [above, below]) if fills]

    def _both(self, runs: Iterator[Outcome]) -> tuple[Outcome, Outcome]:
        """Return the next two runs, the one without padding first."""
        one, two = next(runs), next(runs)
        return (one, two) if self._pair_of_runs[0] is None else (two, one)

    def _runs(
        self,
        case: Case,
        variants: Iterable[Fills | None],
        watch: FirstDifference | None = None,
    ) -> Iterator[Outcome]:
        """Run the function once for each variant, when the next one is asked for.

        A variant says what the padding holds in place of what is declared, and is None for a run
        without padding. Where it holds something else, what the function raises is in the outcome.
        """
        plan, call, shapes = case.plan, case.call, self._shapes
        masks: list[Real] = []
        if self._spec.masks:
            masks = given_masks(self._spec.masks, plan.inputs, call.leaves)
        read = functools.partial(shapes.real_output, plan, call, masks, {})
        # Of other data only the padding is in question. Some functions do something else with a
        # mask, even one in which all is real, than without: for transformers position_ids
        # without a mask that do not count up are several packed sequences.
        real: dict[str, torch.Tensor] = {}
        if plan.extras:
            # Nor could two runs be compared operator by operator.
            with_masks = bool(case.changed) or watch is not None
            real = real_extras(self._spec, plan, with_masks=with_masks)
        function = shapes.function if watch is None else watch.around(shapes.function)
        # Before any run: to the function its arguments are memory from outside, so that its writes
        # to them are seen. A fill may be a function of the user's, and draw random numbers.
        with isolated():
            bound = [
                (fills, given_by(plan, call, real if fills is None else plan.extras, fills))
                for fills in variants
            ]
        observers = dict.fromkeys(COMPARING, functools.partial(note_compared, self._compared))
        while bound:
            fills, given = bound.pop(0)
            try:
                outcome = run_undoing_mutations(
                    function,
                    given,
                    read=functools.partial(read, padded=fills is not None),
                    names=self._names,
                    modules=self._modules,
                    observers=observers,
                    held=lambda: reachable_tensors(shapes.function, (*call.owner, *call.arguments)),
                )
                lost = [each.label for each in plan.inputs if each.index in outcome.mutated]
                if lost:
                    raise ValueError(  # noqa: TRY301
                        f"bucketed: the function writes to its input {lost[0]}; what it gets is a "
                        "padded copy, so the write would be lost: return the new value instead"
                    )
            except Exception as error:
                if not fills:
                    raise
                outcome = Outcome(error=error)
            del given
            yield outcome
            del outcome

    def explained(self, case: Case, leak: Leak) -> PaddingLeakError:
        """Return the error, with the first operator that differs, or an inverted mask."""
        if self._group is not None:
            return leak.error()  # the runs of one rank only would wait for the others
        with contextlib.suppress(Exception):
            inverted = self._inverted(case)
            if inverted:
                return PaddingLeakError(f"{leak.text}{inverted}")
            watch = FirstDifference(case.plan)
            for _ in self._runs(case, [{}, leak.fills] if leak.fills else [None, {}], watch):
                pass
            return leak.error(watch.found)
        return leak.error()

    def _inverted(self, case: Case) -> str:
        """Say which mask is right the other way round; empty where none is."""
        plan = case.plan
        swapped: dict[str, Any] = {"real": "padding", "padding": "real"}
        given = {*plan.extras, *(each.label for each in plan.inputs)}
        for name, own in self._spec.masks.items():
            if name not in given or own.kind not in swapped:
                continue
            mask = replace(own, kind=swapped[own.kind])
            spec = replace(self._spec, masks={**self._spec.masks, name: mask})
            inputs = tuple(
                replace(e, fill=mask.fill) if e.label == name else e for e in plan.inputs
            )
            extras = make_extras(spec, case.call, inputs, plan.sizes, plan.buckets)
            again = replace(plan, inputs=inputs, extras=extras, slices={})
            checker = _Checker(self._shapes._replace(spec=spec), again, case.call, ())
            with contextlib.suppress(Exception):
                found = checker.first(replace(case, plan=again))
                if found.leak is None and found.dependence is None:
                    means = "padding" if mask.kind == "padding" else "real data"
                    return (
                        f". With {name} the other way round nothing differs: does True "
                        f"mean {means} there? mask={{{name!r}: {mask.kind!r}}}"
                    )
        return ""
