"""Copies of a graph: compilers rewrite the one they are given."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import fx

__all__ = ["copy_graph", "in_double", "is_symbolic", "owned_tensors", "place_of", "wider"]

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_CASTS = {"half": "double", "bfloat16": "double", "float": "double"}


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that stands for this one in double precision."""
    return _WIDER.get(dtype, dtype)


def is_symbolic(value: object) -> bool:
    """Whether it is a size, or a number, that differs from call to call."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph and those it holds, with what Dynamo has noted on them.

    Tensors and other values are shared with the original.
    """
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for name, value in vars(graph).items():
        vars(copied).setdefault(name, value)
    for old, new in zip(graph.graph.nodes, copied.graph.nodes, strict=True):
        for name, value in getattr(old, "__dict__", {}).items():
            if not hasattr(new, name):
                setattr(new, name, value)  # where a placeholder comes from
    for name, child in graph.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, copy_graph(child))
    return copied


def in_double(graph: fx.GraphModule) -> fx.GraphModule | None:
    """Copy the graph with every dtype it names made double; None if it reads bits.

    https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/utils.py has the same idea
    for its accuracy minifier.
    """
    copied = copy_graph(graph)
    for part in copied.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.op == "call_method" and node.target == "view":
                if any(isinstance(value, torch.dtype) for value in node.args):
                    return None
            elif node.op == "call_method" and node.target in _CASTS:
                node.target = _CASTS[str(node.target)]
            node.args = tuple(_doubled(value) for value in node.args)
            node.kwargs = {name: _doubled(value) for name, value in node.kwargs.items()}
        part.recompile()
    return copied


def _doubled(value: object) -> object:
    return wider(value) if isinstance(value, torch.dtype) else value


def owned_tensors(graph: fx.GraphModule) -> list[torch.Tensor]:
    """Return the tensors that the graph holds itself: the parameters of an optimizer."""
    found: dict[int, torch.Tensor] = {}
    for part in graph.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                value: Any = part
                for name in str(node.target).split(".") if node.op == "get_attr" else ():
                    value = getattr(value, name, None)
                if isinstance(value, torch.Tensor):
                    found[id(value)] = value
    return list(found.values())


def place_of(graph: fx.GraphModule) -> tuple[str, str]:
    """Return the function or module that was compiled, and ``file:line`` of the last statement.

    A module of torch itself has no line of the user's: then it is the module's class.
    """
    for node in reversed(graph.graph.nodes):
        frames = re.findall(r'File "(.*)", line (\d+), in (.*)', node.stack_trace or "")
        if frames:
            # The outermost frame is what Dynamo compiled, or its rest after a graph break.
            resumed = re.fullmatch(r"torch_dynamo_resume_in_(.*)_at_\d+", frames[0][2])
            file, line, _ = frames[-1]
            return resumed[1] if resumed else frames[0][2], f"{file}:{line}"
    for node in graph.graph.nodes:
        for _, kind in (node.meta.get("nn_module_stack") or {}).values():
            return getattr(kind, "__name__", str(kind)), "torch.nn"
    return "graph", "no line known"
