"""Finish an undo that a signal handler interrupts, and let the interrupt go on afterwards.

Python runs the handlers of signals (Ctrl-C, an alarm) in the main thread between two bytecodes
of whatever runs there, so their exceptions appear inside an ``except`` clause as well: after a
long call of torch that fails, the next bytecodes are those of the undo.

Where torch is called, an undo therefore looks like this. The second call does nothing if the
first one went through; it is for an interrupt that comes before the first line of the first
one, or (on Python 3.10) where the ``except`` clause begins. ::

    try:
        try:
            torch_function(tensor)
        except BaseException:
            finish(undo, tensor)
            raise
    except BaseException:
        finish(undo, tensor)
        raise
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

_ROUNDS = 1000  # a tensor subclass that raises KeyboardInterrupt every time must not hang here


def finish(undo: Callable[..., None], *args: Any) -> None:
    """Call ``undo(*args)`` until it goes through, then raise what has interrupted it, if anything.

    ``undo`` must be repeatable, and keep torch's own errors to itself: see :func:`retry_or_warn`.
    """
    interrupt: BaseException | None = None
    for _ in range(_ROUNDS):
        try:
            undo(*args)
        except Warning:  # the user's filters turn the warning of retry_or_warn() into an error
            raise
        except BaseException as error:  # noqa: BLE001  raised below
            interrupt = error
        else:
            break
    if interrupt is not None:
        raise interrupt


_failures: ContextVar[list[str] | None] = ContextVar("torchguard.rollback.failures", default=None)


@contextlib.contextmanager
def failures_in(found: list[str]) -> Iterator[None]:
    """Let :func:`retry_or_warn` append what it would warn of, in this thread or task."""
    token = _failures.set(found)
    try:
        yield
    finally:
        _failures.reset(token)


def retry_or_warn(step: Callable[..., None], *args: Any, failure: str) -> None:
    """Call ``step(*args)``; if torch refuses it, warn with ``failure`` and go on.

    If the second call goes through, the first error is raised after all, for it came from a signal
    handler (``TimeoutError``); a RuntimeError is dropped, because torch raises those.
    """
    try:
        step(*args)
    except Exception as first:  # noqa: BLE001  see above
        try:
            step(*args)
        except Exception as error:  # noqa: BLE001  whatever it is, see above
            found = _failures.get()
            if found is None:
                warnings.warn(f"{failure}: {error}", RuntimeWarning, stacklevel=4)
            else:
                found.append(f"{failure}: {error}")
        else:
            if not isinstance(first, RuntimeError):
                raise first


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
        """Call the handlers of the signals that have arrived; those after them wait again."""
        arrived, self._arrived = self._arrived, []
        with contextlib.ExitStack() as rest:  # each runs, also where one before it raises
            for number in reversed(arrived):
                rest.callback(self._handlers[number], number, None)

    def restore_handlers(self) -> None:
        """Put the handlers back, and call those whose signal has arrived."""
        for number, handler in self._handlers.items():
            _set_handler(number, handler)
        try:
            self.deliver()
        finally:
            self._handlers = {}
