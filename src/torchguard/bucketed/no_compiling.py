"""no_recompile: in this scope nothing may compile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch

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
        torchguard.errors.RecompileError: ... was about to compile with x of shape (3,) ...
    """
    before = getattr(_scopes, "count", 0)
    _scopes.count = before + 1
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    except RuntimeError as error:
        if isinstance(error, RecompileError) or "fail_on_recompile" not in str(error):
            raise
        raise RecompileError(_said(error)) from error
    finally:
        _scopes.count = before


def refused() -> bool:
    """Whether this thread is in such a scope."""
    return getattr(_scopes, "count", 0) > 0


def _said(error: RuntimeError) -> str:
    """Say what was about to compile: Dynamo's own frames hold the frame it was given."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        values = trace.tb_frame.f_locals
        if trace.tb_frame.f_code.co_name == "fail_callback":
            given = values.get("frame", values.get("args"))
            frame = given[0] if isinstance(given, tuple) and given else given
            if hasattr(frame, "f_locals"):
                return _described(frame)
        trace = trace.tb_next
    return f"no_recompile: something was about to compile: {error}"


def _described(frame: FrameType | Any) -> str:
    shapes = ", ".join(
        f"{name} of shape {tuple(value.shape)}"
        for name, value in frame.f_locals.items()
        if isinstance(value, torch.Tensor)
    )
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    return (
        f"no_recompile: {name} ({code.co_filename}:{code.co_firstlineno}) was about to compile "
        f"with {shapes or 'no tensor among its arguments'}: call it with these sizes before"
    )
