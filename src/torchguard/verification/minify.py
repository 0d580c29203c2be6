"""A smaller graph with the same fault: what can be left out while a difference stays.

Compiling takes the time, so large cuts come first. The whole graph is compiled once with every
value as a result; then the last one, two, four statements and so on up to the first wrong one, with
what they read as inputs. Where no value is wrong (a gradient is, or what is written into an input),
the end is found by bisection. At last results and statements are left out by delta debugging.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchguard.equivalence.compare import COMPILING, Difference, judge
from torchguard.equivalence.copies import copy_inputs, run_on_copies
from torchguard.equivalence.isolate import isolated
from torchguard.equivalence.reference import node_may_write
from torchguard.verification.graph import copy_graph
from torchguard.verification.rounding import exact

_Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Case:
    """A graph that owns no tensors, the same graph compiled, and inputs for both."""

    graph: fx.GraphModule
    compiled: Callable[..., Any]
    inputs: list[Any]

    def differences(self, inputs: Sequence[Any]) -> tuple[Difference, ...]:
        """Return what the compiled graph does otherwise with these inputs."""
        eager = run_on_copies(self.graph, inputs)
        if eager.error is not None:
            return ()
        compiled = run_on_copies(self.compiled, inputs)
        verdict = judge(eager, compiled, COMPILING, lambda: exact(self.graph, inputs))
        # What eager itself does not do twice, such as reading new memory, shows nothing.
        steady = verdict.equal or judge(eager, run_on_copies(self.graph, inputs), COMPILING).equal
        return verdict.differences if steady else ()


def minified(case: Case, compile_: _Compile) -> Case:
    """Return a case with less that still shows a difference; Ctrl-C ends with the smallest so far.

    A graph that ``compile_`` refuses shows nothing.
    """
    minifier = _Minifier(case, compile_)
    with contextlib.suppress(KeyboardInterrupt):
        if not minifier.end_at_wrong_value():
            minifier.cut_the_end()
            minifier.shows_window(_statements(minifier.case.graph))
        minifier.leave_out_parts()
    return minifier.case


class _Minifier:
    """Holds the smallest case so far."""

    def __init__(self, case: Case, compile_: _Compile) -> None:
        self.case = case
        self._compile = compile_
        found = case.differences(case.inputs)
        # Strides alone are no fault, they are corrected: no smaller case may end up with them.
        self._strides_will_do = all(each.strides is not None for each in found)

    def _try(self, graph: fx.GraphModule, inputs: list[Any]) -> tuple[Case, tuple[Difference, ...]]:
        """Compile a graph and return what it does otherwise than eager; nothing if it fails."""
        graph.recompile()
        case = Case(graph, graph.forward, inputs)
        try:
            case = Case(graph, self._compile(copy_graph(graph), inputs), inputs)
            return case, case.differences(inputs)
        except Exception:  # noqa: BLE001 - whatever goes wrong here, the larger case is there
            return case, ()

    def _shows(self, graph: fx.GraphModule, inputs: list[Any]) -> bool:
        """Take a smaller graph if it shows a difference as well."""
        _leave_out_unread(graph)
        smaller, found = self._try(graph, _leave_out_unused_inputs(graph, inputs))
        if not any(each.strides is None or self._strides_will_do for each in found):
            return False
        self.case = smaller
        return True

    def end_at_wrong_value(self) -> bool:
        """Make the first wrong value the result; whether that could be done."""
        # More results can hide a fault: a value that is returned is not fused away. Then nothing is
        # wrong here, and the end is found by bisection.
        graph = copy_graph(self.case.graph)
        nodes = list(graph.graph.nodes)
        places = [place for place in _statements(graph) if _has_tensor(nodes[place])]
        nodes[-1].args = (tuple(nodes[place] for place in places),)
        _, found = self._try(graph, self.case.inputs)
        wrong = [each.key for each in found if each.finite and each.part == "outputs"]
        last = places[min(wrong)] if wrong else -1
        return self.shows_window([place for place in _statements(self.case.graph) if place <= last])

    def shows_window(self, places: list[int]) -> bool:
        """Try the last 1, 2, 4 ... of these statements."""
        whole, width = self.case, 1
        while width < len(places):
            try:
                cut = _window(whole, places[-width], places[-1])
            except Exception:  # noqa: BLE001 - an input that can't be copied, no memory left
                cut = None
            if cut is not None and self._shows(*cut):
                return True
            width *= 2
        return False

    def cut_the_end(self) -> None:
        """Find the first statement after which there is a difference; its value is the result."""
        whole = self.case
        places = _statements(whole.graph)
        low, high = 0, len(places)
        while low < high:
            middle = (low + high) // 2
            graph = copy_graph(whole.graph)
            _end_at(graph, places[middle])
            if self._shows(graph, whole.inputs):
                high = middle
            else:
                low = middle + 1

    def leave_out_parts(self) -> None:
        """Leave out whatever can be."""
        parts = _parts(self.case.graph)
        size = len(parts)
        while size > 1:
            size = (size + 1) // 2
            start = 0
            while start < len(parts):
                if self._without(parts[start : start + size]):
                    parts = _parts(self.case.graph)
                else:
                    start += size

    def _without(self, parts: list[int]) -> bool:
        graph = copy_graph(self.case.graph)
        return _leave_out(graph, parts) and self._shows(graph, self.case.inputs)


def _end_at(graph: fx.GraphModule, place: int) -> None:
    """Leave out what comes after a statement, and make what it has returned the result."""
    nodes = list(graph.graph.nodes)
    nodes[-1].args = ((nodes[place],) if _has_tensor(nodes[place]) else (),)
    valued = {node for node in nodes if node.users or _is_statement(node)}
    for node in reversed(nodes[place + 1 : -1]):
        # A node without users that is no statement sets a mode back.
        if node in valued and not node.users:
            graph.graph.erase_node(node)


def _window(case: Case, first: int, last: int) -> tuple[fx.GraphModule, list[Any]] | None:
    """Leave out what comes before and after two statements; what is read of it becomes inputs.

    None where something else than tensors and numbers is read.
    """
    graph = copy_graph(case.graph)
    _end_at(graph, last)
    nodes = list(graph.graph.nodes)
    left_out = {
        node
        for node in nodes[:first]
        # What has no value sets a mode, which the rest needs.
        if node.op.startswith("call_") and (_is_statement(node) or "example_value" in node.meta)
    }
    kept = [node for node in nodes if node not in left_out]
    read = list(dict.fromkeys(
        value for node in kept for value in node.all_input_nodes if value in left_out
    ))  # fmt: skip
    values = _values_at(case, first, [nodes.index(node) for node in read])
    if values is None:
        return None
    placeholders = [node for node in nodes if node.op == "placeholder"]
    after = placeholders[-1] if placeholders else None
    for node in read:
        with graph.graph.inserting_before(nodes[0] if after is None else after.next):
            after = graph.graph.placeholder(node.name)
        after.meta.update(node.meta)
        after._dynamo_source = None  # as torch's DDPOptimizer has it
        node.replace_all_uses_with(after)
    for node in reversed(nodes[:first]):
        if node in left_out:
            graph.graph.erase_node(node)
    return graph, [*case.inputs, *values]


def _values_at(case: Case, place: int, wanted: list[int]) -> list[Any] | None:
    """Run eager up to a statement, and return copies of values computed before it."""
    nodes = list(case.graph.graph.nodes)
    interpreter = fx.Interpreter(case.graph, garbage_collect_values=False)
    # It may stop where autocast is on, or autograd off: then no node comes that sets it back.
    with isolated():
        interpreter.args_iter = iter(copy_inputs(case.inputs).values)
        for node in nodes[:place]:
            interpreter.env[node] = interpreter.run_node(node)
    values = [interpreter.env[nodes[position]] for position in wanted]
    if not all(isinstance(value, (torch.Tensor, int, float)) for value in values):
        return None
    return copy_inputs(values).values


def _parts(graph: fx.GraphModule) -> list[int]:
    """Return numbers for what can be left out: results from -1 down, statements by place."""
    results = range(len(_results(graph)))
    return [*(-1 - result for result in results), *reversed(_statements(graph))]


def _statements(graph: fx.GraphModule) -> list[int]:
    """Return the places of the statements among the nodes."""
    return [place for place, node in enumerate(graph.graph.nodes) if _is_statement(node)]


def _results(graph: fx.GraphModule) -> tuple[Any, ...]:
    results: tuple[Any, ...] = tuple(next(iter(reversed(graph.graph.nodes))).args[0])
    return results


def _is_statement(node: fx.Node) -> bool:
    """Whether it computes or writes tensors: what sets a mode, such as autocast, has to stay."""
    is_call = node.op in {"call_function", "call_method"}
    return is_call and (node.target is operator.setitem or _has_tensor(node))


def _has_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _leave_out(graph: fx.GraphModule, parts: list[int]) -> bool:
    """Leave parts out where a value can take their place."""
    nodes, results = list(graph.graph.nodes), _results(graph)
    output = nodes[-1]
    kept = tuple(value for place, value in enumerate(results) if -1 - place not in parts)
    output.args = (kept,)
    changed = len(kept) < len(results)
    for place in sorted((part for part in parts if part >= 0), reverse=True):
        node = nodes[place]
        replacement = _replacement(node) if node.users else None
        if replacement is not None:
            node.replace_all_uses_with(replacement)
        if not node.users:
            graph.graph.erase_node(node)
            changed = True
    return changed


def _leave_out_unread(graph: fx.GraphModule) -> None:
    """Leave out what computes something that is not read any more."""
    for node in reversed(list(graph.graph.nodes)):
        computes = _is_statement(node) or node.meta.get("example_value") is not None
        writes = node_may_write(node) or node.kwargs.get("inplace")
        if computes and node.op.startswith("call_") and not node.users and not writes:
            graph.graph.erase_node(node)


def _replacement(node: fx.Node) -> fx.Node | None:
    """Return the first that a statement reads and that looks like its result."""
    result: Any = node.meta.get("example_value")
    for read in filter(_has_tensor, node.all_input_nodes if _has_tensor(node) else ()):
        value = read.meta["example_value"]
        if (value.shape, value.dtype) == (result.shape, result.dtype):
            return read
    return None


def _leave_out_unused_inputs(graph: fx.GraphModule, inputs: list[Any]) -> list[Any]:
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    used = [bool(node.users) for node in placeholders]
    for node in placeholders:
        if not node.users:
            graph.graph.erase_node(node)
    return [value for value, kept in zip(inputs, used, strict=True) if kept]
