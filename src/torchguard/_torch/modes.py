"""Who sees a call of torch besides torch: subclasses, modes, transforms."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils import _python_dispatch

from torchguard._torch.schemas import original_of
from torchguard._torch.tensors import has_own_dispatch, private

TorchDispatchMode = _python_dispatch.TorchDispatchMode

_Scope = Callable[[], contextlib.AbstractContextManager[None]]

without_torch_function: _Scope = torch._C.DisableTorchFunction
"""A scope in which neither subclasses nor modes see a call; there is no public spelling."""

without_torch_dispatch: _Scope = private("_C._DisableTorchDispatch", contextlib.nullcontext)


def without_dispatch_modes(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Run operators on a tensor unseen by dispatch modes, unless its own class needs them."""
    return contextlib.nullcontext() if has_own_dispatch(tensor) else without_torch_dispatch()


# The context managers behind torch.no_grad and torch.inference_mode, written in C: those
# written in Python can be interrupted on the way out, and the thread's mode stays changed.
_set_grad_enabled: Callable[[bool], Any] = private("_C._set_grad_enabled", torch.set_grad_enabled)
_inference_mode: Callable[[bool], Any] = private("_C._InferenceMode", torch.inference_mode)


def call_unrecorded(tensor: torch.Tensor, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` so that it may write to ``tensor`` and autograd records nothing."""
    if tensor.is_inference():
        with _inference_mode(True):  # an inference tensor takes writes in no other
            return function(*args)
    return call_with_grad(False, function, *args)


def call_with_grad(mode: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` under ``torch.set_grad_enabled(mode)``."""
    before = torch.is_grad_enabled()
    try:
        _set_grad_enabled(mode)
        return function(*args)
    finally:
        _set_grad_enabled(before)


def overriding(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return those values whose ``__torch_function__`` torch would call."""
    # A class that does not want to be asked sets the disabled one; nn.Parameter does:
    # https://docs.pytorch.org/docs/stable/notes/extending.html#subclassing-torch-tensor
    return tuple(
        value
        for value in values
        if type(value) is not torch.Tensor
        and getattr(type(value), "__torch_function__", torch._C._disabled_torch_function_impl)
        is not torch._C._disabled_torch_function_impl
    )


innermost_transform: Callable[[], Any] = private(
    "_C._functorch.peek_interpreter_stack", lambda: None
)
"""Returns the transform of ``torch.func`` this runs inside of, None outside of any."""


def inside_transform() -> bool:
    """Whether this runs inside a transform such as ``torch.func.vmap``."""
    return innermost_transform() is not None


autocast_is_on: Callable[[], bool] = private(
    "_C._is_any_autocast_enabled", torch.is_autocast_enabled
)
"""Whether autocast is on for any device; the public function is asked for one at a time."""


def is_recorded() -> bool:
    """Whether ``make_fx`` or ``torch.export`` writes down what is called here."""
    recorder = sys.modules.get("torch.fx.experimental.proxy_tensor")
    mode = getattr(recorder, "get_proxy_mode", None)
    return mode is not None and mode() is not None


def shown_for(name: str) -> Any:
    """Return what a subclass is shown for a method: for ``__iadd__`` that is ``add_``."""
    method = original_of(getattr(torch.Tensor, name))
    if not name.startswith("__") or name.endswith("item__"):
        return method
    seen: list[Any] = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *_: Any) -> Any:
            seen.append(func)
            return NotImplemented

    with contextlib.suppress(TypeError):
        method(torch.ones(1, device="cpu").as_subclass(Asked), 1)
    return original_of(seen[0]) if seen else method


def show_overriding(
    shown: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_operator: bool
) -> Callable[..., Any]:
    """Return what calls ``__torch_function__`` as torch does."""
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat += value if isinstance(value, (tuple, list)) else (value,)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return handle_torch_function(shown, overriding(tuple(flat)), *args, **kwargs)
        except TypeError:
            if is_operator:  # the other operand may know what to do
                return NotImplemented
            raise

    return call


def values_can_be_read(value: torch.Tensor) -> bool:
    """Whether a plain strided tensor has values, and looking at them is recorded nowhere."""
    return (
        type(value) in _PLAIN
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested)
        and not is_wrapped(value)
        and torch._C._get_tracing_state() is None
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)

is_wrapped: Callable[[torch.Tensor], bool] = private(
    "_C._functorch.is_functorch_wrapped_tensor", lambda _: inside_transform()
)
"""Whether a tensor stands for another one inside a transform of ``torch.func``."""


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that others of ``torch.func`` are wrapped around; itself outside of any."""
    while _get_unwrapped is not None and is_wrapped(tensor):
        tensor = _get_unwrapped(tensor)
    return tensor


_get_unwrapped: Any = private("_C._functorch.get_unwrapped", None)


def computing_unseen(values: tuple[Any, ...] = ()) -> contextlib.AbstractContextManager[object]:
    """Look at these values, and compute, so that no mode and no subclass among them sees it."""
    # Most calls are made where there is none, and the scopes cost more than what is computed.
    modes = torch._C._len_torch_function_stack() or _count_dispatch_modes()
    return _unseen() if modes or has_torch_function(values) else _SEEN_BY_NONE


_SEEN_BY_NONE = contextlib.nullcontext()
_count_dispatch_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack", lambda: 1)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    with without_torch_function(), without_torch_dispatch():
        yield
