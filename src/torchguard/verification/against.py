"""``verified(against="python")``: a call that compiles is compared with plain Python."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchguard._events import record as record_event
from torchguard._events import warn_user
from torchguard._torch import (
    CALLBACK_OF_CALL,
    compiled_call,
    compiles_inside,
    is_entrance,
    is_error_of_compiler,
    patch,
    set_compiled_call,
    skip_frames,
    uncompiled_call,
)
from torchguard.equivalence.compare import Difference
from torchguard.equivalence.copies import bytes_of, overwrite_free_memory, why_not_copied
from torchguard.errors import MiscompilationError, MiscompilationWarning
from torchguard.verification.backend import VerifiedBackend, comparison
from torchguard.verification.report import GraphRecord, first_of
from torchguard.verification.reproduce_python import python_reproducer_of
from torchguard.verification.undone import Reached, Run, differences_of


class _CompilesError(BaseException):
    """Ends a call that is about to compile, before any of it has run."""


class _UnverifiedError(Exception):
    """The call can't be compared; the text is the reason."""


class _Thread(threading.local):
    watched: AgainstPython | None = None
    """Whose call this thread is in, if it ends when it compiles."""


_thread = _Thread()


@dataclass(eq=False)
class AgainstPython:
    """Compares calls of one compiled function with the same calls as plain Python."""

    function: Any
    """What the user wrote, a function or a module."""

    python: Callable[..., Any]
    """Calls it uncompiled."""

    backend: VerifiedBackend
    calls: int = 0
    _due: bool = True  # the next call is compared: the first, or one compiled when a part had run
    _right: int | None = None  # the number of the last call that was right
    _answer: str = "compiled"  # or "python", or "error"
    _text: str = ""
    call_compiled: Callable[..., Any] = field(init=False)

    @functools.cached_property
    def record(self) -> GraphRecord:
        """What the report says."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        made = GraphRecord(self.backend.function or name, _place_of(self.function), 0)
        made.runs = "compiled"
        self.backend.add(made)
        return made

    @functools.cached_property
    def call_python(self) -> Callable[..., Any]:
        """The function as plain Python, also if a compiled function calls it."""
        called: Callable[..., Any] = torch.compiler.disable(self.python)
        return called

    def before_compiling(self) -> contextlib.AbstractContextManager[None]:
        """End the call if Dynamo is about to compile for it, and nothing of it has run so far."""
        if _thread.watched is self:
            if is_entrance(sys._getframe(1), AgainstPython.call.__code__):
                raise _CompilesError
            self._due = True
        return contextlib.nullcontext()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call; if it compiles something, compare it first."""
        if comparison.runs == "python" or self._answer == "python":
            return self.call_python(*args, **kwargs)
        if self._answer == "error":
            raise MiscompilationError(self._text)
        if comparison.runs:
            return self.call_compiled(*args, **kwargs)
        self.calls += 1
        every = self.backend.checks.every
        if not self._due and (every is None or self.calls % every):
            before, _thread.watched = _thread.watched, self
            try:
                return self.call_compiled(*args, **kwargs)
            except _CompilesError:
                pass
            finally:
                _thread.watched = before
        self._due = False
        # Disabled: a compiled function that has called us would trace what a check does.
        torch.compiler.disable(self._check)(args, kwargs)
        if self._answer != "compiled":
            return self.call(args, kwargs)
        before, _thread.watched = _thread.watched, None
        try:
            return self.call_compiled(*args, **kwargs)
        finally:
            _thread.watched = before

    # ---- the comparison ----

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare one call, and keep the record."""
        record, start = self.record, time.perf_counter()
        before, _thread.watched = _thread.watched, None
        found: list[Difference] = []
        try:
            found = self._differences(args, kwargs)
        except (_UnverifiedError, torch.OutOfMemoryError) as reason:
            self._leave(str(reason).partition("\n")[0])
        except Exception as error:  # noqa: BLE001 - a check must never break the call it checks
            self._leave(f"the check raised {type(error).__name__}: {error}")
        else:
            self._right = self._right if found else self.calls
            record.status, record.reason = "mismatched" if found else "verified", ""
        finally:
            _thread.watched, comparison.runs = before, ""
            record.checks += 1
            record.seconds += time.perf_counter() - start
        if found:
            self._report(found, args, kwargs)

    def _leave(self, reason: str) -> None:
        if self.record.status == "compiled":
            self.record.status, self.record.reason = "unverified", reason

    def _differences(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Difference]:
        reached = Reached(self.function, args, kwargs)
        self._require_comparable(reached)

        def as_python() -> Run:
            comparison.runs = "python"
            with _nothing_compiles():
                return reached.run(self.call_python, args, kwargs)

        python = as_python()
        comparison.runs = "compiled"
        compiled = reached.run(self.call_compiled, args, kwargs)
        if python.error is not None and compiled.error is not None:
            raise _UnverifiedError(f"Python raises {type(python.error).__name__}")
        if is_error_of_compiler(compiled.error):
            raise _UnverifiedError(f"it can't be compiled: {type(compiled.error).__name__}")
        found = differences_of(python, compiled)
        if found:
            # What Python does not do twice is not compared, such as reading unwritten memory.
            overwrite_free_memory(python.outputs)
            unsteady = {
                (each.part, each.key, each.kind) for each in differences_of(python, as_python())
            }
            found = [each for each in found if (each.part, each.key, each.kind) not in unsteady]
        return found

    def _require_comparable(self, reached: Reached) -> None:
        reason, limit = reached.problem, self.backend.checks.max_bytes
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            reason = "ranks would run a collective a different number of times"
        if reason is None and (reason := why_not_copied(reached.tensors)) is not None:
            place, text = reason.removeprefix("input ").split(" ", 1)
            reason = f"{reached.names[int(place)]} {text}"
        if reason is None and limit is not None and (size := bytes_of(reached.tensors)) > limit:
            reason = f"what it reaches has {size:,} bytes, max_bytes is {limit:,}"
        if reason is not None:
            raise _UnverifiedError(reason)

    def _report(
        self, found: list[Difference], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Warn or raise, as ``on_mismatch`` says, and decide what runs from now on."""
        record, action = self.record, self.backend.checks.on_mismatch
        record.differences = tuple(map(str, found))
        record.runs = {"fallback": "Python", "warn": "compiled", "raise": "nothing"}[action]
        reproducer = python_reproducer_of(self.function, args, kwargs, record)
        last = "" if self._right is None else f"{self.calls - self._right} calls ago"
        lines = [
            f"Dynamo (torch {torch.__version__}) traced `{record.function}` wrong:",
            *(f"  {line}" for line in first_of(found)),
            f"  function: {record.place}",
            *([f"  last right comparison: {last}"] if last else []),
            f"  now: {record.runs} runs",
            f"  reproducer: {reproducer}",
        ]
        self._text = "\n".join(lines)
        self._answer = {"fallback": "python", "warn": "compiled", "raise": "error"}[action]
        record_event("miscompiled", "verified", lines[0].rstrip(":"))
        if action != "raise":
            warn_user(self._text, MiscompilationWarning)


@contextlib.contextmanager
def _nothing_compiles() -> Iterator[None]:
    """Let this thread run what others have compiled, such as ``flex_attention``, as Python."""
    guard = f"against python in thread {threading.get_ident()}"
    patch.apply(guard, {CALLBACK_OF_CALL: _none_in_python})
    try:
        yield
    finally:
        patch.undo(guard, leave_conflicts=True)


def _none_in_python(original: Callable[..., Any]) -> Callable[..., Any]:
    def _callback_from_stance(callback: Any) -> Any:
        return None if comparison.runs == "python" else original(callback)

    return _callback_from_stance


# ---- what verified() returns ----


def compare_with_python(made: Any, function: Any, backend: VerifiedBackend) -> Any:
    """Return what ``torch.compile`` has made, whose calls are compared if they compile.

    A module compiled in place is the one that was given, and gets another compiled call.
    """
    in_place = made is function
    compiled = compiled_call(function) if in_place else made
    python = function
    if isinstance(function, torch.nn.Module):
        python = uncompiled_call(function) if in_place else function.__call__
    check = AgainstPython(function, python, backend)
    compiled = check.call_compiled = compiles_inside(compiled, check.before_compiling)

    def call(*args: Any, **kwargs: Any) -> Any:
        return check.call(args, kwargs)

    patch.skip_own_frames()
    skip_frames(call.__code__)
    if isinstance(compiled, torch.nn.Module):
        check.call_compiled = compiled.forward
        vars(compiled)["forward"] = call
        return compiled
    # With torch's marks: Dynamo traces the function itself if it meets this one.
    functools.update_wrapper(call, compiled)
    call.__torchguard_compiled__ = compiled  # type: ignore[attr-defined]
    if in_place:
        set_compiled_call(function, call)
    return function if in_place else call


def _place_of(function: Any) -> str:
    """Return ``file:line`` of a function, or of the forward of a module."""
    called = type(function).forward if isinstance(function, torch.nn.Module) else function
    code = getattr(inspect.unwrap(called), "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"
