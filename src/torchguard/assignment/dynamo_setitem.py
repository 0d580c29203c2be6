"""The guard "setitem": what Dynamo believes of ``requires_grad`` is what the tensor says.

While tracing, Dynamo answers ``m.requires_grad`` from a note made when it first saw
``m``, and decides by the same note whether a custom ``torch.autograd.Function`` has a
backward. Two things make the note wrong:

- Up to 2.8 ``m[index] = value`` is written into the graph but not carried out on the
  fake tensor that stands for ``m``
  (https://github.com/pytorch/pytorch/issues/169179).
- On every release up to 2.15 at least, the note is made anew, if at all, for the tensor that was
  written to, not for others that share its memory: after ``m[0][0] = value``, an
  assignment into a view, the note for ``m`` is wrong. So it is, up to 2.9, after
  ``m.copy_(value)`` and, up to 2.11, after ``m.detach_()``
  (https://github.com/pytorch/pytorch/issues/176854).

The guard carries the assignment out on the fake tensor where Dynamo has not, and
reads the fake tensor instead of the note. The graph stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchguard._torch import (
    DYNAMO,
    TENSOR_VARIABLE,
    fake_of,
    patch,
    tracing_unseen,
    without_torch_function,
)


def replacements() -> Mapping[str, patch.Make | patch.Computed]:
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
        # autograd has of it and of its aliases changes alike. Where even that can't be
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


def not_needed() -> str | None:
    """Say why the guard is not needed; None if it is, and while nothing has imported Dynamo."""
    return _tried() if DYNAMO in sys.modules else None


@functools.cache
def _tried() -> str | None:
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
