"""Who sees a call of torch besides torch: subclasses, modes, transforms."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, has_torch_function_unary
from torch.utils._python_dispatch import TorchDispatchMode

from torchguard.internals.tensors import has_own_dispatch

__all__ = [
    "TorchDispatchMode",
    "autocast_is_on",
    "has_torch_function_unary",
    "inside_transform",
    "overriding",
    "replace_torch_function_modes",
    "torch_function_modes",
    "without_autocast_cache",
    "without_dispatch_modes",
    "without_torch_function",
]

without_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = (
    torch._C.DisableTorchFunction
)
"""A scope in which neither subclasses nor modes see a call.

The developer notes on extending torch name it; there is no public spelling.
"""


@contextlib.contextmanager
def without_dispatch_modes(tensor: torch.Tensor) -> Iterator[None]:
    """Run operators on a plain tensor unseen by dispatch modes (FLOP counters, loggers).

    A tensor with a dispatcher of its own (a fake tensor) needs it, so for those
    nothing is switched off. Falls back to letting the modes see the call.
    """
    guard = getattr(torch._C, "_DisableTorchDispatch", None)
    if guard is None or has_own_dispatch(tensor):
        yield
        return
    with guard():
        yield


def torch_function_modes() -> list[TorchFunctionMode]:
    """Return the modes on this thread's stack, the outermost first."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def replace_torch_function_modes(modes: list[TorchFunctionMode]) -> None:
    """Put these modes on the stack instead of those that are there."""
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def overriding(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return those values whose ``__torch_function__`` torch would call."""
    return tuple(
        value
        for value in values
        if type(value) is not torch.Tensor
        and getattr(type(value), "__torch_function__", torch._C._disabled_torch_function_impl)
        is not torch._C._disabled_torch_function_impl
    )


_innermost_transform: Callable[[], Any] = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None
)


def inside_transform() -> bool:
    """Whether this runs inside a transform such as ``torch.func.vmap``."""
    return _innermost_transform() is not None


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Let autocast cast every time: it neither keeps casts nor takes those it has kept."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


autocast_is_on: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled
)
"""Whether autocast is on for any device; the public function is asked for one at a time."""
