"""Warming up: every bucket is compiled and checked before the first call needs it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchguard._events import warn_user
from torchguard.bucketing.decorator.bucket import Call, Input, Plan
from torchguard.bucketing.decorator.compiled import alone
from torchguard.bucketing.decorator.masking import Real, real_by_caller
from torchguard.bucketing.decorator.options import AxisSizes, Spec, find_inputs
from torchguard.bucketing.decorator.output_shapes import FlatOutput
from torchguard.bucketing.padding import pad_to_bucket
from torchguard.equivalence.isolate import module_state_restored, rng_state_restored
from torchguard.equivalence.outcome import Output, send_backward
from torchguard.errors import PaddingLeakError, is_out_of_memory

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.call import Caller

# The first call of a CUDA graph warms up, the second records, the third replays.
_CUDA_GRAPH_TURNS = 3


def warm_up(caller: Caller, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Prove and compile every combination of buckets for an example like this one."""
    spec = caller.spec
    if caller.compiler is None and spec.options["compile"] is None:
        warn_user(
            f"bucketed: warmup() has nothing to compile: {caller.name} runs uncompiled. Pass "
            "compile=True to bucketed"
        )
    call = Call.of(spec, caller.owner, args, kwargs)
    inputs, own = find_inputs(spec, call)
    modules = call.modules(caller.function)
    for buckets in _combinations(caller):
        # Not isolated(): Dynamo guards on whether autocast's cache is on.
        with rng_state_restored(), module_state_restored(modules, values=True):
            # A full one first: what does not fit into memory shows at once, and needs no padding.
            plan, sized = _resized(caller, call, inputs, buckets)
            if plan.graph.compiles and plan.specialization not in plan.graph.warmed_for:
                _run_backward_too(caller, plan, sized)
            _prove(caller, call, inputs, own, buckets)


def _prove(
    caller: Caller, call: Call, inputs: Sequence[Input], own: AxisSizes, buckets: AxisSizes
) -> None:
    """Prove a bucket with the most padding that a call can have, and derive its outputs' sizes.

    A size of 1 is one of its own kind to many functions: a call that has it is left to itself. A
    function that takes no input so short is checked with a longer one. A leak is a warning: calls
    that need no padding are right.
    """
    ladders = _ladders(caller)
    short = {
        axis: min(max([2, *(each + 1 for each in ladders[axis] if each < size)]), size)
        for axis, size in buckets.items()
    }
    longer = {axis: (short[axis] + size) // 2 for axis, size in buckets.items()}
    # Half of some offsets are none.
    candidates = [own] if _may_be_sizes(call, inputs, min(short.values())) else [short, longer]
    for sizes in [each for each in candidates if each != buckets]:
        try:
            if _complete(caller, *_resized(caller, call, inputs, sizes), buckets):
                return
        except PaddingLeakError as error:
            warn_user(f"{error}. Found by warmup(); a call with such padding will raise it")
            return
        except Exception as error:
            if is_out_of_memory(error):  # another, such as of an input too short, is for its call
                raise


def _complete(caller: Caller, plan: Plan, call: Call, buckets: AxisSizes) -> bool:
    """Prove a bucket with this call; return whether it is one of the bucket."""
    if plan.buckets != buckets:
        return False
    caller.prove(plan, call)
    if plan.pads and not plan.slices:
        # With check_padding="never" nothing has run yet that says what an output is like.
        args, kwargs = call.bind(plan.extras, plan.pad(call.leaves))
        caller.learn(plan, call, caller.first_run(plan)(*args, **kwargs))
    return True


# ---- the example at other sizes ----


def _may_be_sizes(call: Call, inputs: Sequence[Input], length: int) -> bool:
    """Whether an index could lie behind the end now: on an accelerator that ends the process."""
    # Offsets, such as cu_seqlens, point into what was cut, and half of them are no packed batch.
    offsets = [each for each in inputs if each.fill == "repeat-last"]
    if any(not call.leaves[each.index].is_floating_point() for each in offsets):
        return True
    cut = {each.index for each in inputs}
    return any(
        isinstance(value, torch.Tensor)
        and index not in cut
        and not (value.is_floating_point() or value.is_complex())
        and value.device.type not in {"cpu", "meta"}
        and bool((value >= length).any())
        for index, value in enumerate(call.leaves)
    )


def _cut_or_padded(spec: Spec, inputs: Sequence[Input], call: Call, sizes: AxisSizes) -> Call:
    """Return a call with its inputs cut or padded to these sizes.

    They are cut where the caller's own mask calls something real, in every sequence.
    """
    told = real_by_caller(spec, inputs, call)
    side = spec.options["side"]
    new: dict[int, Any] = {}
    for each in inputs:
        sized, fill = call.leaves[each.index].detach(), 0 if each.fill is None else each.fill
        for dim, axis in each.axes:
            size, length = sizes[axis], sized.shape[dim]
            if size < length:
                start = _real_start(told, axis, length, size, side)
                # Copied: a graph is compiled for strides too, and a call's are not those of a part.
                sized = sized.narrow(dim, start, size).clone()
            sized = pad_to_bucket(sized, dim, size, value=fill, side=side).tensor
        new[each.index] = sized.requires_grad_(each.requires_grad)
    return call.with_leaves(new)


def _real_start(told: Sequence[Real], axis: str, size: int, length: int, side: str) -> int:
    """Return where a part begins in which every sequence has something real, 0 if none does."""
    own = [each.positions for each in told if each.axis == axis]
    starts = (0, size - length) if side == "right" else (size - length, 0)
    for start in starts:
        if all(bool(each[..., start : start + length].any(-1).all()) for each in own):
            return start
    return 0


def _resized(
    caller: Caller, call: Call, inputs: Sequence[Input], sizes: AxisSizes
) -> tuple[Plan, Call]:
    """Return the example cut or padded to these sizes, and its plan."""
    sized = _cut_or_padded(caller.spec, inputs, call, sizes)
    args, kwargs = sized.bind()
    return caller.look_up(tuple(args[len(call.owner) :]), kwargs)


def _run_backward_too(caller: Caller, plan: Plan, call: Call) -> None:
    """Run a plan and its backward for the first time, uncounted: both are compiled."""
    graph = plan.graph
    args, kwargs = call.bind(plan.extras, plan.pad(call.leaves))
    run = caller.first_run(plan)
    for _ in range(_CUDA_GRAPH_TURNS if graph.cuda_graphs else 1):
        output, run = run(*args, **kwargs), graph.run
        begun = time.perf_counter()
        # The backward is compiled when it runs for the first time, under the same recompile limit.
        with alone():
            send_backward([Output(leaf) for leaf in FlatOutput.of(output).leaves], {}, {})
        graph.seconds += time.perf_counter() - begun
    graph.warmed_for.add(plan.specialization)


def _ladders(caller: Caller) -> dict[str, list[int]]:
    """Return the buckets of each axis: those given, or those that calls have made."""
    return {
        axis: list(given)
        if given is not None
        else sorted({each[place] for each in list(caller.buckets)})
        for place, (axis, given) in enumerate(caller.spec.ladders.items())
    }


def _combinations(caller: Caller) -> list[AxisSizes]:
    """Return the sizes of each combination of buckets, the largest first."""
    ladders = _ladders(caller)
    empty = [name for name, sizes in ladders.items() if not sizes]
    if empty:
        raise ValueError(
            f"bucketed: no buckets are given for {empty[0]!r}, and no call has made one: pass "
            "buckets=, or warm up after some calls"
        )
    combinations = [
        dict(zip(ladders, sizes, strict=True)) for sizes in itertools.product(*ladders.values())
    ]
    # What runs out of memory does so at once.
    combinations.sort(key=lambda buckets: math.prod(buckets.values()), reverse=True)
    return combinations
