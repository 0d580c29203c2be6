"""Whether rounding alone makes a compiled graph differ from eager: at a discontinuity.

There eager, with ULP-scale noise on its inputs, comes as far away from itself, and the same graph,
compiled in double precision, is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torchguard._torch import compiling_outside_dynamo, enters_autocast
from torchguard.equivalence.compare import COMPILING, Policy, judge
from torchguard.equivalence.copies import (
    copy_inputs,
    run_on_copies,
    tensors_of,
    why_not_copied,
    written_places,
)
from torchguard.equivalence.outcome import Outcome, rng_state_restored
from torchguard.equivalence.perturb import perturb_all
from torchguard.verification.backend import Compiler
from torchguard.verification.graph import attribute_of, copy_graph, graphs_in


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
        eager = run_on_copies(wide, inputs, cast=_wider, within=within)
        if eager.error is not None or eager.backward_error is not None:
            return False
        with compiling_outside_dynamo(), rng_state_restored():
            compiled = compiler(copy_graph(wide), copy_inputs(inputs, _wider))
        again = run_on_copies(compiled, inputs, cast=_wider, within=within_compiled)
        return all(each.small for each in judge(eager, again, COMPILING))
    except Exception:  # noqa: BLE001 - then nothing has shown that it is right
        return False


def perturbed_runs(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    owned: Sequence[torch.Tensor],
    eager: Outcome,
    *,
    within: AbstractContextManager[Any] | None = None,
) -> Callable[[int], Outcome]:
    """Return what runs a graph eagerly, with inputs that are perturbed by a seed.

    Here and below ``within`` is a scope for runs of eager, which chooses random numbers.
    """

    def run(seed: int) -> Outcome:
        written: list[Any] | None = None

        def change(values: Sequence[Any]) -> None:
            # First the copies of inputs, then what is sent backward.
            nonlocal written
            if written is None:
                written = [values[place] for place in written_places(eager)]
            perturb_all(seed, values, written)

        return run_on_copies(graph, inputs, owned, change=change, within=within)

    return run


def policy_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> Policy:
    """Return the policy for a graph, which autocast may let compute in narrower dtypes.

    A graph that turns autocast off says where: there a narrower dtype is a mistake.
    """
    if _turns_autocast_off(graph, inputs):
        return COMPILING
    devices = {tensor.device.type for tensor in tensors_of(inputs)}
    narrow = {torch.get_autocast_dtype(each) for each in devices if torch.is_autocast_enabled(each)}
    regions = _autocast_regions(graph)
    narrow |= {dtype or torch.get_autocast_dtype(device) for device, dtype, on in regions if on}
    return replace(COMPILING, autocast=frozenset(narrow)) if narrow else COMPILING


def exact(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    owned: Sequence[torch.Tensor] = (),
    *,
    within: AbstractContextManager[Any] | None = None,
) -> Outcome | None:
    """Return the outcome in double precision, or None where the graph can't be run so.

    A cast to a narrower type that the program makes still rounds.
    """
    wide = _in_double(graph, [*owned, *inputs], keep_casts=True)
    if wide is None:
        return None
    try:
        copies = copy_inputs([*owned, *inputs], _wider) if owned else inputs
        _own(wide, owned, copies)
        held, given = copies[: len(owned)], copies[len(owned) :]
        return run_on_copies(wide, given, held, cast=_wider, within=within)
    except torch.OutOfMemoryError:
        return None


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


def _own(
    graph: fx.GraphModule, owned: Sequence[torch.Tensor], doubles: Sequence[torch.Tensor]
) -> None:
    """Let a copied graph own doubles in place of the tensors of the original."""
    places = {id(tensor): place for place, tensor in enumerate(owned)}
    for part in graphs_in(graph) if owned else ():
        for node in part.graph.nodes:
            place = places.get(id(attribute_of(part, node)))
            if place is not None:
                node.target = f"_double_{place}"
                setattr(part, node.target, doubles[place])
        part.recompile()


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
    regions = {bool(on) for _, _, on in _autocast_regions(graph)}
    devices = {tensor.device.type for tensor in tensors_of(inputs)}
    return False in regions and (True in regions or any(map(torch.is_autocast_enabled, devices)))


def _autocast_regions(graph: fx.GraphModule) -> list[Any]:
    """Return device, dtype or None, and whether it is on, of each region of a graph."""
    nodes = [node for part in graphs_in(graph) for node in part.graph.nodes]
    return [node.args[:3] for node in nodes if enters_autocast(node)]
