"""Finish an undo that a signal handler interrupts, and let the interrupt go on afterwards.

Python runs the handlers of signals (Ctrl-C, an alarm) in the main thread between two bytecodes
of whatever runs there, so their exceptions appear inside an ``except`` clause as well. A signal
that arrives during a long call of torch waits until the call returns: if the call fails, the
next bytecodes are those of the undo.

Where torch is called, an undo therefore looks like this. The second call does nothing if the
first one went through; it is for an interrupt that comes before the first line of the first
one. (On Python 3.10 it can come where the ``except`` clause begins.) ::

    try:
        try:
            torch_function(tensor)
        except BaseException:
            finish(undo, tensor)
            raise
    except BaseException:
        finish(undo, tensor)
        raise

Nothing here costs anything as long as nothing fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

_ROUNDS = 1000  # a tensor subclass that raises KeyboardInterrupt every time must not hang here


def finish(undo: Callable[..., None], *args: Any) -> None:
    """Call ``undo(*args)`` until it goes through, then raise what has interrupted it, if anything.

    ``undo`` must be repeatable from the start, and must keep torch's own errors to itself
    (see :func:`persist`): any exception that leaves it counts as an interrupt.
    """
    interrupt: BaseException | None = None
    for _ in range(_ROUNDS):
        try:
            undo(*args)
        except Warning:  # the user's filters turn the warning of persist() into an error
            raise
        except BaseException as error:  # noqa: BLE001  raised below
            interrupt = error
        else:
            break
    if interrupt is not None:
        raise interrupt


def persist(step: Callable[..., None], *args: Any, failure: str) -> None:
    """Call ``step(*args)``; if torch refuses it, warn with ``failure`` and go on.

    It must not hide the error that is being undone. An exception of a signal handler
    (``TimeoutError``) comes once, and is raised as soon as the step has gone through;
    one of torch comes back, or was a RuntimeError.
    """
    try:
        step(*args)
    except Exception as first:  # noqa: BLE001  see above
        try:
            step(*args)
        except Exception as error:  # noqa: BLE001  whatever it is, see above
            warnings.warn(f"{failure}: {error}", RuntimeWarning, stacklevel=4)
        else:
            if not isinstance(first, RuntimeError):
                raise first
