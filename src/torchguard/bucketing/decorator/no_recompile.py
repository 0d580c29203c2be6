"""no_recompile(): a scope in which nothing may compile."""

from __future__ import annotations

import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import torch

from torchguard import _torch
from torchguard._public import public
from torchguard.errors import RecompileError

_Function = TypeVar("_Function", bound=Callable[..., Any])

_QUOTED = 3
_LATER = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)

_scopes = threading.local()


@overload
def no_recompile(function: _Function, /) -> _Function: ...
@overload
def no_recompile(function: None = None, /) -> _Scope: ...
@public
def no_recompile(function: Any = None, /) -> Any:
    """Raise where anything would be compiled, for a loop that has to run at full speed.

    Equals ``with torch.compiler.set_stance("fail_on_recompile"):``, and the error names the
    arguments and quotes what changed. That setting is the whole process's, so it holds for
    other threads too, which get torch's ``RuntimeError``. What is bucketed raises
    :class:`RecompileError` where it is called; for any other compiled function torch raises a
    ``RuntimeError`` there, which leaves this scope as a ``RecompileError``, so inside of it
    ``except RuntimeError`` catches both.

    Also a decorator, ``@no_recompile`` or ``@no_recompile()``: each call is such a scope. One scope
    is entered once.

    Args:
        function: what to decorate; left out, a scope is returned.

    Raises:
        TypeError: ``function`` can't be called, or runs later: a coroutine, a generator.
        RecompileError: something in the scope was about to compile, for the first time or again.

    Example:
        >>> import torch
        >>> from torchguard import no_recompile
        >>> double = torch.compile(lambda x: 2 * x, backend="eager")
        >>> with no_recompile():  # doctest: +ELLIPSIS
        ...     double(torch.ones(3))
        Traceback (most recent call last):
        torchguard.errors.RecompileError: no_recompile: <lambda> was about to compile with x ...
    """
    if function is not None and not callable(function):
        raise TypeError(
            f"no_recompile: function is {type(function).__name__}, expected a function: write "
            "@no_recompile, or `with no_recompile():` around the calls"
        )
    return _Scope() if function is None else _Scope()(function)


class _Scope(contextlib.AbstractContextManager[None]):
    """What :func:`no_recompile` returns, a context manager and a decorator."""

    def __init__(self) -> None:
        self._scope = _scope()

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(self, *failure: object) -> bool | None:
        return self._scope.__exit__(*failure)  # type: ignore[arg-type]

    def __call__(self, function: _Function) -> _Function:
        """Run every call of ``function`` in a scope of its own."""
        for later in _LATER:
            if later(function) or later(type(function).__call__):
                name = getattr(function, "__qualname__", type(function).__name__)
                raise TypeError(
                    f"no_recompile: {name} does not run when it is called; write "
                    "`with no_recompile():` around what it does"
                )
        return self._scope(function)


@contextlib.contextmanager
def _scope() -> Iterator[None]:
    before = getattr(_scopes, "count", 0)
    _scopes.count = before + 1
    try:
        # Compiled frames ask for the stance; a backward, compiled when it first runs, does not.
        # https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html
        with _torch.stance("fail_on_recompile"), _torch.before_backward(_refuse):
            yield
    except RuntimeError as error:
        if isinstance(error, RecompileError) or "fail_on_recompile" not in str(error):
            raise
        raise RecompileError(_describe(error)) from error
    except AssertionError as error:  # what some releases make of an error of _refuse
        if isinstance(error.__context__, RecompileError):
            raise error.__context__ from None
        raise
    finally:
        _scopes.count = before


def compiling_is_refused() -> bool:
    """Whether this thread is in such a scope."""
    return getattr(_scopes, "count", 0) > 0


def failed_guards(error: RuntimeError) -> str | None:
    """Return the guards of Dynamo that failed, empty where it does not say; None if none did."""
    text = str(error)
    if "fail_on_recompile" not in text:
        return None
    _, found, rest = text.partition("guard failure(s):")
    # Behind a guard comes the line of source that asked for it, and a stack of such lines.
    rest = rest.partition("User stack trace:")[0]
    lines = [line.partition("  #")[0].strip().lstrip("- ") for line in rest.splitlines() if found]
    # "0/3: tensor 'x' dtype mismatch": the number of the compiled variant says nothing here.
    lines = [line.partition(": ")[2] or line for line in lines if line]
    return "; ".join(dict.fromkeys(lines[:_QUOTED]))


def _refuse(graph: str) -> None:
    raise RecompileError(
        f"no_recompile: the backward of compiled graph {graph} was about to compile: run it once "
        "before, as warmup() does"
    )


def _describe(error: RuntimeError) -> str:
    """Return what was about to compile: the frame that called it knows the function and its input.

    Dynamo's own object for the frame to compile, also in the traceback, is not to be touched:
    it reads memory that is gone by now.
    """
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # What torch.compile has returned: _fn in 2.6, compile_wrapper in later releases.
        # https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/eval_frame.py
        if frame.f_code.co_name in {"compile_wrapper", "_fn"}:
            values = frame.f_locals
            if callable(values.get("fn")) and "args" in values:
                found = (values["fn"], values["args"], values.get("kwargs", {}))
    if found is None:
        return f"no_recompile: something was about to compile: {error}"
    function, args, kwargs = found
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    shapes = ", ".join(
        f"{name} of shape {tuple(value.shape)} and {value.dtype}"
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
    )
    name = getattr(function, "__qualname__", type(function).__name__)
    because = failed_guards(error)
    return (
        f"no_recompile: {name} was about to compile with "
        f"{shapes or 'no tensor among its arguments'}"
        + (f", because {because}" if because else "")
        + ": call it with these before"
    )
