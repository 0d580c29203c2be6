"""no_recompile: in this scope nothing may compile."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from types import TracebackType

import torch

from torchguard import internals
from torchguard.errors import RecompileError

__all__ = ["no_recompile", "refused"]

_scopes = threading.local()


@contextlib.contextmanager
def no_recompile() -> Iterator[None]:
    """Raise where anything would be compiled, for a loop that has to run at full speed.

    Equals ``with torch.compiler.set_stance("fail_on_recompile"):``, and the error names the
    arguments and their sizes. That setting is the whole process's, so it holds for other
    threads too.

    Raises:
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
    before = getattr(_scopes, "count", 0)
    _scopes.count = before + 1
    try:
        with torch.compiler.set_stance("fail_on_recompile"), internals.before_backward(_refuse):
            yield
    except RuntimeError as error:
        if isinstance(error, RecompileError) or "fail_on_recompile" not in str(error):
            raise
        raise RecompileError(_said(error)) from error
    except AssertionError as error:  # what some releases make of an error of _refuse
        if isinstance(error.__context__, RecompileError):
            raise error.__context__ from None
        raise
    finally:
        _scopes.count = before


def refused() -> bool:
    """Whether this thread is in such a scope."""
    return getattr(_scopes, "count", 0) > 0


def _refuse(graph: str) -> None:
    raise RecompileError(
        f"no_recompile: the backward of compiled graph {graph} was about to compile: run it once "
        "before, as warmup() does"
    )


def _said(error: RuntimeError) -> str:
    """Say what was about to compile: the frame that called it knows the function and its input.

    Dynamo's own object for the frame to compile, also in the traceback, is not to be touched:
    it reads memory that is gone by now.
    """
    trace: TracebackType | None = error.__traceback__
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_name in {"compile_wrapper", "_fn"}:
            values = trace.tb_frame.f_locals
            if callable(values.get("fn")) and "args" in values:
                found = (values["fn"], values["args"], values.get("kwargs", {}))
        trace = trace.tb_next
    if found is None:
        return f"no_recompile: something was about to compile: {error}"
    function, args, kwargs = found
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    shapes = ", ".join(
        f"{name} of shape {tuple(value.shape)}"
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
    )
    name = getattr(function, "__qualname__", type(function).__name__)
    return (
        f"no_recompile: {name} was about to compile with "
        f"{shapes or 'no tensor among its arguments'}: call it with these sizes before"
    )
