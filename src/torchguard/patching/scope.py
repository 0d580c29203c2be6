"""guarded(): guards that are on while a block or a function runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch

from torchguard._environment import is_off
from torchguard._public import called, public
from torchguard.patching.guards import GuardName
from torchguard.patching.install import enter, known, leave

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Scope:
    """What :func:`guarded` returns: a context manager and a decorator, usable again and again."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._entered: list[tuple[str, ...]] = []

    def __enter__(self) -> None:
        self._entered.append(enter(self._names))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        leave(self._entered.pop(), failed=kind is not None)

    def __call__(self, function: _Function) -> _Function:
        """Run every call of ``function`` in the scope; of a generator, every step.

        Raises:
            TypeError: ``function`` is a class or an asynchronous generator.
        """
        wrong = isinstance(function, type) or inspect.isasyncgenfunction(function)
        if wrong or not callable(function):
            name = getattr(function, "__qualname__", type(function).__name__)
            raise TypeError(
                f"guarded: function is {name}, expected a function, a method, a generator or a "
                "coroutine; or write `with torchguard.guarded():` around operations"
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
        """Run each step of a generator in the scope, and nothing between the steps."""
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


@called("")
@public
def guarded(*names: GuardName) -> Scope:
    """Switch guards on for a block of code: the names are those of :func:`install`.

    Equals the block without it if nothing fails. Use it as a context manager, or as the decorator
    of a function, a generator or a coroutine. The guards are on for the whole process as long as a
    scope that names them is open; scopes nest and overlap.

    The first scope of a guard replaces functions of PyTorch, as :func:`install` does. They stay
    replaced until :func:`uninstall` is called, and do nothing while no scope is open. A guard that
    does not protect is left out with a warning. A function that was imported by name before the
    first scope (``from torch import add``) is called as it is. A function that was compiled before
    it may be compiled once more.

    Args:
        *names: which guards; none for ``"resize"`` and ``"out"``: an operation that fails leaves
            the shape, strides, storage offset and storage of its tensors unchanged. ``"all"``
            is every guard.

    Raises:
        ValueError: a guard's name is unknown.
        NonResizableStorageError: with ``"resize"`` or ``"out"``, a tensor in shared memory would
            have to grow; PyTorch kills the process.
        IndexOutOfRangeError, ValueOutOfRangeError, ZeroDivisorError: with ``"checks"``, at the end
            of the scope at the latest.

    Upstream: https://github.com/pytorch/pytorch/issues/170298,
    https://github.com/pytorch/pytorch/issues/197554

    Cost:
        As :func:`install`, while the scope is open. Entering a scope costs microseconds.

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
        return contextlib.nullcontext()  # type: ignore[return-value]
    if len(names) == 1 and callable(names[0]):
        name = getattr(names[0], "__name__", "function")
        raise TypeError(
            f"guarded: got {name}, expected names of guards; write @torchguard.guarded() "
            f"above {name}"
        )
    wanted = known(names, "guarded") or ("resize", "out")
    return Scope(() if is_off() else wanted)
