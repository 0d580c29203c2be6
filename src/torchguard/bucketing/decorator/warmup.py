"""Warming up: every bucket is compiled and checked before the first call needs it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchguard._events import warn_user
from torchguard.bucketing.decorator.graphs import alone
from torchguard.bucketing.decorator.real import FlatOutput, Told, told_of_padding
from torchguard.bucketing.decorator.routes import Route, Runner
from torchguard.bucketing.decorator.shape import AxisSizes, Call, Input, padded, shape_of
from torchguard.bucketing.decorator.spec import Spec
from torchguard.bucketing.padding import pad_to_bucket
from torchguard.equivalence.outcome import (
    Cotangents,
    Output,
    module_state_restored,
    rng_state_restored,
    send_backward,
)
from torchguard.errors import PaddingLeakError, is_out_of_memory

# The first call of a CUDA graph warms up, the second records, the third replays.
_CUDA_GRAPH_TURNS = 3


def warm_up(caller: Runner, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Prove and compile every combination of buckets for an example like this one."""
    spec = caller.spec
    if caller.compiler is None and not caller.says_compile:
        warn_user(
            "warmup-without-compile",
            f"bucketed: warmup() has nothing to compile: {spec.name} runs uncompiled. Pass "
            "compile=True to bucketed",
        )
    call = Call.of(spec, caller.owner, args, kwargs)
    shape = shape_of(replace(spec, ladders=dict.fromkeys(spec.ladders)), call, ())
    inputs, own = shape.inputs, shape.sizes
    modules = call.modules(caller.function)
    for buckets in _combinations(caller):
        # Not isolated(): Dynamo guards on whether autocast's cache is on.
        with rng_state_restored(), module_state_restored(modules, values=True):
            # A full one first: what does not fit into memory shows at once, and needs no padding.
            route, sized = _resized(caller, call, inputs, buckets)
            graph, specialization = route.graph, route.shape.specialization
            if graph.code is not None and specialization not in graph.warmed_for:
                _run_backward_too(caller, route, sized)
            _prove(caller, call, inputs, own, buckets)


def _prove(
    caller: Runner, call: Call, inputs: Sequence[Input], own: AxisSizes, buckets: AxisSizes
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
            text = f"{error}. Found by warmup(); a call with such padding will raise it"
            warn_user("padding-leak", text)
            return
        except Exception as error:
            if is_out_of_memory(error):  # another, such as of an input too short, is for its call
                raise


def _complete(caller: Runner, route: Route, call: Call, buckets: AxisSizes) -> bool:
    """Prove a bucket with this call; return whether it is one of the bucket."""
    if route.shape.buckets != buckets:
        return False
    caller.prove(route, call)
    if route.pads and not route.slices:
        # With check_padding="never" nothing has run yet that says what an output is like.
        args, kwargs = call.bind(route.extras, padded(route.pads, call.leaves))
        caller.learn(route, call, caller.first_run(route)(*args, **kwargs))
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
    told = told_of_padding(spec, inputs, call)
    side = spec.side
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


def _real_start(told: Sequence[Told], axis: str, size: int, length: int, side: str) -> int:
    """Return where a part begins in which every sequence has something real, 0 if none does."""
    own = [each.positions for each in told if each.axis == axis]
    starts = (0, size - length) if side == "right" else (size - length, 0)
    for start in starts:
        if all(bool(each[..., start : start + length].any(-1).all()) for each in own):
            return start
    return 0


def _resized(
    caller: Runner, call: Call, inputs: Sequence[Input], sizes: AxisSizes
) -> tuple[Route, Call]:
    """Return the example cut or padded to these sizes, and its route."""
    sized = _cut_or_padded(caller.spec, inputs, call, sizes)
    args, kwargs = sized.bind()
    return caller.look_up(tuple(args[len(call.owner) :]), kwargs)


def _run_backward_too(caller: Runner, route: Route, call: Call) -> None:
    """Run a route and its backward for the first time, uncounted: both are compiled."""
    graph = route.graph
    args, kwargs = call.bind(route.extras, padded(route.pads, call.leaves))
    run = caller.first_run(route)
    for _ in range(_CUDA_GRAPH_TURNS if graph.cuda_graphs else 1):
        output, run = run(*args, **kwargs), graph.run
        begun = time.perf_counter()
        # The backward is compiled when it runs for the first time, under the same recompile limit.
        with alone():
            leaves = FlatOutput.of(output).leaves
            send_backward(list(map(Output, leaves)), {}, Cotangents())
        graph.seconds += time.perf_counter() - begun
    graph.warmed_for.add(route.shape.specialization)


def _ladders(caller: Runner) -> dict[str, list[int]]:
    """Return the buckets of each axis: those given, or those that calls have made."""
    return {
        axis: list(given)
        if given is not None
        else sorted({each[place] for each in caller.counts.buckets()})
        for place, (axis, given) in enumerate(caller.spec.ladders.items())
    }


def _combinations(caller: Runner) -> list[AxisSizes]:
    """Return the sizes of each combination of buckets, the largest first."""
    ladders = _ladders(caller)
    empty = [name for name, sizes in ladders.items() if not sizes]
    if empty:
        raise ValueError(
            f"bucketed: no buckets are given for {empty[0]!r}, and no call has made one: pass "
            "buckets=, or warm up after some calls"
        )
    combinations: list[AxisSizes] = [
        dict(zip(ladders, sizes, strict=True)) for sizes in itertools.product(*ladders.values())
    ]
    # What runs out of memory does so at once.
    combinations.sort(key=lambda buckets: math.prod(buckets.values()), reverse=True)
    return combinations
