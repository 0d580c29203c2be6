"""Check one call: the padded answer has to be the real one.

What is to be shown: the real part of the output, the gradients and the buffers do not depend on
how much padding there is, nor on what it holds. A call may arrive with padding, which its mask or
its lengths tell: that is cut, and compared with.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from torchguard._events import record, warn_user
from torchguard._pytree import reachable_tensors
from torchguard.bucketing.decorator.bucket import Call, Case, Input, Plan, sizes_of
from torchguard.bucketing.decorator.explain import FirstDifference, advice, leak_of
from torchguard.bucketing.decorator.masking import (
    Real,
    make_extras,
    real_by_caller,
    real_extras,
    real_window,
)
from torchguard.bucketing.decorator.options import Spec
from torchguard.bucketing.decorator.output_shapes import OutputShapes
from torchguard.equivalence.compare import PADDING, judge
from torchguard.equivalence.isolate import run_undoing_mutations
from torchguard.equivalence.outcome import Outcome
from torchguard.errors import PaddingLeakError

Fills = dict[int, Any]
"""What padding holds in place of what is declared, by index of the leaf."""


def check_padding(shapes: OutputShapes, plan: Plan, call: Call, *, anew: bool) -> bool:
    """Raise unless padding leaves the answer, the gradients and the buffers as they are.

    Returns whether there was any padding. Compiled functions inside have to run eagerly: the
    caller says so, with ``uncompiled()``.
    """
    # Meta and fake tensors have no numbers to compare, and prove nothing.
    if any(call.leaves[i.index].untyped_storage().device.type == "meta" for i in plan.inputs):
        return bool(plan.pads)
    case = _real_part(shapes.spec, plan, call)
    if not case.plan.pads or not all(case.plan.sizes.values()):
        return False  # an empty input has no real part that a run without padding could compute
    try:
        _Checker(shapes, plan, case).check()
    except PaddingLeakError:
        raise
    except Exception as error:
        if plan.pads or anew:
            raise
        # Each call comes at a bucket's size, and the function may take no other.
        warn_user(
            f"bucketed: the padding of {shapes.name} can't be checked, because a call that has "
            f"arrived padded ({sizes_of(case.plan)}) does not run without it: "
            f"{type(error).__name__}: {error}. check_padding='never' says that it is right"
        )
        return True
    plan.bucket.add_proof(case.plan)
    return True


def _real_part(spec: Spec, plan: Plan, call: Call) -> Case:
    """Cut off what is padding already, in every row, by the masks and lengths of the caller."""
    told = real_by_caller(spec, plan.inputs, call) if plan.told else ()
    # What is padded here as well is on the side that was asked for.
    sides = (plan.side,) if plan.pads else (plan.side, "left" if plan.side == "right" else "right")
    found = (real_window(told, plan.sizes, side) for side in sides if told)
    windows: dict[str, tuple[int, int]] = next(filter(None, found), {})
    if not windows:
        return Case(plan, call, {})
    cut: dict[int, Any] = {}
    inputs = []
    for each in plan.inputs:
        leaf = call.leaves[each.index].detach()
        for dim, axis in each.axes:
            leaf = leaf.narrow(dim, *windows.get(axis, (0, leaf.shape[dim])))
        cut[each.index] = leaf.contiguous().requires_grad_(each.requires_grad)
        inputs.append(replace(each, shape=tuple(leaf.shape)))
    shorter = call.with_leaves(cut)
    sizes = {axis: windows.get(axis, (0, size))[1] for axis, size in plan.sizes.items()}
    padded = plan.pad(call.leaves)
    return Case(
        replace(
            plan,
            inputs=tuple(inputs),
            sizes=sizes,
            side="left" if any(start for start, _ in windows.values()) else "right",
            extras=make_extras(spec, shorter, inputs, sizes, plan.buckets),
            slices={},
        ),
        shorter,
        {each.index: padded[each.index].detach() for each in inputs},
    )


def _other_fill(tensor: torch.Tensor, *, largest: bool) -> Any:
    """Return a value other than 0 for the padding of an input; None if there is none to try.

    It is above all data, or below.
    """
    if tensor.numel() == 0 or tensor.dtype == torch.bool or tensor.dtype.is_complex:
        return None
    if tensor.dtype.is_floating_point:
        finite = tensor.detach()[tensor.detach().isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        # Kernels of an accelerator assert 0 <= p <= 1, and another value would end the process.
        if not tensor.is_cpu and bool(((tensor >= 0) & (tensor <= 1)).all()):
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
    """Makes the runs of one check."""

    def __init__(self, shapes: OutputShapes, plan: Plan, case: Case) -> None:
        self._shapes, self._spec = shapes, shapes.spec
        self._plan, self._case = plan, case
        self._pads = dict(case.plan.pads)
        self._modules = case.call.modules(shapes.function)
        self._names = dict(enumerate(case.call.labels()))
        self._told: list[Real] = []
        if self._spec.masks or self._spec.lengths:
            self._told = real_by_caller(self._spec, case.plan.inputs, case.call)

    def check(self) -> None:
        """Run the call without padding, padded, and padded with other values."""
        variants = self._other_fills()
        # The padded run is first if a mask is given: slicing it shows which elements count.
        both: list[Fills | None] = [{}, None] if self._told or self._case.content else [None, {}]
        runs = self._runs([*both, *variants])
        found = {fills is None: next(runs) for fills in both}
        padded = found[False]
        self._compare(found[True], padded, {})
        del found  # a run may hold a gradient of every weight
        for fills in variants:
            self._compare(padded, next(runs), fills)

    def _compare(self, expected: Outcome, got: Outcome, fills: Fills) -> None:
        differences = judge(expected, got, PADDING)
        if not differences:
            return
        text = leak_of(self._shapes, self._case, differences[0], expected, got, fills)
        watch = FirstDifference(self._case.plan)
        if got.error is None:
            with contextlib.suppress(Exception):  # the second time it may raise something
                for _ in self._runs([{}, fills] if fills else [None, {}], watch):
                    pass
        said = advice(self._shapes, self._case, fills)
        record("padding_leak", "bucketed", text)
        raise PaddingLeakError(f"bucketed: {text}{watch.found}{said}")

    def _other_fills(self) -> list[Fills]:
        """Return what else to put into the padding: above all data, and below."""
        given, inputs = self._case.call.leaves, list(self._inputs())
        above, below = (
            {
                each.index: fill
                for each in inputs
                if (fill := _other_fill(given[each.index], largest=largest)) is not None
            }
            for largest in (True, False)
        )
        return [fills for fills in ([above] if above == below else [above, below]) if fills]

    def _inputs(self) -> Iterator[Input]:
        """Yield the inputs whose padding gets other values: no fill is declared, nor has one come.

        What a call has arrived with, other than 0, was put there on purpose: -100 into labels.
        """
        for each in self._case.plan.inputs:
            if each.fill is None and each.index in self._pads:
                content = self._case.content.get(each.index)
                if content is None or not bool(content[~self._case.region(each.index)].any()):
                    yield each

    def _runs(
        self, variants: Iterable[Fills | None], watch: FirstDifference | None = None
    ) -> Iterator[Outcome]:
        """Run the function once for each variant, when the next one is asked for.

        A variant says what the padding holds in place of what is declared, and is None for a run
        without padding. If it holds something else, what the function raises is in the outcome.
        """
        plan, call, shapes = self._case.plan, self._case.call, self._shapes
        read = functools.partial(shapes.real_output, plan, call, self._told, {})
        # Two runs can't be compared operator by operator if one of them has no mask.
        real: dict[str, torch.Tensor] = {}
        if plan.extras:
            real = real_extras(self._spec, plan, with_masks=watch is not None)
        function = shapes.function if watch is None else watch.around(shapes.function)
        # Before any run: to the function its arguments are memory from outside, so that its writes
        # to them are seen.
        bound = [
            (fills, self._case.given(real if fills is None else self._plan.extras, fills))
            for fills in variants
        ]
        lost = {index for index, _ in self._plan.pads}
        while bound:
            fills, given = bound.pop(0)
            try:
                outcome = run_undoing_mutations(
                    function,
                    given,
                    read=functools.partial(read, padded=fills is not None),
                    names=self._names,
                    modules=self._modules,
                    held=lambda: reachable_tensors(shapes.function, (*call.owner, *call.arguments)),
                )
            except Exception as error:
                forgotten = None if fills is None else self._forgotten(error)
                if not fills and forgotten is not None:
                    raise forgotten from error
                if not fills:
                    raise
                outcome = Outcome(error=error)
            written = [e.label for e in plan.inputs if e.index in outcome.mutated & lost]
            if written:
                raise ValueError(
                    f"bucketed: the function writes to its input {written[0]}; what it gets is a "
                    "padded copy, so the write would be lost: return the new value instead"
                )
            del given
            yield outcome
            del outcome

    def _forgotten(self, error: Exception) -> ValueError | None:
        """Return an error that names what ``dims`` may lack: as long as what was padded."""
        plan, call = self._plan, self._case.call
        if isinstance(error, (torch.OutOfMemoryError, PaddingLeakError)) or not plan.pads:
            return None
        named = {(each.index, dim) for each in plan.inputs for dim, _ in each.axes}
        padded = {size: axis for axis, size in plan.sizes.items() if plan.buckets[axis] != size}
        labels = call.labels()
        forgotten = [
            f"dimension {dim} of {labels[index]}, {tuple(leaf.shape)}, with {padded[size]!r}"
            for index, leaf in enumerate(call.leaves)
            if isinstance(leaf, torch.Tensor)
            for dim, size in enumerate(leaf.shape)
            if size in padded and (index, dim) not in named
        ]
        if not forgotten:
            return None
        text = (
            f"bucketed: {self._shapes.name} fails once it is padded, {sizes_of(plan)} "
            f"({type(error).__name__}: {error}). As long, and not padded: {'; '.join(forgotten)}: "
            "name it in dims"
        )
        return ValueError(text)
