"""A smaller graph with the same fault: what can be left out while a difference stays.

Compiling takes the time, so large cuts come first: half of the statements, and half of these, with
what they read as inputs and what is read of them as results. Then results and statements are left
out by delta debugging.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchguard._torch import mark_without_source
from torchguard.equivalence.compare import COMPILING, Difference, judge
from torchguard.equivalence.copies import copy_inputs, run_on_copies, why_not_copied
from torchguard.equivalence.isolate import isolated
from torchguard.equivalence.reference import node_may_write
from torchguard.verification.fallback import Compiler
from torchguard.verification.graph import copy_graph, placeholders_of
from torchguard.verification.rounding import exact, policy_of


@dataclass(frozen=True)
class Case:
    """A graph that owns no tensors, the same graph compiled, and inputs for both."""

    graph: fx.GraphModule
    compiled: Callable[..., Any]
    inputs: list[Any]
    numbers: tuple[int, ...]
    """What number each input has, here and in what was made smaller."""

    def differences(self, inputs: Sequence[Any]) -> tuple[Difference, ...]:
        """Return what the compiled graph does otherwise with these inputs."""
        eager = run_on_copies(self.graph, inputs)
        if eager.error is not None:
            return ()
        compiled = run_on_copies(self.compiled, inputs)
        policy = policy_of(self.graph, inputs)
        verdict = judge(eager, compiled, policy, lambda: exact(self.graph, inputs))
        # What eager itself does not do twice, such as reading new memory, shows nothing.
        steady = verdict.equal or judge(eager, run_on_copies(self.graph, inputs), COMPILING).equal
        names = [f"input {number}" for number in self.numbers]
        return tuple(each.named(names) for each in verdict.differences) if steady else ()


def minified(case: Case, compile_: Compiler) -> Case:
    """Return a case with less that still shows a difference; Ctrl-C ends with the smallest so far.

    A graph that ``compile_`` refuses shows nothing.
    """
    minifier = _Minifier(case, compile_)
    with contextlib.suppress(KeyboardInterrupt):
        minifier.narrow()
        minifier.leave_out_parts()
    return minifier.case


class _Minifier:
    """Holds the smallest case so far."""

    def __init__(self, case: Case, compile_: Compiler) -> None:
        self.case = case
        self._compile = compile_
        found = case.differences(case.inputs)
        # Strides alone are no fault, they are corrected: no smaller case may end up with them.
        self._strides_will_do = all(each.strides is not None for each in found)

    def _shows(self, graph: fx.GraphModule, inputs: list[Any]) -> bool:
        """Compile a smaller graph and take it if it shows a difference as well."""
        _leave_out_unread(graph)
        first = max(self.case.numbers, default=-1) + 1
        new = range(first, first + len(inputs) - len(self.case.inputs))
        inputs, numbers = _leave_out_unused_inputs(graph, inputs, (*self.case.numbers, *new))
        graph.recompile()
        try:
            smaller = Case(graph, self._compile(copy_graph(graph), inputs), inputs, numbers)
            found = smaller.differences(inputs)
        except Exception:  # noqa: BLE001 - whatever goes wrong here, the larger case is there
            return False
        if not any(each.strides is None or self._strides_will_do for each in found):
            return False
        self.case = smaller
        return True

    def narrow(self) -> None:
        """Take one half of the statements, or those in the middle, as long as they will do."""
        while len(places := _statements(self.case.graph)) > 1:
            half = len(places) // 2
            windows = [places[:-half], places[half:], places[half // 2 :][: len(places) - half]]
            if not any(map(self._shows_window, windows)):
                break

    def _shows_window(self, places: list[int]) -> bool:
        try:
            graph, inputs = _window(self.case, places[0], places[-1])
        except Exception:  # noqa: BLE001 - an input that can't be copied, no memory left
            return False
        return self._shows(graph, inputs)

    def leave_out_parts(self) -> None:
        """Leave out whatever can be."""
        parts = _parts(self.case.graph)
        size = len(parts)
        while size > 1:
            size = (size + 1) // 2
            start = 0
            while start < len(parts):
                graph = copy_graph(self.case.graph)
                removed = _leave_out(graph, parts[start : start + size])
                if removed and self._shows(graph, self.case.inputs):
                    parts = _parts(self.case.graph)
                else:
                    start += size


def _window(case: Case, first: int, last: int) -> tuple[fx.GraphModule, list[Any]]:
    """Leave out what comes before and after two statements; what is read of it becomes inputs."""
    graph = copy_graph(case.graph)
    nodes = list(graph.graph.nodes)
    window, later = nodes[first : last + 1], set(nodes[last + 1 :])
    results = [node for node in window if later & node.users.keys()]
    nodes[-1].args = (tuple(filter(_has_tensor, results)),)
    # What has no value, and is no statement, sets a mode, which the rest needs, or sets it back.
    left_out = dict.fromkeys(
        node
        for node in (*nodes[:first], *nodes[last + 1 :])
        if node.op.startswith("call_") and (_is_statement(node) or "example_value" in node.meta)
    )
    read = list(dict.fromkeys(
        value
        for node in nodes
        if node not in left_out
        for value in node.all_input_nodes
        if value in left_out
    ))  # fmt: skip
    values = _values_at(case, first, [nodes.index(node) for node in read])
    after = next(reversed(placeholders_of(graph)), None)
    for node in read:
        with graph.graph.inserting_before(nodes[0] if after is None else after.next):
            after = graph.graph.placeholder(node.name)
        after.meta.update(node.meta)
        mark_without_source(after)
        node.replace_all_uses_with(after)
    for node in reversed(left_out):
        graph.graph.erase_node(node)
    return graph, [*case.inputs, *values]


def _values_at(case: Case, place: int, wanted: list[int]) -> list[Any]:
    """Run eager up to a statement, and return copies of values computed before it.

    Raises:
        TypeError: one of them can't be an input.
    """
    nodes = list(case.graph.graph.nodes)
    interpreter = fx.Interpreter(case.graph, garbage_collect_values=False)
    # It may stop where autocast is on, or autograd off: then no node comes that sets it back.
    with isolated():
        interpreter.args_iter = iter(copy_inputs(case.inputs).values)
        for node in nodes[:place]:
            interpreter.env[node] = interpreter.run_node(node)
    values = [interpreter.env[nodes[position]] for position in wanted]
    if why_not_copied(values) is not None:
        raise TypeError(why_not_copied(values))
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


def _leave_out_unused_inputs(
    graph: fx.GraphModule, inputs: list[Any], numbers: tuple[int, ...]
) -> tuple[list[Any], tuple[int, ...]]:
    rows = list(zip(placeholders_of(graph), inputs, numbers, strict=True))
    used = [row for row in rows if row[0].users]
    for node, _, _ in rows:
        if not node.users:
            graph.graph.erase_node(node)
    return [value for _, value, _ in used], tuple(number for _, _, number in used)
