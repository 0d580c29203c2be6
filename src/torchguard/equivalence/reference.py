"""What a run is compared with: eager torch, in which operands that are also written are copied.

Eager torch is itself wrong there, without a word (https://github.com/pytorch/pytorch/issues/135487),
and a compiled graph that is right would look wrong beside it.
"""

from __future__ import annotations

import linecache
import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchguard._events import frame_of_user, is_trial, record
from torchguard._torch import is_kept_whole
from torchguard.equivalence.operands import Overlap, may_write, separated
from torchguard.errors import OverlapWarning

Place = tuple[str, int]
"""A file and a line."""

_texts: dict[Place, tuple[str, dict[Any, Any]]] = {}
"""By line: what is said of it, and the registry in which Python notes that it was said."""


def warn_of(function: Callable[..., Any], overlap: Overlap, place: Place | None = None) -> None:
    """Warn at the user's line, once per line unless filters say otherwise."""
    if is_trial():
        return
    place, text, registry = _said_of(function, overlap, place)
    record("overlap", "overlap", text, where=f"{place[0]}:{place[1]}")
    warnings.warn_explicit(text, OverlapWarning, *place, registry=registry)


def is_error(function: Callable[..., Any], overlap: Overlap, place: Place | None = None) -> bool:
    """Whether filters make an exception of the warning."""
    if is_trial():
        return False
    (file, line), text, _ = _said_of(function, overlap, place)
    module = file.removesuffix(".py")
    for action, message, category, of_module, of_line in warnings.filters:
        # As warnings.warn_explicit looks for the first that fits.
        if (
            issubclass(OverlapWarning, category)
            and (message is None or message.match(text))
            and (of_module is None or of_module.match(module))
            and of_line in (0, line)
        ):
            return action == "error"
    return False


def _said_of(
    function: Callable[..., Any], overlap: Overlap, place: Place | None
) -> tuple[Place, str, dict[Any, Any]]:
    """Return the user's line, what is said of it, and the registry that notes that it was said."""
    if place is None:
        frame = frame_of_user()
        place = ("<unknown>", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    if place not in _texts:
        name = getattr(function, "__name__", str(function))
        line = linecache.getline(*place).strip()
        text = (
            f"{name} reads memory that it writes: an operand of shape "
            f"{overlap.operand} overlaps what is written, of shape "
            f"{overlap.written}{f', in `{line}`' if line else ''}. torchguard has "
            "copied it first; PyTorch may compute another result. Write `operand.clone()`"
        )
        _texts[place] = text, {}
    return place, *_texts[place]


# ---- a graph ----

_NAMES = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_METHODS = {
    getattr(operator, f"i{name}"): getattr(torch.Tensor, f"__i{name}__") for name in _NAMES.split()
}


def reference_of(graph: fx.GraphModule, *, warns: bool = True) -> Callable[..., Any]:
    """Return what runs a graph as the code says; its own ``forward`` where nothing is written."""
    if not any(map(node_may_write, graph.graph.nodes)):
        return graph.forward
    return lambda *inputs: _Reference(graph, warns).run(*inputs, enable_io_processing=False)


class _Reference(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, warns: bool) -> None:
        super().__init__(graph)
        self.warns = warns

    def run_node(self, n: fx.Node) -> Any:
        if not node_may_write(n) or is_kept_whole(n.target):  # sliced_assign_ copies them itself
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        function, place = _function_of(n), _place_of(n)
        args, kwargs, overlap = separated(function, args, kwargs)
        if overlap is None or not self.warns:
            return getattr(self, n.op)(n.target, args, kwargs)
        if is_error(function, overlap, place):
            warn_of(function, overlap, place)  # before anything is written
        result = getattr(self, n.op)(n.target, args, kwargs)
        warn_of(function, overlap, place)
        return result


def node_may_write(node: fx.Node) -> bool:
    """Whether a node of a graph may write to a tensor that it is given."""
    if node.op == "call_method":
        return str(node.target).endswith("_") or node.target == "__setitem__"
    return node.op == "call_function" and may_write(_function_of(node), node.kwargs)


def _function_of(node: fx.Node) -> Any:
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    try:
        return _METHODS.get(node.target, node.target)
    except TypeError:  # it has no hash
        return node.target


def _place_of(node: fx.Node) -> Place:
    """Return the innermost line of the user's program, as Dynamo has noted it."""
    lines = re.findall(r'File "(.+)", line (\d+)', node.stack_trace or "")
    return (lines[-1][0], int(lines[-1][1])) if lines else ("<compiled>", 0)
