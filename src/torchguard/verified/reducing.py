"""A smaller graph with the same fault: what can be left out while a difference stays.

Results and statements are left out in halves, quarters and so on, as delta debugging does,
until the time is up.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from torchguard.verified.case import Case
from torchguard.verified.graphs import copy_graph

__all__ = ["reduced"]

_WRITING_OPERATORS = {
    operator.setitem, operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift,
    operator.imatmul, operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift,
    operator.isub, operator.itruediv, operator.ixor,
}  # fmt: skip

_Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def reduced(case: Case, compile_: _Compile, seconds: float, first: float) -> Case:
    """Return a case with fewer results, statements and inputs that still shows a difference.

    Args:
        case: one that shows it.
        compile_: compiles a graph; a graph that it refuses shows nothing.
        seconds: how long this may take.
        first: how long compiling the whole graph took: no smaller one is tried if there is
            less time left than the longest try so far.
    """
    end, longest = time.monotonic() + seconds, first
    parts = _parts(case.graph)
    size = len(parts)
    while size > 1:
        size = (size + 1) // 2
        start = 0
        while start < len(parts):
            began = time.monotonic()
            if began + longest > end:
                return case
            smaller = _smaller(case, parts[start : start + size], compile_)
            if smaller is None:
                start += size
            else:
                case, parts = smaller, _parts(smaller.graph)
            longest = max(longest, time.monotonic() - began)
    return case


def _smaller(case: Case, parts: list[int], compile_: _Compile) -> Case | None:
    graph = copy_graph(case.graph)
    if not _leave_out(graph, parts):
        return None
    inputs = _leave_out_unused_inputs(graph, case.inputs)
    graph.recompile()
    try:
        smaller = Case(graph, compile_(copy_graph(graph), inputs), inputs)
        return smaller if smaller.differences(inputs) else None
    except Exception:  # noqa: BLE001 - whatever goes wrong here, the larger case is there
        return None


def _parts(graph: fx.GraphModule) -> list[int]:
    """Return numbers for what can be left out: results from -1 down, statements by place."""
    nodes = list(graph.graph.nodes)
    statements = [place for place, node in enumerate(nodes) if _is_statement(node)]
    return [*(-1 - result for result in range(len(_results(graph)))), *reversed(statements)]


def _results(graph: fx.GraphModule) -> tuple[Any, ...]:
    results: tuple[Any, ...] = tuple(next(iter(reversed(graph.graph.nodes))).args[0])
    return results


def _is_statement(node: fx.Node) -> bool:
    """Whether it computes or writes tensors: what sets a mode, such as autocast, has to stay."""
    if node.op not in {"call_function", "call_method"}:
        return False
    return node.target is operator.setitem or isinstance(_example(node), torch.Tensor)


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _leave_out(graph: fx.GraphModule, parts: list[int]) -> bool:
    """Leave parts out where that makes sense, and what nobody needs any more."""
    nodes, results = list(graph.graph.nodes), _results(graph)
    output = nodes[-1]
    kept = tuple(value for place, value in enumerate(results) if -1 - place not in parts)
    output.args = (kept,)
    changed = len(kept) < len(results)
    for place in sorted((part for part in parts if part >= 0), reverse=True):
        node = nodes[place]
        stand_in = next(_stand_ins(node), None)
        if node.users and stand_in is not None:
            node.replace_all_uses_with(stand_in)
        if not node.users:
            graph.graph.erase_node(node)
            changed = True
    for node in reversed(list(graph.graph.nodes)):
        if _is_statement(node) and not node.users and not _writes(node):
            graph.graph.erase_node(node)
    return changed


def _stand_ins(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what a statement reads that looks like its result."""
    result = _example(node)
    for read in node.all_input_nodes:
        value = _example(read)
        if not isinstance(value, torch.Tensor) or not isinstance(result, torch.Tensor):
            continue
        if (value.shape, value.dtype) == (result.shape, result.dtype):
            yield read


def _writes(node: fx.Node) -> bool:
    """Whether a statement may do more than return something."""
    if node.target in _WRITING_OPERATORS:
        return True
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or bool(node.kwargs.get("out") or node.kwargs.get("inplace"))


def _leave_out_unused_inputs(graph: fx.GraphModule, inputs: list[Any]) -> list[Any]:
    kept = []
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, inputs, strict=True):
        if node.users:
            kept.append(value)
        else:
            graph.graph.erase_node(node)
    return kept
