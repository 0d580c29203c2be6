"""guarded(): a scope in which every operation is exception-safe."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator
from types import MethodWrapperType, TracebackType
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch.overrides import TorchFunctionMode

from torchguard import patching, stepping_aside, tracing
from torchguard.attempt import Attempt, undo_in_place
from torchguard.compressed import capture_compressed
from torchguard.internals import without_torch_function
from torchguard.metadata import capture
from torchguard.out import guard_out
from torchguard.resize import guard_set_, refuse_resize_, refuse_resize_as_, refuse_set_
from torchguard.rollback import Saved
from torchguard.writes import Writes, writes_of

__all__ = ["Guarded", "guarded"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Plan(NamedTuple):
    """How the calls of one function are guarded, if it writes anything but ``out=``."""

    writes: Writes
    refuse: Callable[..., None] | None
    """Raises, called with the same arguments, where the call would kill the process."""


_UNKNOWN: Any = object()
_PLANS: dict[Any, _Plan | None] = {}
_PLANS_LIMIT = 4096  # torch has about 2,000; a program that makes functions must not fill memory
_REFUSALS = {"resize_": refuse_resize_, "resize_as_": refuse_resize_as_, "set_": refuse_set_}


def _plan(function: Callable[..., Any]) -> _Plan | None:
    """Decide how a function is guarded, once; None if it writes nothing unless it gets ``out=``."""
    writes = writes_of(function)
    name = getattr(function, "__name__", "").partition(".")[0]
    plan = None if writes is None else _Plan(writes, _REFUSALS.get(name))
    if len(_PLANS) >= _PLANS_LIMIT:
        _PLANS.clear()
    _PLANS[function] = plan
    return plan


def _guard_chain_matmul(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hand ``out`` on: where a mode looks on, torch.chain_matmul forgets it."""
    with_out = guard_out(original)

    def chain_matmul(*matrices: torch.Tensor, out: Any = None) -> Any:
        if out is None:
            return original(*matrices)
        with without_torch_function():
            return with_out(*matrices, out=out)

    return chain_matmul


# What torch shows to no mode, or not whole: patched while a scope is open.
_UNSEEN: tuple[tuple[str, patching.Make], ...] = (
    ("torch.Tensor.set_", guard_set_),
    ("torch.chain_matmul", _guard_chain_matmul),
)


class _Mode(TorchFunctionMode):
    """Sees every torch call of its thread while it is on the stack."""

    def __init__(self, *, data: bool) -> None:
        super().__init__()
        self._data = data

    def __torch_function__(  # noqa: C901, PLR0912  in one frame: a traceback gains one line
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
        writes = None
        if plan is not None:
            writes, refuse = plan
            if refuse is not None:
                refuse(*args, **kwargs)
            if writes.out_place is not None:
                args, kwargs = writes.out_place.by_name(args, kwargs)
        if kwargs.get("out") is None:
            if writes is None:
                return func(*args, **kwargs)
            if writes.only_first and not self._data and args and isinstance(args[0], torch.Tensor):
                # The common case, x.add_(y), without the general machinery.
                metadata = capture(args[0])
                compressed = None
                if metadata is None and not writes.elements:  # a resize_ of a sparse tensor
                    compressed = capture_compressed(args[0])
                try:
                    try:
                        return func(*args, **kwargs)
                    except BaseException as error:
                        saved = Saved(args[0], metadata, None, compressed)
                        undo_in_place(saved, error, elements=writes.elements)
                        raise
                except (
                    BaseException
                ) as error:  # an interrupt in the clause above: see interrupts.py
                    saved = Saved(args[0], metadata, None, compressed)
                    undo_in_place(saved, error, elements=writes.elements)
                    raise
        attempt = Attempt(writes, args, kwargs, data=self._data)
        try:
            try:
                return attempt.finish(func(*attempt.args, **attempt.kwargs))
            except BaseException as error:
                attempt.undo(error)
                raise
        except BaseException as error:  # an interrupt in the clause above: see interrupts.py
            attempt.undo(error)
            attempt.explain(error)
            raise


class _ModeSeenByDynamo(_Mode):
    """Stands on the stack while Dynamo traces, where it can't be taken off; does nothing there."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
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
        covered = (
            _scopes.open and (_scopes.open[-1] or not self._data) and not stepping_aside.is_aside()
        )
        mode = None
        if not covered:
            patching.apply(_UNSEEN)
            tracing.begin()
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
            tracing.end()
            patching.undo([path for path, _ in _UNSEEN], leave_conflicts=True)

    def _modes(self) -> list[_Mode | None]:
        modes: list[_Mode | None] | None = getattr(self._entered, "modes", None)
        if modes is None:
            modes = self._entered.modes = []
        return modes

    def __call__(self, function: _Function) -> _Function:
        """Run every call of ``function`` in the scope; of a generator, every step.

        Raises:
            TypeError: ``function`` is a coroutine function. Other tasks run between its
                steps, in the same thread, and would be in the scope as well. Or a class, of
                which only the making of an instance would be in the scope.
        """
        if isinstance(function, type) or not callable(function):
            kind = "the class " if isinstance(function, type) else ""
            raise TypeError(
                f"guarded: function is {kind}{getattr(function, '__qualname__', repr(function))}, "
                "expected a function or a method: decorate those that change tensors"
            )
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"guarded: {function.__qualname__} is an async function, expected a plain "
                "one; write `with torchguard.guarded():` around the operations between two awaits"
            )
        run = self._run_generator if inspect.isgeneratorfunction(function) else self._run

        def inside(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return function(*args, **kwargs)
            return run(function, args, kwargs)

        # Dynamo keeps its decisions with the code: each function has to have its own.
        inside.__code__ = inside.__code__.replace()
        return functools.wraps(function)(inside)  # type: ignore[return-value]

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self:
            return function(*args, **kwargs)

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
def guarded(function: _Function, /, *, data: bool = False) -> _Function: ...
@overload
def guarded(function: None = None, /, *, data: bool = False) -> Guarded: ...
def guarded(function: Any = None, /, *, data: bool = False) -> Any:
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
    turned into kernels can't be undone one operation at a time. What is compiled
    while a scope is open keeps its gradients: the scope includes the guards
    ``"setitem"`` and ``"slice_scatter"`` of :func:`torchguard.install`.

    Args:
        function: what to decorate, where ``@guarded`` has no parentheses.
        data: also put the elements back, and then the version counter. Whatever
            an operation is about to write in place is copied first, every time:
            that costs its memory once more and the time of a ``clone()``.

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
    return Guarded(data=data) if function is None else Guarded(data=data)(function)
