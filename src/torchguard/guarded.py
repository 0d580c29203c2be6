"""guarded(): a scope in which every operation is exception-safe."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from types import MethodWrapperType, TracebackType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from torchguard import patching, stepping_aside
from torchguard.attempt import Attempt, undo_in_place
from torchguard.metadata import capture
from torchguard.resize import guard_resize_, guard_resize_as_, guard_set_
from torchguard.rollback import Saved
from torchguard.writes import Writes, writes_of

__all__ = ["Guarded", "guarded"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Plan = Writes | Callable[..., Any] | None

_UNKNOWN: Any = object()
_PLANS: dict[Any, _Plan] = {}
_PLANS_LIMIT = 4096  # torch has about 2,000; a program that makes functions must not fill memory
_GUARDS = {"resize_": guard_resize_, "resize_as_": guard_resize_as_}

# The one in-place method that torch shows to no mode and no subclass.
_UNSEEN = "torch.Tensor.set_"


def _plan(function: Callable[..., Any]) -> _Plan:
    """Decide, once for each function, how its calls are guarded.

    None: it writes nothing unless it gets ``out=``. A callable: call that one
    instead. Else: what it writes to.
    """
    plan: _Plan = writes_of(function)
    name = getattr(function, "__name__", "").partition(".")[0]
    if plan is not None and name in _GUARDS:
        plan = _GUARDS[name](function)
    if len(_PLANS) >= _PLANS_LIMIT:
        _PLANS.clear()
    _PLANS[function] = plan
    return plan


class _Mode(TorchFunctionMode):
    """Sees every torch call of its thread while it is on the stack."""

    def __init__(self, *, data: bool) -> None:
        super().__init__()
        self._data = data

    def __torch_function__(  # noqa: C901  in one frame: a traceback gains one line
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if type(func) is MethodWrapperType:  # an attribute is read or set: x.data, x.grad
            return func(*args, **kwargs)
        plan = _PLANS.get(func, _UNKNOWN)
        if plan is _UNKNOWN:
            plan = _plan(func)
        if plan is not None:
            if not isinstance(plan, Writes):
                return plan(*args, **kwargs)
            if plan.out_place is not None:
                args, kwargs = plan.out_place.by_name(args, kwargs)
        if kwargs.get("out") is None:
            if plan is None:
                return func(*args, **kwargs)
            if plan.only_first and not self._data and args and isinstance(args[0], torch.Tensor):
                # The common case, x.add_(y), without the general machinery.
                metadata = capture(args[0])
                try:
                    return func(*args, **kwargs)
                except BaseException as error:
                    saved = Saved(args[0], metadata, None)
                    undo_in_place(saved, error, elements=plan.elements)
                    raise
        attempt = Attempt(plan, args, kwargs, data=self._data)
        try:
            result = func(*attempt.args, **attempt.kwargs)
        except BaseException as error:
            attempt.undo(error)
            raise
        return attempt.finish(result)


class _ModeSeenByDynamo(_Mode):
    """Stands on the stack while Dynamo traces, where it can't be taken off; does nothing there."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class _Scopes(threading.local):
    """The scopes a thread is in; one mode serves them all."""

    def __init__(self) -> None:
        self.open: list[bool] = []


_scopes = _Scopes()


class Guarded(contextlib.ContextDecorator):
    """What :func:`guarded` returns: a context manager and a decorator, usable again and again."""

    def __init__(self, *, data: bool) -> None:
        self._data = data
        self._entered = threading.local()

    def __enter__(self) -> None:
        # An inner scope needs a mode of its own only if it adds the copies.
        covered = _scopes.open and (_scopes.open[-1] or not self._data)
        mode = None
        if not covered:
            patching.apply([(_UNSEEN, guard_set_)])
            can_step_aside = stepping_aside.begin()
            mode = (_Mode if can_step_aside else _ModeSeenByDynamo)(data=self._data)
            mode.__enter__()  # type: ignore[no-untyped-call]
            stepping_aside.add(mode)
        _scopes.open.append(self._data or bool(_scopes.open and _scopes.open[-1]))
        self._modes().append(mode)

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        mode = self._modes().pop()
        _scopes.open.pop()
        if mode is not None:
            stepping_aside.remove(mode)
            mode.__exit__(exception_type, exception, traceback)  # type: ignore[no-untyped-call]
            stepping_aside.end()
            patching.undo([_UNSEEN], leave_conflicts=True)

    def _modes(self) -> list[_Mode | None]:
        modes: list[_Mode | None] | None = getattr(self._entered, "modes", None)
        if modes is None:
            modes = self._entered.modes = []
        return modes

    def __call__(self, function: _Function) -> _Function:
        """Run every call of ``function`` in the scope."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]


def guarded(*, data: bool = False) -> Guarded:
    """Make every operation in a scope exception-safe, each ``out=`` variant included.

    Equals the same code without the scope as long as nothing fails: same results,
    same tensors, and compiled functions keep their graphs. Use it as a context
    manager or as a decorator, as often as you like; scopes nest, and each covers
    its own thread.

    When an operation in the scope raises, every tensor it would have written has
    its shape, stride, storage offset and storage back. Elements may be half
    written (``index_put_`` with one bad index has stored the good rows), so the
    version counter of such a tensor moves on: a backward that needs the old
    values raises instead of computing a wrong gradient.

    Inside a compiled function the scope does nothing: what the compiler has
    turned into kernels can't be undone one operation at a time.

    Args:
        data: also put the elements back, and then the version counter. Whatever
            an operation is about to write in place is copied first, every time:
            that costs its memory once more and the time of a ``clone()``.

    Raises:
        NonResizableStorageError: a tensor in shared memory would have to grow;
            plain torch kills the process.

    Upstream: https://github.com/pytorch/pytorch/issues/170298

    Example:
        >>> import numpy as np, torch, torchguard
        >>> out = torch.from_numpy(np.empty(0, dtype=np.float32))
        >>> with torchguard.guarded():
        ...     try:
        ...         torch.add(torch.ones(3), 1, out=out)
        ...     except RuntimeError:
        ...         print(out.shape)
        torch.Size([0])
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()  # type: ignore[return-value]
    return Guarded(data=data)
