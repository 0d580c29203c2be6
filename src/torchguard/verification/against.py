"""``verified(against="python")``: a call that compiles is compared with plain Python."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from torchguard.equivalence.copies import overwrite_free_memory
from torchguard.equivalence.perturb import perturb_all
from torchguard.errors import MiscompilationWarning
from torchguard.verification.backend import VerifiedBackend, comparison
from torchguard.verification.check import (
    UnverifiedError,
    checking,
    replacement,
    require_comparable,
)
from torchguard.verification.report import (
    GraphRecord,
    message_of,
    note_mismatch,
    say_unverified,
)
from torchguard.verification.undone import Reached, Run, differences_of


class _CompilesError(BaseException):
    """Ends a call that is about to compile, before any of it has run."""


class AgainstPython:
    """Compares calls of one compiled function with the same calls as plain Python."""

    def __init__(
        self, function: Any, python: Callable[..., Any], made: Any, backend: VerifiedBackend
    ) -> None:
        self.function = function
        """What the user wrote, a function or a module."""
        self.backend = backend
        # Also if a compiled function calls it.
        self.as_python = torch.compiler.disable(python)
        self.compiled = compiles_inside(made, self.before_compiling)
        self._runs: Callable[..., Any] | None = None  # in place of what was traced wrong
        self._calls = 0
        self._right: int | None = None  # the number of the last call that was right
        self._due = True  # the next call is compared: the first, or one compiled halfway

    @functools.cached_property
    def record(self) -> GraphRecord:
        """What the report says."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        made = GraphRecord(self.backend.function or name, _place_of(self.function), 0)
        made.runs = "compiled"
        self.backend.add(made)
        return made

    def before_compiling(self) -> contextlib.AbstractContextManager[None]:
        """End the call if Dynamo is about to compile for it, and nothing of it has run so far."""
        if comparison.watched is self:
            if is_entrance(sys._getframe(1), AgainstPython.call.__code__):
                raise _CompilesError
            self._due = True
        return contextlib.nullcontext()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call; if it compiles something, compare it first."""
        if comparison.runs == "python":
            return self.as_python(*args, **kwargs)
        if comparison.runs or self._runs is not None:
            return (self._runs or self.compiled)(*args, **kwargs)
        self._calls += 1
        every = self.backend.options.every
        before = comparison.watched
        try:
            if not self._due and (every is None or self._calls % every):
                comparison.watched = self
                try:
                    return self.compiled(*args, **kwargs)
                except _CompilesError:
                    pass
            self._due, comparison.watched = False, None
            # Disabled: a compiled function that has called us would trace what a check does.
            torch.compiler.disable(self._check)(args, kwargs)
            return (self._runs or self.compiled)(*args, **kwargs)
        finally:
            comparison.watched = before

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare one call, keep the record, and replace what is wrong."""
        found: list[Difference] = []
        try:
            with checking(self.record):
                found = self._differences(args, kwargs)
                if not found:
                    self.record.status, self.record.reason = "verified", ""
                    self._right = self._calls
        finally:
            comparison.runs = ""
        say_unverified(self.record)
        if found:
            self._replace(found)

    def _differences(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Difference]:
        reached = Reached(self.function, args, kwargs)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise UnverifiedError("ranks would run a collective a different number of times")
        if reached.problem is not None:
            raise UnverifiedError(reached.problem)
        require_comparable(reached.tensors, self.backend.options.max_bytes, reached.names)

        def as_python(change: Callable[[Sequence[Any]], None] | None = None) -> Run:
            comparison.runs = "python"
            with _nothing_compiles():
                run = reached.run(self.as_python, args, kwargs, change=change)
                if run.left.backward_error is not None:
                    kept = reached.run(self.as_python, args, kwargs, change=change, keeps=True)
                    run.left.gradients = kept.left.gradients
                return run

        def perturbed(seed: int, written: Iterable[torch.Tensor]) -> Run:
            return as_python(lambda values: perturb_all(seed, values, written))

        python = as_python()
        comparison.runs = "compiled"
        compiled = reached.run(self.compiled, args, kwargs)
        error, by_compiled = python.left.error, compiled.left.error
        if error is not None and by_compiled is not None:
            if self._right is not None:
                return []
            raise UnverifiedError(f"Python raises {type(error).__name__}")
        if is_error_of_compiler(by_compiled):
            raise UnverifiedError(f"it can't be compiled: {type(by_compiled).__name__}")
        found = differences_of(python, compiled, perturbed)
        if found:
            # What Python does not do twice is not compared, such as reading unwritten memory.
            overwrite_free_memory([*python.results.values()])
            again = differences_of(python, as_python(), perturbed)
            unsteady = {(each.part, each.key, each.kind) for each in again}
            found = [each for each in found if (each.part, each.key, each.kind) not in unsteady]
        return found

    def _replace(self, found: list[Difference]) -> None:
        """Warn or raise, as ``on_mismatch`` says, and decide what runs from now on."""
        record, action = self.record, self.backend.options.on_mismatch
        note_mismatch(record, found, action, "Python")
        head = f"Dynamo (torch {torch.__version__}) traced `{record.function}`"
        more = []
        if self._right is not None:
            more.append(f"last right comparison: {self._calls - self._right} calls ago")
        text = message_of(record, head, found, action, *more)
        self._runs = replacement(action, text, self.as_python, self.compiled)
        record_event("miscompiled", "verified", f"{head} wrong", is_said=True)
        if action != "raise":
            warn_user("miscompiled", text, MiscompilationWarning)


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


def compare_with_python(made: Any, function: Any, backend: VerifiedBackend) -> Any:
    """Return what ``torch.compile`` has made, whose calls are compared if they compile.

    A module compiled in place is the one that was given, and gets another compiled call.
    """
    in_place = made is function
    python = function
    if isinstance(function, torch.nn.Module):
        python = uncompiled_call(function) if in_place else function.__call__
    check = AgainstPython(function, python, compiled_call(function) if in_place else made, backend)
    compiled = check.compiled

    def call(*args: Any, **kwargs: Any) -> Any:
        return check.call(args, kwargs)

    patch.skip_own_frames()
    skip_frames(call.__code__)
    if isinstance(compiled, torch.nn.Module):
        check.compiled = compiled.forward
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
