"""The guards "setitem" and "slice_scatter": indexed assignment in compiled code.

**"setitem"**: what Dynamo believes of ``requires_grad`` is what the tensor says.

While tracing, Dynamo answers ``m.requires_grad`` from a note made when it first saw
``m``, and decides by the same note whether a custom ``torch.autograd.Function`` has a
backward. Two things make the note wrong:

- Up to 2.8 ``m[index] = value`` is written into the graph but not carried out on the
  fake tensor that stands for ``m``
  (https://github.com/pytorch/pytorch/issues/169179).
- On every release up to 2.15 at least, the note is updated, if at all, for the tensor that was
  written to, not for others that share its memory: after ``m[0][0] = value``, an
  assignment into a view, the note for ``m`` is wrong. So it is, up to 2.9, after
  ``m.copy_(value)`` and, up to 2.11, after ``m.detach_()``
  (https://github.com/pytorch/pytorch/issues/176854).

The guard carries the assignment out on the fake tensor where Dynamo has not, and
reads the fake tensor instead of the note. The graph stays as it is.

**"slice_scatter"**: no gradient is scattered into memory that positions share.

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

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from torchguard._torch import (
    CALL_USER_COMPILER,
    DYNAMO,
    TENSOR_VARIABLE,
    fake_of,
    patch,
    tracing_unseen,
    without_torch_function,
)

# ---- setitem ----


def setitem_replacements() -> Mapping[str, patch.Make | patch.Computed]:
    """Return what to put where; Dynamo has to be imported."""
    return {
        f"{TENSOR_VARIABLE}.method___setitem__": _carry_out,
        f"{TENSOR_VARIABLE}.requires_grad": patch.Computed(_requires_grad),
        f"{TENSOR_VARIABLE}.has_grad_fn": patch.Computed(_has_grad_fn),
    }


def _carry_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the fake tensor of ``m`` go through what ``m[index] = value`` does to autograd's view."""

    def method___setitem__(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        target, value = fake_of(self), fake_of(args[-1])
        if target is None or value is None or not value.requires_grad or target.requires_grad:
            return result
        # A fake tensor has no elements: whichever of them are written, the view that
        # autograd has of it and of its aliases changes in the same way. Where even that can't be
        # done, the graph itself raises when it runs, as it would have.
        with contextlib.suppress(Exception), without_torch_function():
            target.copy_(value.sum())
        return result

    return method___setitem__


def _requires_grad(variable: Any) -> Any:
    fake = fake_of(variable)
    noted = vars(variable).get("requires_grad")
    return noted if fake is None or noted is None else fake.requires_grad


def _has_grad_fn(variable: Any) -> Any:
    """Only where the note for ``requires_grad`` is outdated: Dynamo has its own for parameters."""
    noted = vars(variable).get("requires_grad")
    now = _requires_grad(variable)
    return vars(variable).get("has_grad_fn") if noted == now else now


def _trace(value: torch.Tensor) -> tuple[torch.Tensor, bool, torch.Tensor, bool]:
    assigned = value.new_zeros(2, 2)
    assigned[0] = value
    viewed = value.new_zeros(2, 2)
    viewed[0][0] = value
    return assigned, assigned.requires_grad, viewed, viewed.requires_grad


def setitem_not_needed() -> str | None:
    """Say why the guard is not needed; None if it is, and while nothing has imported Dynamo."""
    return _setitem_tried() if DYNAMO in sys.modules else None


@functools.cache
def _setitem_tried() -> str | None:
    """Trace two assignments, once per process, without compiling anything."""
    traced = []

    def backend(graph: Any, _: Any) -> Any:
        traced.append(graph)
        return graph.forward

    # A code object of its own, so that no limit on recompilations is touched.
    _trace.__code__ = _trace.__code__.replace()
    with tracing_unseen():
        value = torch.ones((), device="cpu", requires_grad=True)
        try:
            _, assigned, _, viewed = torch.compile(_trace, backend=backend)(value)
        except Exception:  # noqa: BLE001  a compiler that can't even do that proves nothing
            return None
    if traced and assigned and viewed:
        return "requires_grad is right while tracing on this torch"
    return None


# ---- slice_scatter ----


def slice_scatter_replacements() -> Mapping[str, patch.Make]:
    """Return what to put where; Dynamo has to be imported."""
    return {CALL_USER_COMPILER: _rewrite_first}


def slice_scatter_not_needed() -> str | None:
    """Say why the guard is not needed; None if it is, and while nothing has imported Dynamo."""
    return _slice_scatter_tried() if DYNAMO in sys.modules else None


@functools.cache
def _slice_scatter_tried() -> str | None:
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
        elif depth == 0 and name in _SIGNATURES and node.op in {"call_function", "call_method"}:
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
