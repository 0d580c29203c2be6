"""The guard "slice_scatter": no gradient is scattered into memory that positions share.

The gradient of ``torch.slice_scatter`` for its input is the output's gradient with
zeros scattered into it. After a ``.sum()`` that gradient is one number, expanded to
the shape, and up to 2.11 the rule that gives the result's strides keeps its stride 0;
inductor believes it, and all positions share one element. The same holds for
``select_scatter`` and ``diagonal_scatter``
(https://github.com/pytorch/pytorch/issues/180164, 180771, 180772, 183898, 183602).

The guard writes each such call in Dynamo's graph as ``out = input.clone()`` and an
assignment into a view of ``out``, whose gradient is made in memory of its own. It is
the graph that is changed, not inductor: caches on disk are keyed by it.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from torchguard._torch import CALL_USER_COMPILER, DYNAMO, patch

_NAMES = ("slice_scatter", "select_scatter", "diagonal_scatter")


def replacements() -> Mapping[str, patch.Make]:
    """Return what to put where; Dynamo has to be imported."""
    return {CALL_USER_COMPILER: _rewrite_first}


def not_needed() -> str | None:
    """Say why the guard is not needed; None if it is, and while nothing has imported Dynamo."""
    return _tried() if DYNAMO in sys.modules else None


@functools.cache
def _tried() -> str | None:
    """Ask for the strides of results without computing them, once per process."""
    row = torch.empty(2, device="meta")
    expanded = torch.empty((), device="meta").expand(2, 2)
    results = (
        torch.slice_scatter(expanded, row[None], 0, 0, 1),
        torch.select_scatter(expanded, row, 0, 0),
        torch.diagonal_scatter(expanded, row),
    )
    if all(result.stride() == (2, 1) for result in results):
        return "a scattered result has memory of its own for each element on this torch"
    return None


def _rewrite_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_user_compiler(self: Any, gm: fx.GraphModule, *args: Any) -> Any:
        if not getattr(self, "export", False):  # an exported program keeps its operators
            for module in gm.modules():
                if isinstance(module, fx.GraphModule):
                    _rewrite(module)
        return original(self, gm, *args)

    return call_user_compiler


def _rewrite(module: fx.GraphModule) -> None:
    depth = 0  # of functorch's transformations, in which writing in place is restricted
    changed = False
    for node in list(module.graph.nodes):
        name = _name_of(node.target)
        if name.endswith("_increment_nesting"):
            depth += 1
        elif name.endswith("_decrement_nesting"):
            depth -= 1
        elif depth == 0 and name in _NAMES and node.op in {"call_function", "call_method"}:
            changed = _as_assignment(module.graph, node, name) or changed
    if changed:
        module.recompile()


def _name_of(target: Any) -> str:
    """``slice_scatter`` for ``torch.slice_scatter``, the method and ``torch.ops.aten``'s."""
    if isinstance(target, str):
        return target
    return str(getattr(target, "__name__", "")).partition(".")[0]


def _as_assignment(graph: fx.Graph, node: fx.Node, name: str) -> bool:
    """Write ``out = input.clone(); view of out .copy_(src)`` in place of a node, if it is one."""
    arguments = _arguments(name, node)
    if arguments is None:
        return False
    with graph.inserting_before(node):
        out = graph.call_method("clone", (arguments.pop("input"),))
        src = arguments.pop("src")
        view = _view(graph, name, out, arguments)
        graph.call_method("copy_", (view, src))
    for key, value in node.meta.items():
        out.meta[key] = value
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    return True


_SIGNATURES: dict[str, tuple[tuple[str, Any], ...]] = {
    "slice_scatter": (("dim", 0), ("start", None), ("end", None), ("step", 1)),
    "select_scatter": (("dim", None), ("index", None)),
    "diagonal_scatter": (("offset", 0), ("dim1", 0), ("dim2", 1)),
}


def _arguments(name: str, node: fx.Node) -> dict[str, Any] | None:
    """Return the call's arguments by name, defaults included; None if it has others."""
    names = ["input", "src", *(each for each, _ in _SIGNATURES[name])]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if "self" in given:
        given["input"] = given.pop("self")
    if len(node.args) > len(names) or not {"input", "src"} <= set(given) <= set(names):
        return None
    return dict(_SIGNATURES[name]) | given


def _view(graph: fx.Graph, name: str, out: fx.Node, arguments: dict[str, Any]) -> fx.Node:
    if name == "select_scatter":
        return graph.call_method("select", (out, arguments["dim"], arguments["index"]))
    if name == "diagonal_scatter":
        return graph.call_method(
            "diagonal", (out, arguments["offset"], arguments["dim1"], arguments["dim2"])
        )
    # out.transpose(0, dim)[start:end:step]: there is no method that takes a slice of any dim.
    front = graph.call_method("transpose", (out, 0, arguments["dim"]))
    part = slice(arguments["start"], arguments["end"], arguments["step"])
    rows = graph.call_function(operator.getitem, (front, part))
    return graph.call_method("transpose", (rows, 0, arguments["dim"]))
