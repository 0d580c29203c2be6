"""Prove one call: the padded answer has to be the real one.

What is to be shown: the real part of the output, the gradients and the buffers do not depend on
how much padding there is, nor on what it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchguard.bucketing.decorator.explain import FirstDifference, advice, leak_of
from torchguard.bucketing.decorator.real import Real, extras_without_padding
from torchguard.bucketing.decorator.shape import Input, Shape, region_of
from torchguard.equivalence.compare import PADDING, Difference, judge
from torchguard.equivalence.outcome import Cotangents, Outcome, run_undoing_mutations
from torchguard.equivalence.perturb import not_by_rounding, perturb_all
from torchguard.errors import PaddingLeakError
from torchguard.state.tensors import Elements

Fills = dict[int, Any]
"""What padding holds in place of what is declared, by index of the leaf."""


@dataclass(frozen=True)
class Leak:
    """What padding changes."""

    what: str
    advice: str
    """Where it begins, and what to type."""


def prove(function: Callable[..., Any], shape: Shape, real: Real) -> Leak | None:
    """Run a call without padding, padded, and padded with other values, and compare.

    ``shape`` is that with which the call has come, and ``real`` what is real of it. Compiled
    functions inside have to run eagerly: the caller says so, with ``uncompiled()``.
    """
    variants = _other_fills(real)
    # The padded run is first if a mask is given: slicing it shows which elements count.
    both: list[Fills | None] = [{}, None] if real.told or real.content else [None, {}]
    runs = _runs(function, shape, real, [*both, *variants])
    found = {fills is None: next(runs) for fills in both}
    padded = found[False]
    leak = _compared(function, shape, real, found[True], padded, {})
    del found  # a run may hold a gradient of every weight
    for fills in variants:
        if leak is None:
            leak = _compared(function, shape, real, padded, next(runs), fills)
    return leak


def _compared(  # noqa: PLR0917 - two runs of a call
    function: Callable[..., Any],
    shape: Shape,
    real: Real,
    expected: Outcome,
    got: Outcome,
    fills: Fills,
) -> Leak | None:
    differences: Sequence[Difference] = judge(expected, got, PADDING)
    if differences and all(each.small for each in differences):
        kind: Fills | None = {} if fills else None
        differences = not_by_rounding(
            differences,
            expected,
            got,
            lambda seed: next(_runs(function, shape, real, [kind], seed=seed)),
        )
    if not differences:
        return None
    what = leak_of(real, differences[0], expected, got, fills)
    watch = FirstDifference(real.shape)
    if got.error is None:
        with contextlib.suppress(Exception):  # the second time it may raise something
            for _ in _runs(function, shape, real, [{}, fills] if fills else [None, {}], watch):
                pass
    return Leak(what, watch.found + advice(real, fills))


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


def _other_fills(real: Real) -> list[Fills]:
    """Return what else to put into the padding: above all data, and below."""
    inputs, leaves = list(_undeclared(real)), real.call.leaves
    above, below = (
        {
            each.index: fill
            for each in inputs
            if (fill := _other_fill(leaves[each.index], largest=largest)) is not None
        }
        for largest in (True, False)
    )
    return [fills for fills in ([above] if above == below else [above, below]) if fills]


def _undeclared(real: Real) -> Iterator[Input]:
    """Yield the inputs whose padding gets other values: no fill is declared, nor has one come.

    What a call has arrived with, other than 0, was put there on purpose: -100 into labels.
    """
    for each in real.shape.inputs:
        if each.fill is None and each.index in real.shape.pads:
            content = real.content.get(each.index)
            if content is None:
                yield each
                continue
            region = region_of(real.call.leaves[each.index], real.shape.pads[each.index])
            if not bool(content[~region].any()):
                yield each


def _runs(  # noqa: PLR0917 - one private run
    function: Callable[..., Any],
    shape: Shape,
    real: Real,
    variants: Iterable[Fills | None],
    watch: FirstDifference | None = None,
    seed: int | None = None,
) -> Iterator[Outcome]:
    """Run the function once for each variant, when the next one is asked for.

    A variant says what the padding holds in place of what is declared, and is None for a run
    without padding. If it holds something else, what the function raises is in the outcome.
    A ``seed`` perturbs weights, and copies of arguments, before.
    """
    call, narrows = real.call, {}  # type: ignore[var-annotated]
    if seed is not None:
        copies = {
            place: leaf.detach().clone().requires_grad_(leaf.requires_grad)
            for place, leaf in enumerate(call.leaves)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        }
        call = call.with_leaves(copies)
    run = function if watch is None else watch.around(function)
    # Two runs can't be compared operator by operator if one has no mask.
    own = extras_without_padding(real.spec, real.shape, real.own, with_masks=watch is not None)
    # Before any run: to the function its arguments are memory from outside, so that its writes
    # to them are seen.
    bound = [
        (fills, call.given(own, None, {}, {}))
        if fills is None
        else (fills, call.given(real.extras, real.shape.pads, fills, real.content))
        for fills in variants
    ]
    cotangents = Cotangents(
        names=dict(enumerate(call.labels())),
        modules=call.modules(function),
        held=lambda: call.tensors(function),
        change=None if seed is None else partial(perturb_all, seed),
    )
    while bound:
        fills, given = bound.pop(0)
        try:
            with _perturbed(cotangents.modules, given.leaves, seed):
                read = partial(real.read, narrows, padded=fills is not None)
                outcome = run_undoing_mutations(run, given, cotangents, read)
        except Exception as error:
            if not fills:
                forgotten = None if fills is None else _forgotten(shape, real, error)
                if forgotten is not None:
                    raise forgotten from error
                raise
            outcome = Outcome(error=error)
        lost = outcome.mutated & shape.pads.keys()
        written = [each.label for each in shape.inputs if each.index in lost]
        if written:
            raise ValueError(
                f"bucketed: the function writes to its input {written[0]}; what it gets is a "
                "padded copy, so the write would be lost: return the new value instead"
            )
        del given
        yield outcome
        del outcome


@contextlib.contextmanager
def _perturbed(
    modules: Iterable[torch.nn.Module], leaves: Iterable[Any], seed: int | None
) -> Iterator[None]:
    """Perturb weights, and arguments that are copies, for a run."""
    if seed is None:
        yield
        return
    weights = [p for module in modules for p in module.parameters(recurse=False)]
    elements = Elements(weights)
    try:
        perturb_all(seed, [*weights, *leaves])
        yield
    finally:
        elements.restore()


def _forgotten(shape: Shape, real: Real, error: Exception) -> ValueError | None:
    """Return an error that names what ``dims`` may lack: as long as what was padded."""
    if isinstance(error, (torch.OutOfMemoryError, PaddingLeakError)) or not shape.pads:
        return None
    call = real.call
    named = {(each.index, dim) for each in shape.inputs for dim, _ in each.axes}
    padded = {size: axis for axis, size in shape.sizes.items() if shape.buckets[axis] != size}
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
    return ValueError(
        f"bucketed: {real.spec.name} fails once it is padded, {shape} "
        f"({type(error).__name__}: {error}). As long, and not padded: {'; '.join(forgotten)}: "
        "name it in dims"
    )
