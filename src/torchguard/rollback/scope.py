"""guarded(): a scope in which every operation is exception-safe."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, TypeVar, overload

import torch

from torchguard._public import public
from torchguard._torch import DYNAMO, EVAL_FRAME_HOOK, on_import, patch
from torchguard._torch.overlays import Standing, overlays_by_owner
from torchguard.assignment.dynamo import (
    setitem_replacements,
    slice_scatter_not_needed,
    slice_scatter_replacements,
)
from torchguard.rollback import interception
from torchguard.rollback.interception import Scope, current, hold, outside

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _wanted() -> tuple[patch.Overlay, ...]:
    if hasattr(sys.modules.get(DYNAMO), "optimize"):  # else it is being imported
        return (*interception.overlays(), *_overlays_of_dynamo())
    return interception.overlays()


_standing = Standing(_wanted, outside)


class Guarded(contextlib.ContextDecorator):
    """What :func:`guarded` returns: a context manager and a decorator, usable again and again."""

    def __init__(self, *, data: bool, overlap: bool) -> None:
        self._data, self._overlap = data, overlap
        self._entered: list[Scope] = []

    def __enter__(self) -> None:
        on_import(DYNAMO, _standing.apply)
        _standing.begin()
        self._entered.append(interception.enter(data=self._data, owner=self, overlap=self._overlap))

    def __exit__(self, *_: object) -> None:
        # Elsewhere than where it was entered, if a generator is closed by another task.
        scope = interception.innermost_open(self) or self._entered[-1]
        self._entered.remove(scope)
        interception.leave(scope)
        _standing.end()

    def __call__(self, function: _Function) -> _Function:
        """Run every call of ``function`` in the scope; of a generator, every step.

        Raises:
            TypeError: ``function`` is a class, of which only the making of an instance would be in
                the scope, or an asynchronous generator: what runs between its steps would be in
                the scope as well.
        """
        if isinstance(function, type) or not callable(function):
            found = "a Tensor" if isinstance(function, torch.Tensor) else repr(function)
            if isinstance(function, type):
                found = f"the class {function.__qualname__}"
            raise TypeError(
                f"guarded: function is {found}, "
                "expected a function or a method: decorate those that change tensors"
            )
        if inspect.isasyncgenfunction(function):
            raise TypeError(
                f"guarded: {function.__qualname__} is an async generator, expected a function, a "
                "generator or a coroutine; write `with torchguard.guarded():` around the "
                "operations between two steps"
            )
        if inspect.iscoroutinefunction(function):

            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return functools.wraps(function)(awaited)  # type: ignore[return-value]
        is_generator = inspect.isgeneratorfunction(function)

        def inside(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return function(*args, **kwargs)
            if is_generator:
                return self._run_generator(function, args, kwargs)
            with self:
                return function(*args, **kwargs)

        # Dynamo keeps its decisions with the code: each function has to have its own.
        inside.__code__ = inside.__code__.replace()
        return functools.wraps(function)(inside)  # type: ignore[return-value]

    def _run_generator(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        step: Callable[[], Any] = functools.partial(next, generator)
        try:
            while True:
                with self:
                    item = step()
                try:
                    step = functools.partial(generator.send, (yield item))
                except GeneratorExit:
                    with self:
                        generator.close()
                    raise
                except BaseException as error:  # noqa: BLE001  thrown in by the caller
                    step = functools.partial(generator.throw, error)
        except StopIteration as stop:
            return stop.value


@overload
def guarded(function: _Function, /, *, data: bool = False, overlap: bool = False) -> _Function: ...
@overload
def guarded(function: None = None, /, *, data: bool = False, overlap: bool = False) -> Guarded: ...
@public
def guarded(function: Any = None, /, *, data: bool = False, overlap: bool = False) -> Any:
    """Make every operation in a scope exception-safe, each ``out=`` variant included.

    Equals the same code without the scope as long as nothing fails: same results,
    same tensors, and compiled functions keep their graphs. It is no mode of torch, so
    whatever asks ``has_torch_function`` gets the same answer. Use it as a context
    manager or as a decorator, as often as you like; scopes nest and overlap, and each
    covers its own thread or asyncio task, and tasks that are started inside.

    When an operation in the scope raises, every tensor it would have written has
    its shape, stride, storage offset and storage back. Elements may be half
    written (``index_put_`` with one bad index has stored the good rows), so the
    version counter of such a tensor moves on: a backward that needs the old
    values raises instead of computing a wrong gradient.

    It sees functions where programs look them up: ``torch.add``, ``x.add_``,
    ``torch.ops.aten.add_``. A builtin that was taken from there before the scope
    (``from torch import add``) is called as it is, and so is what C++ calls.

    When the last scope is left, torch is as it was. A program that has opened 64 keeps the
    methods of ``torch.Tensor`` that write, inert, until :func:`torchguard.uninstall` is
    called: that makes the next scope cheap.

    Inside a compiled function the scope does nothing: what the compiler has
    turned into kernels can't be undone one operation at a time. What is compiled
    while a scope is open keeps its gradients: the scope includes the guards
    ``"setitem"`` and ``"slice_scatter"`` of :func:`torchguard.install`.

    Args:
        function: what to decorate, where ``@guarded`` has no parentheses.
        data: also put the elements back, and then the version counter. Whatever
            an operation is about to write in place is copied first, every time:
            that costs its memory once more and the time of a ``clone()``.
        overlap: compute an operation that reads what it writes (``x -= x[:, :1]``) as if its
            operands were copied first, and warn, as ``install("overlap")`` does for the process.

    Raises:
        NonResizableStorageError: a tensor in shared memory would have to grow;
            plain torch kills the process.

    Upstream: https://github.com/pytorch/pytorch/issues/170298,
    https://github.com/pytorch/pytorch/issues/169179

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
    # Not is_compiling(): that is True as well while another thread compiles.
    if torch.compiler.is_dynamo_compiling():
        return contextlib.nullcontext() if function is None else function
    scope = Guarded(data=data, overlap=overlap)
    return scope if function is None else scope(function)


# ---- torch.compile ----
#
# A scope covers eager code. It is popped while a compiled function runs, or compiles, and pushed
# back afterwards. Every compiled function hands its callback to the interpreter through
# torch._dynamo.eval_frame._maybe_set_eval_frame, once on the way in and, from the same Python
# frame, once on the way out:
# https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/eval_frame.py
#
# While at least one scope is open, code that is compiled has the guards "setitem" and
# "slice_scatter" that install() gives; what was compiled before stays as it is.


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frame: FrameType | None = None
        """The frame at which the compiled code began that this thread is in."""

        self.scope: Scope | None = None
        """The innermost scope at that frame."""


_thread = _Thread()


@functools.cache
def _overlays_of_dynamo() -> tuple[patch.Overlay, ...]:
    # "setitem" finds out in every single case whether it is needed, so nothing is tried first.
    replacements: dict[str, patch.Make | patch.Computed] = dict(setitem_replacements())
    if slice_scatter_not_needed() is None:
        replacements.update(slice_scatter_replacements())
    found: list[patch.Overlay] = []
    for each in ({EVAL_FRAME_HOOK: _hook}, replacements):
        with contextlib.suppress(AttributeError):  # a Dynamo that is built differently
            found += overlays_by_owner(each)
    return tuple(found)


def _hook(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def _maybe_set_eval_frame(callback: Any) -> Any:
        thread = _thread
        if thread.frame is None and current() is None:
            return original(callback)
        caller = sys._getframe(1)
        if thread.frame is caller:  # the way out
            prior = original(callback)
            thread.frame = None
            if current() is None:
                hold(thread.scope)
            thread.scope = None
            return prior
        # False runs what is compiled already. __enter__ is the old with-statement
        # form: its way out has another frame.
        begins = callable(callback) or callback is False
        if begins and thread.frame is None and caller.f_code.co_name != "__enter__":
            thread.frame = caller
            thread.scope = hold(None)
        return original(callback)

    return _maybe_set_eval_frame
