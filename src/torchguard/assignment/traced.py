"""The guards "setitem" and "slice_scatter": indexed assignment in compiled code.

**"setitem"**: while tracing, Dynamo answers ``m.requires_grad`` from a note made when it first saw
``m``, and decides by the same note whether a custom ``torch.autograd.Function`` has a backward.
Up to 2.8 ``m[index] = value`` is not carried out on the fake tensor that stands for ``m``
(https://github.com/pytorch/pytorch/issues/169179). On every release up to 2.15 at least, the note
is updated, if at all, for the tensor that was written to, not for others that share its memory:
after ``m[0][0] = value`` the note for ``m`` is wrong, up to 2.9 after ``m.copy_(value)``, up to
2.11 after ``m.detach_()`` (https://github.com/pytorch/pytorch/issues/176854). The guard carries
the assignment out, and reads the fake tensor instead of the note. The graph stays as it is.

**"slice_scatter"**: the gradient of ``torch.slice_scatter`` for its input is the output's gradient
with zeros scattered into it. After a ``.sum()`` that is one number, expanded to the shape, and up
to 2.11 the rule that gives the result's strides keeps its stride 0; inductor believes it, and all
positions share one element. The same holds for ``select_scatter`` and ``diagonal_scatter``
(https://github.com/pytorch/pytorch/issues/180164, 180771, 180772, 183898, 183602). The guard
writes each such call in Dynamo's graph as ``out = input.clone()`` and an assignment into a view of
``out``. It is the graph that is changed, not inductor: caches on disk are keyed by it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchguard._torch import (
    CALL_USER_COMPILER,
    DYNAMO,
    TENSOR_VARIABLE,
    fake_of,
    patch,
    without_torch_function,
)

# ---- setitem ----


SETITEM_SWITCH = patch.Switch()
"""Whether the guard "setitem" is on."""


def setitem_replacements() -> patch.Replacements:
    """Return what to put where; Dynamo has to be imported."""
    return {
        f"{TENSOR_VARIABLE}.method___setitem__": _carry_out,
        f"{TENSOR_VARIABLE}.requires_grad": _computed("requires_grad", _requires_grad),
        f"{TENSOR_VARIABLE}.has_grad_fn": _computed("has_grad_fn", _has_grad_fn),
    }


def _computed(name: str, compute: Callable[[Any], Any]) -> property:
    """Make an attribute that is computed when it is read; what is assigned is kept beside it."""

    def read(variable: Any) -> Any:
        noted = vars(variable)
        if name not in noted:
            raise AttributeError(f"{type(variable).__name__!r} object has no attribute {name!r}")
        return compute(variable) if SETITEM_SWITCH.on else noted[name]

    def write(variable: Any, value: Any) -> None:
        vars(variable)[name] = value

    return property(read, write)


def _carry_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the fake tensor of ``m`` go through what ``m[index] = value`` does to autograd's view."""

    def method___setitem__(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        target, value = fake_of(self), fake_of(args[-1])
        if not SETITEM_SWITCH.on or target is None or value is None:
            return result
        if not value.requires_grad or target.requires_grad:
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


# ---- slice_scatter ----


def slice_scatter_replacements() -> patch.Replacements:
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
        elif depth == 0 and name in _AS_ASSIGNMENT and node.op in {"call_function", "call_method"}:
            _as_assignment(module.graph, node, name)
            changed = True
    if changed:
        module.recompile()


def _name_of(target: Any) -> str:
    """``slice_scatter`` for ``torch.slice_scatter``, the method and ``torch.ops.aten``'s."""
    if isinstance(target, str):
        return target
    return str(getattr(target, "__name__", "")).partition(".")[0]


def _as_assignment(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Write the assignment in place of a node."""
    # https://docs.pytorch.org/docs/stable/fx.html#proxy-retracing
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def proxy_of(each: fx.Node) -> Any:
        return fx.Proxy(each, tracer)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxy_of)
    # torch calls it input, and torch.ops.aten self.
    kwargs = {"t" if key in {"input", "self"} else key: each for key, each in kwargs.items()}
    try:
        with graph.inserting_before(node):
            out: Any = _AS_ASSIGNMENT[name](*args, **kwargs)
    except TypeError:  # another function of that name
        return
    out.node.meta.update(node.meta)
    node.replace_all_uses_with(out.node)
    graph.erase_node(node)


def _slice_scatter(  # noqa: PLR0917  torch's own arguments
    t: Any, src: Any, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    out = t.clone()
    # There is no method that takes a slice of any dim.
    out.transpose(0, dim)[start:end:step].transpose(0, dim).copy_(src)
    return out


def _select_scatter(t: Any, src: Any, dim: Any, index: Any) -> Any:
    out = t.clone()
    out.select(dim, index).copy_(src)
    return out


def _diagonal_scatter(t: Any, src: Any, offset: Any = 0, dim1: Any = 0, dim2: Any = 1) -> Any:
    out = t.clone()
    out.diagonal(offset, dim1, dim2).copy_(src)
    return out


_AS_ASSIGNMENT: dict[str, Callable[..., Any]] = {
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "diagonal_scatter": _diagonal_scatter,
}
