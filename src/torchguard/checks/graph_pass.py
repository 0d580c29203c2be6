"""The same checks in compiled code: a pass over the graph that Dynamo hands to a backend.

The pass clamps what is checked and gives the graph one more output for each device: the smallest
and largest value that each site has seen, and what is allowed. What the backend makes of the graph
is wrapped in a function that reads them and keeps them from the caller. torch removes such checks
while it compiles: https://github.com/pytorch/pytorch/issues/197554
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from torchguard._events import user_line_of
from torchguard._torch import C_NAMESPACE, computing_unseen, inner_tensors, is_wrapped, original_of
from torchguard.checks.calls import (
    SWITCH,
    Flags,
    Site,
    bind,
    can_check,
    clamped,
    flags,
    is_on_cpu,
    looked_at,
    raise_outside,
    rebound,
    unfolded,
)
from torchguard.checks.table import INDEXING, ROWS, Check, Row

_OPERATORS = {
    operator.floordiv: "floor_divide",
    operator.ifloordiv: "floor_divide",
    operator.mod: "remainder",
    operator.imod: "remainder",
}

_Seen = tuple[Site, torch.device | None, list[Any]]
"""A site, its device if that is no CPU, and its nodes: smallest, largest, and both bounds."""


def checks_in_graph(
    compile_graph: Callable[..., Callable[..., Any]], graph: fx.GraphModule
) -> Callable[..., Any]:
    """Put the checks into a graph, compile it, and return what reads them after each call."""
    found: list[_Seen] = []
    inside = 0
    for node in list(graph.graph.nodes):
        name = getattr(node.target, "__name__", "")
        # What is computed inside a transform of torch.func can't leave it.
        inside += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        row = None if inside else _row_of(node)
        if row is not None:
            with graph.graph.inserting_before(node):
                _Call(graph, node, row, found).check()
    if not found:
        return compile_graph(graph)
    groups: dict[tuple[torch.device | None, torch.dtype], list[_Seen]] = {}
    for each in found:
        dtype = torch.float64 if each[0].kind == "value" else torch.int64
        groups.setdefault((each[1], dtype), []).append(each)
    output = graph.graph.output_node()
    (results,) = output.args
    assert isinstance(results, (tuple, list))
    tracer = GraphAppendingTracer(graph.graph)
    extra = []
    with graph.graph.inserting_before(output):
        for seen in groups.values():
            columns = zip(*(nodes for _, _, nodes in seen), strict=True)
            nodes = [fx.Proxy(node, tracer) for column in columns for node in column]
            extra.append(torch.stack(nodes).node)  # type: ignore[arg-type, attr-defined]
    count = len(results)
    output.args = ((*results, *extra),)
    graph.recompile()
    compiled = compile_graph(graph)
    sites = [(where is None, [site for site, _, _ in seen]) for (where, _), seen in groups.items()]

    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        _read(outputs[count:], sites)
        return outputs[:count]

    return run


def _read(seen: Any, sites: list[tuple[bool, list[Site]]]) -> None:
    """Raise for what was seen on a CPU; what other devices have seen waits."""
    for (is_cpu, each), extremes in zip(sites, seen, strict=True):
        with computing_unseen():
            if is_cpu:
                raise_outside(each, extremes.tolist())
                continue
            # A copy: the next call of a CUDA graph writes to the same memory.
            waiting = flags if SWITCH.on else Flags()
            waiting.keep(each, extremes.clone())
            if not SWITCH.on:  # compiled under the guard, and called later
                waiting.read()


# ---- one node ----


class _Call:
    """A node that calls what is in the table, and the checks that are put in front of it."""

    def __init__(self, graph: fx.GraphModule, node: fx.Node, row: Row, found: list[_Seen]) -> None:
        self._node, self._row, self._found = node, row, found
        self._tracer = GraphAppendingTracer(graph.graph)
        self._given = bind(row, node.args, node.kwargs)
        self._fakes = {name: _fake(each) for name, each in self._given.items()}

    def check(self) -> None:
        """Check what can be checked; the node is then called with what is in range."""
        checks, self._given, folded = unfolded(self._row, self._given, _fake)
        new: dict[str, Any] = {}
        for check in checks:
            values = self._given.get(check.argument)
            if check.kind == "divisor" and type(values) is int and values == 0:
                values = self._zero(check)
            allowed = check.range(self._fakes, self._size) if _can_check(check, values) else None
            if allowed is not None:
                new[check.argument] = self._put(check, values, allowed)
        if new:
            arguments = self._node.args, self._node.kwargs
            self._node.args, self._node.kwargs = rebound(self._row, *arguments, folded(new))

    def _zero(self, check: Check) -> Any:
        """Return a tensor in place of the number 0, where integers are divided by it."""
        divided: Any = self._given.get("input")
        if not _can_check(check, divided):
            return 0
        fake = _fake(divided)
        dtype = torch.result_type(fake, 0)
        zero: Any = fx.Proxy(divided, self._tracer).new_zeros((), dtype=dtype)
        zero.node.meta["example_value"] = fake.new_zeros((), dtype=dtype)
        return zero.node

    def _size(self, argument: str, dim: int | None) -> Any:
        """Return the size of an argument, a node of the graph where it is symbolic."""
        fake = self._fakes[argument]
        if not fake.dim():
            return 1
        size = fake.numel() if dim is None else fake.size(dim)
        if isinstance(size, int):
            return size
        proxy = fx.Proxy(self._given[argument], self._tracer)
        return proxy.numel() if dim is None else proxy.size(dim)

    def _put(self, check: Check, node: Any, allowed: Any) -> fx.Node:
        """Put a check in, and return the node that replaces the values."""
        low, high = (0 if isinstance(each, fx.Proxy) else each for each in allowed)
        function = str(getattr(self._node.target, "__name__", self._node.target))
        line = user_line_of(self._node.stack_trace)
        site = Site(function, check.argument, check.kind, low, high, line)
        asked = site._replace(low=allowed[0], high=allowed[1])
        values, fake, unread = fx.Proxy(node, self._tracer), _fake(node), None
        if check.unread is not None:
            proxies = {
                name: fx.Proxy(each, self._tracer) if isinstance(each, fx.Node) else each
                for name, each in self._given.items()
            }
            unread = check.unread(proxies, self._fakes)
        read = looked_at(asked, values, unread)
        if _may_be_empty(fake):
            harmless = read.new_full((1,), 1 if check.kind == "divisor" else 0)
            read = torch.cat((read.reshape(-1), harmless))
        dtype = torch.float64 if check.kind == "value" else torch.int64
        ends = [read.amin().to(dtype), read.amax().to(dtype)]
        for end, bound in zip(tuple(ends), allowed, strict=True):
            ends.append(end if bound is None else torch.zeros_like(end) + bound)
        where = None if is_on_cpu(fake) else fake.device
        self._found.append((site, where, [end.node for end in ends]))
        new = clamped(asked, values, unread).node
        # Later checks, and passes, look at what Dynamo knows of a value.
        new.meta["example_value"] = fake
        return new  # type: ignore[no-any-return]


def _may_be_empty(fake: torch.Tensor) -> bool:
    """Whether one of the sizes is known only when the graph runs."""
    # Here, because it imports sympy, which takes as long as the rest of install().
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # noqa: PLC0415

    return any(free_unbacked_symbols(size) for size in fake.size())


def _can_check(check: Check, node: Any) -> bool:
    fake = _fake(node)
    return (
        isinstance(node, fx.Node)
        and can_check(check, fake)
        and fake.layout is torch.strided
        and not is_wrapped(fake)
        and not inner_tensors(fake)
        and all(not isinstance(size, int) or size > 0 for size in fake.size())
    )


def _fake(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def _row_of(node: fx.Node) -> Row | None:
    if node.op == "call_method":
        return _rows_by_method().get(str(node.target))
    try:
        return _rows_by_function().get(node.target) if node.op == "call_function" else None
    except TypeError:  # a target that can't be hashed is none of torch's functions
        return None


@functools.cache
def _rows_by_function() -> dict[Any, Row]:
    found: dict[Any, Row] = {operator.getitem: INDEXING["__getitem__"]}
    found[operator.setitem] = INDEXING["__setitem__"]
    modules = {"": torch, "F": torch.nn.functional, "nn": C_NAMESPACE}
    found[original_of(torch.index_put)] = INDEXING["index_put"]
    for row in ROWS:
        for each in row.names:
            kind, _, name = each.rpartition(".")
            if name in vars(modules[kind]):
                found[original_of(vars(modules[kind])[name])] = row
    for function, name in _OPERATORS.items():
        found[function] = found[original_of(getattr(torch, name))]
    return found


@functools.cache
def _rows_by_method() -> dict[str, Row]:
    found = {name: row for name, row in INDEXING.items() if row.names[0] == name}
    for row in ROWS:
        found.update({f"{name}{end}": row for name in row.names for end in ("", "_")})
    return found
