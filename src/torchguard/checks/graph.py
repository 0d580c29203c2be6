"""The same checks in compiled code: a pass over the graph that Dynamo hands to a backend.

The pass clamps what is checked and gives the graph more outputs: the smallest and largest value
that each site has seen. What the backend makes of the graph is wrapped in a function that reads
them and keeps them from the caller. torch removes such checks while it compiles:
https://github.com/pytorch/pytorch/issues/197554
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from torchguard._torch import computing_unseen, patch
from torchguard.checks.check import (
    Flags,
    Site,
    can_check,
    clamped,
    current,
    indexed_dims,
    is_on_cpu,
    rebound,
)
from torchguard.checks.table import ROWS, Check, Row

_GETITEM = Row(("x[index]",), ("input", "index"), ())
_SETITEM = Row(("x[index] = ...",), ("input", "index", "value"), ())
_INDEX_PUT = Row(("index_put",), ("input", "indices", "values"), ())
_INDEXING = (_GETITEM, _SETITEM, _INDEX_PUT)
_OPERATORS = {
    "__floordiv__": (operator.floordiv, operator.ifloordiv),
    "__mod__": (operator.mod, operator.imod),
}


class _Found(NamedTuple):
    """One site in the graph: the nodes of what it has seen, and of a bound that is symbolic."""

    site: Site
    seen: tuple[fx.Proxy, fx.Proxy]
    is_cpu: bool


def checks_in_graph(
    compile_graph: Callable[..., Callable[..., Any]], graph: fx.GraphModule
) -> Callable[..., Any]:
    """Put the checks into a graph, compile it, and return what reads them after each call."""
    found = [each for node in list(graph.graph.nodes) for each in _check_node(graph, node)]
    if not found:
        return compile_graph(graph)
    groups: list[tuple[bool, list[Site]]] = []
    output = graph.graph.output_node()
    extra: list[fx.Node] = []
    with graph.graph.inserting_before(output):
        for is_real in (False, True):
            for is_cpu in (True, False):
                sites = [
                    each
                    for each in found
                    if (each.site.kind == "value", each.is_cpu) == (is_real, is_cpu)
                ]
                if not sites:
                    continue
                dtype = torch.float64 if is_real else torch.int64
                seen = [each.seen[end].to(dtype) for end in (0, 1) for each in sites]
                extra.append(torch.stack(seen).node)  # type: ignore[arg-type]
                bounds = [_bound(bound) for each in sites for bound in each.site[3:5]]
                extra += [bound for bound in bounds if isinstance(bound, fx.Node)]
                groups.append((is_cpu, [each.site for each in sites]))
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    count = len(results)
    output.args = ((*results, *extra),)
    graph.recompile()
    compiled = compile_graph(graph)

    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        _read(iter(outputs[count:]), groups)
        return outputs[:count]

    return run


def _read(extra: Any, groups: list[tuple[bool, list[Site]]]) -> None:
    """Read what the sites have seen on a CPU; of other devices the scope keeps it."""
    scope = current()
    for is_cpu, sites in groups:
        seen = next(extra)
        sites = [_with_bounds(site, extra) for site in sites]
        with computing_unseen():
            if is_cpu:
                numbers = seen.tolist()
                for site, *ends in zip(sites, numbers, numbers[len(sites) :], strict=False):
                    if not site.allows(*ends):
                        raise site.error(*ends)
            else:
                flags = Flags("call") if scope is None else scope.flags
                flags.keep(sites, seen[: len(sites)], seen[len(sites) :])


def _with_bounds(site: Site, extra: Any) -> Site:
    """Take the sizes that this call has had, where the bounds are symbolic."""
    low = next(extra) if isinstance(site.low, fx.Proxy) else site.low
    high = next(extra) if isinstance(site.high, fx.Proxy) else site.high
    return site._replace(low=low, high=high)


def _bound(bound: Any) -> Any:
    return bound.node if isinstance(bound, fx.Proxy) else bound


# ---- one node ----


def _check_node(graph: fx.GraphModule, node: fx.Node) -> list[_Found]:
    row = _row_of(node)
    if row is None:
        return []
    given = {**dict(zip(row.parameters, node.args, strict=False)), **node.kwargs}
    if "self" in given:
        given["input"] = given.pop("self")
    pass_ = _Pass(graph, node, given)
    with graph.graph.inserting_before(node):
        new = pass_.indexing(row) if row in _INDEXING else pass_.call(row)
    if new:
        node.args, node.kwargs = rebound(row, node.args, node.kwargs, new)
    return pass_.found


class _Pass:
    """The checks of one node."""

    def __init__(self, graph: fx.GraphModule, node: fx.Node, given: Mapping[str, Any]) -> None:
        self._tracer = GraphAppendingTracer(graph.graph)
        self._given = given
        self._fakes = {name: _fake(each) for name, each in given.items()}
        self._line = _line_of(node)
        self.found: list[_Found] = []

    def call(self, row: Row) -> dict[str, Any]:
        new: dict[str, Any] = {}
        for check in row.checks:
            if self._can_check(check.kind, self._given.get(check.argument)):
                allowed = check.range(self._fakes, self._size)
                if allowed is not None:
                    name = row.names[0].rpartition(".")[2]
                    new[check.argument] = self._checked(
                        name, check, self._given[check.argument], allowed
                    )
        return new

    def indexing(self, row: Row) -> dict[str, Any]:
        argument = row.parameters[1]
        index, tensor = self._given.get(argument), self._fakes.get("input")
        if not isinstance(tensor, torch.Tensor):
            return {}
        whole = isinstance(index, (tuple, list))
        items = list(index) if isinstance(index, (tuple, list)) else [index]
        fakes: list[Any] = [_fake(item) for item in items]
        if row is _INDEX_PUT:
            fakes = [slice(None) if fake is None else fake for fake in fakes]
        elif isinstance(index, list):  # of numbers: torch makes a tensor of them
            return {}
        before = len(self.found)
        for place, dim in indexed_dims(tuple(fakes), tensor.dim()):
            if self._can_check("index", items[place]) and dim < tensor.dim():
                size = self._size("input", dim)
                check = Check("index" if len(items) == 1 else f"index {place}", lambda *_: None)
                items[place] = self._checked(
                    row.names[0], check, items[place], (-size, size - 1)
                )
        if len(self.found) == before:
            return {}
        return {argument: tuple(items) if whole else items[0]}

    def _checked(self, function: str, check: Check, node: fx.Node, allowed: Any) -> fx.Node:
        values = fx.Proxy(node, self._tracer)
        site = Site(function, check.argument, check.kind, *allowed, self._line)
        unread = None
        if check.unread is not None:
            given = {
                name: fx.Proxy(each, self._tracer) if isinstance(each, fx.Node) else each
                for name, each in self._given.items()
            }
            unread = check.unread(given)
        read: Any = values.detach() if check.kind == "value" else values
        if unread is not None:
            read = torch.where(unread, 0 if site.low is None else site.low, read)  # type: ignore[call-overload]
        if check.kind == "divisor":
            read = (read != 0).to(torch.int64)
            site = site._replace(low=1)
        is_cpu = is_on_cpu(node.meta["example_value"])
        self.found.append(_Found(site, (read.amin(), read.amax()), is_cpu))
        new: Any = clamped(site, values, unread)
        # Later passes, and other checks of the same node, look at what Dynamo knows of a value.
        new.node.meta["example_value"] = node.meta["example_value"]
        return new.node  # type: ignore[no-any-return]

    def _can_check(self, kind: str, node: Any) -> bool:
        fake = _fake(node)
        return (
            isinstance(node, fx.Node)
            and can_check(kind, fake)
            and fake.layout is torch.strided
            and all(not isinstance(size, int) or size > 0 for size in fake.size())
        )

    def _size(self, argument: str, dim: int | None) -> Any:
        """Return the size of an argument, a node of the graph where it is symbolic."""
        fake, node = self._fakes[argument], self._given[argument]
        if not fake.dim():
            return 1
        size = fake.numel() if dim is None else fake.size(dim)
        if isinstance(size, int):
            return size
        proxy = fx.Proxy(node, self._tracer)
        return proxy.numel() if dim is None else proxy.size(dim)


def _fake(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def _line_of(node: fx.Node) -> str:
    """Return the innermost line of the user's program, as Dynamo has noted it."""
    lines = re.findall(r'File "(.+)", line (\d+)', node.stack_trace or "")
    return f"{lines[-1][0]}:{lines[-1][1]}" if lines else ""


def _row_of(node: fx.Node) -> Row | None:
    if node.op == "call_method":
        return _rows_by_method().get(str(node.target))
    try:
        return _rows_by_function().get(node.target) if node.op == "call_function" else None
    except TypeError:  # a target that can't be hashed is none of torch's functions
        return None


@functools.cache
def _rows_by_function() -> dict[Any, Row]:
    found: dict[Any, Row] = {operator.getitem: _GETITEM, operator.setitem: _SETITEM}
    for row in ROWS:
        for name in row.names:
            for function in _OPERATORS.get(name, ()):
                found[function] = row
            for path in paths_of(name):
                found[patch.original(path)] = row
    found[patch.original("torch.index_put")] = _INDEX_PUT
    return found


@functools.cache
def _rows_by_method() -> dict[str, Row]:
    found = dict.fromkeys(("index_put", "index_put_"), _INDEX_PUT)
    for row in ROWS:
        found.update({f"{name}{end}": row for name in row.names for end in ("", "_")})
    return found


def paths_of(name: str) -> list[str]:
    """Return where torch has the functions that a name of the table stands for."""
    kind, _, short = name.rpartition(".")
    owners = {"nn": "torch.nn.functional", "_C": "torch._C._nn"}
    owner = owners.get(kind, "torch")
    return [path for path in (f"{owner}.{short}",) if patch.exists(path)]
