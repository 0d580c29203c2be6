"""Signals wait while something is rolled back.

Python runs the handlers of signals (Ctrl-C, an alarm) in the main thread between two bytecodes of
whatever runs there, so their exceptions can appear in an ``except`` clause as well. ::

    try:
        torch_function(tensor)
    except BaseException:
        roll_back(saved.restore)
        raise

A signal is not deferred if it arrives while the call that fails is still running, or in the few
bytecodes between its exception and :func:`roll_back`: then nothing is rolled back.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any

# The functions in C: those around them try to turn every handler into an enum, which takes longer
# than the rest of a step's preparation.
_get_handler: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set_handler: Callable[[int, Any], Any] = getattr(signal.signal, "__wrapped__", signal.signal)
_DEFERRED = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)


class DeferredSignals:
    """Signals that Python code handles, Ctrl-C too, wait until :meth:`restore_handlers`."""

    def __init__(self, numbers: Sequence[int] = _DEFERRED, *, at_most: int | None = None) -> None:
        """``at_most``: how many wait; those after them do not."""
        self._at_most = at_most
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._arrived: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            return  # handlers run in the main thread
        try:
            for number in numbers:
                handler = _get_handler(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _set_handler(number, self._arrive)
        except BaseException:  # one that arrived before its turn
            self.restore_handlers()
            raise

    def _arrive(self, number: int, _: FrameType | None) -> None:
        self._arrived.append(number)
        if self._at_most is not None and len(self._arrived) > self._at_most:
            self.deliver()

    def deliver(self) -> None:
        """Call the handlers of the signals that have arrived; later ones wait again."""
        if self._arrived:
            number = self._arrived.pop(0)
            try:
                self._handlers[number](number, None)
            finally:  # each runs, also if one before it raises
                self.deliver()

    def restore_handlers(self) -> None:
        """Set the handlers again, and call those whose signal has arrived."""
        for number, handler in self._handlers.items():
            _set_handler(number, handler)
        try:
            self.deliver()
        finally:
            self._handlers = {}


def roll_back(restore: Callable[..., None], *args: Any) -> None:
    """Call ``restore(*args)`` in an ``except`` clause; signals wait until it has ended."""
    try:
        signals = DeferredSignals()
    except BaseException:  # one that arrived before the first was deferred
        restore(*args)
        raise
    try:
        restore(*args)
    finally:
        signals.restore_handlers()


_failures: ContextVar[list[str] | None] = ContextVar("torchguard.state.failures", default=None)


@contextlib.contextmanager
def failures_in(found: list[str]) -> Iterator[None]:
    """Let :func:`warn_if_refused` append what it would warn of, in this thread or task."""
    token = _failures.set(found)
    try:
        yield
    finally:
        _failures.reset(token)


def warn_if_refused(step: Callable[..., None], *args: Any, failure: str) -> None:
    """Call ``step(*args)``; an exception becomes a ``RuntimeWarning`` that begins with ``failure``.

    For a step of a rollback: the exception on its way is the one to raise, and the other steps
    have to be taken all the same.
    """
    try:
        step(*args)
    except Exception as error:  # noqa: BLE001  see above
        found = _failures.get()
        if found is None:
            warnings.warn(f"{failure}: {error}", RuntimeWarning, stacklevel=4)
        else:
            found.append(f"{failure}: {error}")
