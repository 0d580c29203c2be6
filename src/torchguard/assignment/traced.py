"""The guard "setitem": indexed assignment in compiled code.

While tracing, Dynamo answers ``m.requires_grad`` from a note made when it first saw
``m``, and decides by the same note whether a custom ``torch.autograd.Function`` has a backward.
Up to 2.8 ``m[index] = value`` is not carried out on the fake tensor that stands for ``m``
(https://github.com/pytorch/pytorch/issues/169179). On every release up to 2.15 at least, the note
is updated, if at all, for the tensor that was written to, not for others that share its memory:
after ``m[0][0] = value`` the note for ``m`` is wrong, up to 2.9 after ``m.copy_(value)``, up to
2.11 after ``m.detach_()`` (https://github.com/pytorch/pytorch/issues/176854). The guard carries
the assignment out, and reads the fake tensor instead of the note. The graph stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torchguard._torch import (
    TENSOR_VARIABLE,
    fake_of,
    patch,
    without_torch_function,
)

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
