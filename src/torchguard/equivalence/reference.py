"""What a run is compared with: eager torch, in which operands that are also written are copied.

Eager torch is itself wrong there, without a word (https://github.com/pytorch/pytorch/issues/135487),
and a compiled graph that is right would look wrong beside it.
"""

from __future__ import annotations

import linecache
import operator
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from torchguard._events import frame_of_user, is_trial, record
from torchguard._public import message
from torchguard._torch import is_kept_whole
from torchguard._torch.checkpointing import run_checkpointed
from torchguard.equivalence.mutation import writes_of
from torchguard.equivalence.operands import ASSIGNMENTS, Overlap, separated
from torchguard.errors import OverlapWarning

Place = tuple[str, int]
"""A file and a line."""

_said: dict[Any, tuple[str, dict[Any, Any]]] = {}
"""By call of the program: a text, and the registry in which Python notes that it was said."""


class Said:
    """What is said of a call whose operands overlap what it writes: at the user's line."""

    def __init__(
        self, function: Callable[..., Any], overlap: Overlap, place: Place | None = None
    ) -> None:
        call: Any = place
        if place is None:
            frame = frame_of_user()
            file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
            place = file or "<unknown>", line
            call = (*place, -1 if frame is None else frame.f_lasti)  # a line may hold several
        name = getattr(function, "__name__", str(function))
        code = linecache.getline(*place).strip()
        self._place, self._call = place, (call, name)
        self._text = (
            f"{name} reads memory that it writes: an operand of shape "
            f"{overlap.operand} overlaps what is written, of shape "
            f"{overlap.written}{f', in `{code}`' if code else ''}. torchguard has "
            "copied it first; PyTorch may compute another result. Write `operand.clone()`"
        )
        self._shown = message("overlap", self._text)

    def warn(self) -> None:
        """Warn, once per call of the program unless filters say otherwise.

        Whether it is an error is what ``warnings`` finds: filters may belong to a context.
        https://docs.python.org/3/library/warnings.html#concurrent-safety-of-context-managers
        """
        if is_trial():
            return
        text, registry = _said.setdefault(self._call, (self._shown, {}))
        if registry.keys() <= {"version"}:  # a loop may come with other shapes, and says it once
            text = self._shown
            _said[self._call] = text, registry
        try:
            warnings.warn_explicit(text, OverlapWarning, *self._place, registry=registry)
        except OverlapWarning:
            raise OverlapWarning(self._shown) from None

    def record(self) -> None:
        """Count the event."""
        place = f"{self._place[0]}:{self._place[1]}"
        record("overlap", "overlap", self._text, place, is_said=True)


def may_write(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may write to a tensor that it is given."""
    if kwargs.get("out") is not None or getattr(function, "__name__", "") in ASSIGNMENTS:
        return True
    try:
        return writes_of(function) is not None
    except TypeError:  # it has no hash
        return False


# ---- a graph ----

_NAMES = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_METHODS = {
    getattr(operator, f"i{name}"): getattr(torch.Tensor, f"__i{name}__") for name in _NAMES.split()
}


def reference_of(
    graph: fx.GraphModule, *, warns: bool = True, copies: bool = True
) -> Callable[..., Any]:
    """Return what runs a graph as the code says; its own ``forward`` where that does.

    Without ``copies`` operands that overlap what is written are left as they are.
    """
    nodes = graph.graph.nodes
    has_writes = copies and any(map(node_may_write, nodes))
    if not has_writes and not any(_is_checkpoint(each.target) for each in nodes):
        return graph.forward
    return lambda *inputs: _Reference(graph, warns, copies).run(*inputs, enable_io_processing=False)


def _is_checkpoint(target: object) -> bool:
    """Whether a node of a graph runs a block that the program has checkpointed."""
    names = "tag_activation_checkpoint", "wrap_activation_checkpoint"
    return getattr(target, "__name__", "") in names


class _Reference(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, warns: bool, copies: bool) -> None:
        super().__init__(graph)
        self.warns, self.copies = warns, copies

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_checkpoint(target):
            return super().call_function(target, args, kwargs)
        block = reference_of(args[0], warns=self.warns, copies=self.copies)
        if self.copies:  # as compiled code does, whatever the program asks for
            kwargs = {**kwargs, "preserve_rng_state": True}
        return run_checkpointed(args[0], block, args[1:], kwargs)

    def run_node(self, n: fx.Node) -> Any:
        # sliced_assign_ copies its operands itself.
        if not self.copies or not node_may_write(n) or is_kept_whole(n.target):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        function, place = _function_of(n), _place_of(n)
        args, kwargs, overlap = separated(function, args, kwargs)
        if overlap is None or not self.warns:
            return getattr(self, n.op)(n.target, args, kwargs)
        said = Said(function, overlap, place)
        said.warn()  # before anything is written: it may be an error
        result = getattr(self, n.op)(n.target, args, kwargs)
        said.record()
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
