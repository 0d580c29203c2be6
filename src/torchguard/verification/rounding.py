"""Whether rounding alone makes a compiled graph differ from eager: at a discontinuity.

There eager, with ULP-scale noise on its inputs, comes as far away from itself, and the same graph,
compiled in double precision, is right.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torchguard._torch import compiling_outside_dynamo, enters_autocast
from torchguard.equivalence.compare import (
    COMPILING,
    Difference,
    Policy,
    as_double,
    close,
    judge,
    value_of,
)
from torchguard.equivalence.copies import copy_inputs, run_on_copies, tensors_of, why_not_copied
from torchguard.equivalence.isolate import rng_state_restored
from torchguard.equivalence.outcome import Outcome
from torchguard.equivalence.perturb import perturb_
from torchguard.verification.backend import Compiler
from torchguard.verification.graph import copy_graph, graphs_in, unlogged

_RUNS = 16
"""How many runs eager makes at most, each with its inputs perturbed otherwise."""

_MULTIPLE = 2.0
"""How many times further than eager from itself the compiled result may be from eager."""


def not_by_rounding(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    eager: Outcome,
    compiled: Outcome,
    found: Sequence[Difference],
    *,
    within: AbstractContextManager[Any] | None = None,
) -> list[Difference]:
    """Return the differences that eager does not show itself when its inputs are perturbed.

    Here and below ``within`` is a scope for runs of eager, which chooses random numbers.
    """
    places = [(each, _apart(each, eager, compiled)) for each in found]
    compared = [(each, left) for each, left in places if left is not None]
    try:
        for seed in range(_RUNS if compared else 0):
            change = functools.partial(_perturb, seed)
            other = run_on_copies(graph, inputs, change=change, within=within)
            for each, left in compared:
                left.logical_and_(~_reached(each, eager, compiled, other))
            if not any(left.any() for _, left in compared):
                break
    except torch.OutOfMemoryError:
        return list(found)
    return [each for each, left in places if left is None or left.any()]


def right_in_double(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    compiler: Compiler,
    within: AbstractContextManager[Any] | None = None,
    within_compiled: AbstractContextManager[Any] | None = None,
) -> bool:
    """Whether the same graph, in double precision, compiled, does what eager does.

    There a discontinuity is a billion times less likely to be within the rounding error. Autocast
    leaves double precision alone, so a graph that turns it on and off is another one there.
    """
    wide = _in_double(graph, inputs)
    if wide is None or _turns_autocast_off(graph, inputs):
        return False
    try:
        with unlogged():
            eager = run_on_copies(wide, inputs, cast=_wider, within=within)
            if eager.error is not None or eager.backward_error is not None:
                return False
            with compiling_outside_dynamo(), rng_state_restored():
                compiled = compiler(copy_graph(wide), copy_inputs(inputs, _wider).values)
            again = run_on_copies(compiled, inputs, cast=_wider, within=within_compiled)
            return not judge(eager, again, COMPILING)
    except Exception:  # noqa: BLE001 - then nothing has shown that it is right
        return False


def _perturb(seed: int, copies: Sequence[Any]) -> None:
    """Perturb copies of inputs: those that require a gradient, as weights do, or else all."""
    # Data may be compared with a constant (a mask of ones), what requires a gradient is not.
    tensors = tensors_of(copies)
    chosen = [tensor for tensor in tensors if tensor.requires_grad] or tensors
    storages = {each.untyped_storage().data_ptr(): each for each in reversed(chosen)}
    for each in storages.values():
        whole = torch.empty(0, dtype=each.dtype, device=each.device)
        perturb_(whole.set_(each.untyped_storage()), seed)


def policy_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> Policy:
    """Return the policy for a graph, which autocast may let compute in narrower dtypes.

    A graph that turns autocast off says where: there a narrower dtype is a mistake.
    """
    if _turns_autocast_off(graph, inputs):
        return COMPILING
    devices = {tensor.device.type for tensor in tensors_of(inputs)}
    narrow = {torch.get_autocast_dtype(each) for each in devices if torch.is_autocast_enabled(each)}
    for part in graphs_in(graph):
        for node in part.graph.nodes:
            if enters_autocast(node) and node.args[2]:  # device, dtype, enabled
                narrow.add(node.args[1] or torch.get_autocast_dtype(node.args[0]))
    return replace(COMPILING, autocast=frozenset(narrow)) if narrow else COMPILING


def exact(
    graph: fx.GraphModule, inputs: Sequence[Any], within: AbstractContextManager[Any] | None = None
) -> Outcome | None:
    """Return the outcome in double precision, or None where the graph can't be run so.

    A cast to a narrower type that the program makes still rounds.
    """
    wide = _in_double(graph, inputs, keep_casts=True)
    try:
        return None if wide is None else run_on_copies(wide, inputs, cast=_wider, within=within)
    except torch.OutOfMemoryError:
        return None


def _apart(difference: Difference, eager: Outcome, compiled: Outcome) -> torch.Tensor | None:
    """Return at which elements a tensor differs, as a mask; None where more than values does."""
    if not difference.finite:
        return None
    one, other = (value_of(each, difference.part, difference.key) for each in (eager, compiled))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None  # a gradient that only one of them has
    return ~close(difference.part, one.detach(), other.detach())


def _reached(
    difference: Difference, eager: Outcome, compiled: Outcome, again: Outcome
) -> torch.Tensor:
    """Return at which elements another run of eager is about as far from eager as compiled."""
    outcomes = (eager, compiled, again)
    one, other, now = (value_of(each, difference.part, difference.key) for each in outcomes)
    if not isinstance(now, torch.Tensor) or now.shape != one.shape:
        return torch.zeros((), dtype=torch.bool, device=one.device)
    if not (one.is_floating_point() or one.is_complex()):
        return torch.eq(now.detach(), other)
    expected = as_double(one.detach())
    away, off = ((as_double(each.detach()) - expected).abs() for each in (now, other))
    return away.isfinite() & (_MULTIPLE * away >= off)


# ---- graphs in double precision ----

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_CASTS = {"half": "double", "bfloat16": "double", "float": "double"}


def _wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of double precision for this one."""
    return _WIDER.get(dtype, dtype)


def _in_double(
    graph: fx.GraphModule, inputs: Sequence[Any], *, keep_casts: bool = False
) -> fx.GraphModule | None:
    """Copy the graph with every dtype it names made double; None if that can't be done.

    https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/utils.py has the same idea.
    """
    if why_not_copied(inputs, _wider) is not None:
        return None
    copied = copy_graph(graph)
    for part in graphs_in(copied):
        for node in part.graph.nodes:
            narrow = _narrowed_to(node) if keep_casts else None
            if narrow is not None:
                node.op, node.target = "call_function", _rounded
                node.args, node.kwargs = (node.args[0], narrow), {}
                continue
            if node.op == "call_method" and node.target == "view":
                if any(isinstance(value, torch.dtype) for value in node.args):
                    return None
            elif node.op == "call_method" and node.target in _CASTS:
                node.target = _CASTS[str(node.target)]
            elif enters_autocast(node):
                # It does nothing in double precision, and warns of it: device, dtype, enabled.
                node.args = (*node.args[:2], False, *node.args[3:])
                continue
            node.args = tuple(_doubled(value) for value in node.args)
            node.kwargs = {name: _doubled(value) for name, value in node.kwargs.items()}
        part.recompile()
    return copied


def _doubled(value: object) -> object:
    return _wider(value) if isinstance(value, torch.dtype) else value


def _narrowed_to(node: fx.Node) -> torch.dtype | None:
    """Return the dtype to which a cast of the program rounds; None for other casts."""
    if node.op != "call_method" or node.target not in {"to", "type", "type_as", *_CASTS}:
        return None
    given, made = (
        each.meta.get("example_value") if isinstance(each, fx.Node) else None
        for each in (node.args[0], node)
    )
    if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
        return None
    before, after = given.dtype, made.dtype
    if before == after or not after.is_floating_point or after not in _WIDER:
        return None
    if not before.is_floating_point:
        return None if before.is_complex else after
    one, other = torch.finfo(before), torch.finfo(after)
    return after if other.eps > one.eps or other.max < one.max else None


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to a narrower dtype, as a cast does, and so does its gradient."""
    return values.to(dtype).to(torch.float64)


def _turns_autocast_off(graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph computes some of its operations under autocast, and others not."""
    regions = {
        bool(node.args[2])  # device, dtype, enabled
        for part in graphs_in(graph)
        for node in part.graph.nodes
        if enters_autocast(node)
    }
    devices = {tensor.device.type for tensor in tensors_of(inputs)}
    return False in regions and (True in regions or any(map(torch.is_autocast_enabled, devices)))
