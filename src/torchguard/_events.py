"""What the guards did, and at which line of your program: counts, log records, warnings.

Nothing here runs while nothing fails. The module is not called ``events`` because importing it
would hide the function of that name at the front door.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from torchguard._public import html_table, public
from torchguard._public import message as message_of
from torchguard.errors import TorchGuardWarning

Kind = Literal[
    "rolled_back",
    "rollback_failed",
    "overlap",
    "out_of_range",
    "miscompiled",
    "unverified",
    "padding_leak",
    "recompute_refused",
    "batch_halved",
    "step_skipped",
    "file_kept",
    "copied_on_write",
    "replicas_differ",
    "training_setup",
    "guard_skipped",
]
"""What a guard can have done; the page ``docs/reference/events.md`` says what each means."""

WHAT_TO_DO: Mapping[Kind, str] = {
    "rolled_back": "nothing is left half-done: catch the error and go on, or fix its cause",
    "rollback_failed": "do not train on from this state: load a checkpoint",
    "overlap": "write operand.clone() at this line, so that PyTorch computes the same",
    "out_of_range": "look at the data of this line, or at the size of the table it indexes",
    "miscompiled": "run the reproducer that the warning names, and report it to PyTorch",
    "unverified": "compare a few steps with those of TORCH_COMPILE_DISABLE=1",
    "padding_leak": "pass a mask or the true lengths, as the error says",
    "recompute_refused": "write to the tensor after backward()",
    "batch_halved": "nothing, or a smaller batch, which saves the attempt that fails",
    "step_skipped": "look at the loss of this step: the data, the learning rate, the loss scale",
    "file_kept": "the old file is intact: free space, or fix the path, and save again",
    "copied_on_write": "make the array writeable, or copy it yourself, if writes are meant",
    "replicas_differ": "load the last checkpoint, and look for what only some ranks do",
    "training_setup": "change the setup as the message says before you train on",
    "guard_skipped": "this guard protects nothing here: update torchguard, or do without it",
}
"""What a user can do about each kind."""

logger = logging.getLogger("torchguard")


@public
@dataclass(frozen=True)
class Event:
    """One thing that a guard did at one line of your program, with how often it did it.

    Example:
        >>> import numpy as np, torch, torchguard
        >>> try:
        ...     torchguard.safe_resize_(torch.from_numpy(np.zeros(4)), 5, 5)
        ... except RuntimeError:
        ...     event = torchguard.events()[-1]
        >>> event.kind, event.guard
        ('rolled_back', 'resize')
    """

    kind: Kind
    """What happened, such as ``"rolled_back"``."""

    guard: str
    """Which guard or function did it: ``"resize"``, ``"transaction"``."""

    message: str
    """One sentence about the last time."""

    where: str
    """The line of your program, ``"/home/me/train.py:130"``; ``""`` if no frame is yours."""

    count: int
    """How often it happened at that line."""

    first: float
    """When it happened first, in seconds since the epoch, as ``time.time()`` counts."""

    last: float
    """When it happened last, in the same seconds."""


# A program that fails at ever new lines (generated code) must not fill the memory.
_MAX_PLACES = 1000
_ELSEWHERE = "elsewhere"

_events: dict[tuple[str, str, str], Event] = {}
# Reentrant: a signal handler of the program may raise in the middle of record() and fail again.
_lock = threading.RLock()


def _replace_lock() -> None:
    """In a forked child no thread is left that could release the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock)


def record(
    kind: Kind,
    guard: str,
    message: str,
    where: str | None = None,
    *,
    entry: str | None = None,
    is_said: bool = False,
) -> None:
    """Count an event and log it, the first time at a place at level WARNING, then at DEBUG.

    Nothing is said twice: without a handler Python writes what has level WARNING to stderr, where
    ``warnings.warn`` and tracebacks go too. So an event of which the guard itself warns, or for
    which it raises an error of its own, has level INFO. An exception that is passed on does not
    say what the guard did, and the log does.

    Call it only where something failed. It never raises: the exception that is on its way to the
    program matters more.

    Args:
        kind: what happened.
        guard: the name of the guard or of the public function.
        message: one sentence, without the place.
        where: ``"file:line"`` of the user's code; left out, the innermost frame that belongs
            neither to torch nor to torchguard.
        entry: the heading of ``docs/reference/messages.md``; left out, that of the kind.
        is_said: whether a warning or an error of torchguard says the same.
    """
    if is_trial():
        return
    with contextlib.suppress(Exception):
        event = _count(kind, guard, message, _place() if where is None else where)
        first = logging.INFO if is_said else logging.WARNING
        level = first if event.count == 1 else logging.DEBUG
        if not logger.isEnabledFor(level):
            return
        place = f" ({event.where})" if event.where else ""
        text = message_of(entry or kind.replace("_", "-"), f"{guard}: {message}{place}")
        logger.log(level, "%s", text, extra={"torchguard": event})


def _count(kind: Kind, guard: str, message: str, where: str) -> Event:
    now = time.time()
    with _lock:
        key = (kind, guard, where)
        if key not in _events and len(_events) >= _MAX_PLACES:
            key = (kind, guard, _ELSEWHERE)
        known = _events.get(key)
        if known is None:
            event = Event(kind, guard, message, key[2], 1, now, now)
        else:
            event = replace(known, message=message, count=known.count + 1, last=now)
        _events[key] = event
        return event


_trial: ContextVar[bool] = ContextVar("torchguard_trial", default=False)

is_trial = _trial.get
"""Whether this thread or task is inside of :func:`trial`."""


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Record nothing of what fails inside: torchguard itself tries whether a guard protects."""
    before = _trial.set(True)
    try:
        yield
    finally:
        _trial.reset(before)


def _place() -> str:
    frame = frame_of_user()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Events(tuple[Event, ...]):
    """Events, which are a table at the end of a cell of a notebook."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        rows = [(str(each.count), each.kind, each.guard, each.message, each.where) for each in self]
        return html_table([("count", "kind", "guard", "message", "where"), *rows])


@public
def events() -> tuple[Event, ...]:
    """Return what the guards of this process did, oldest first.

    PyTorch has nothing like it. There is one :class:`Event` for each kind, guard and line of your
    program, with a count. If nothing failed, the tuple is empty. At most 1,000 lines are told
    apart; later ones are counted together, with ``where="elsewhere"``. In a notebook it is a table.

    The same events are records of ``logging.getLogger("torchguard")``: the first at a line has
    level ``WARNING``, or ``INFO`` if a warning or an error of torchguard says the same; later ones
    have ``DEBUG``. Each record has the event as its attribute ``torchguard``. torchguard installs
    no handler and changes no level.

    Cost:
        Nothing until a guard does something.

    Example:
        >>> import numpy as np, torch, torchguard
        >>> t = torch.from_numpy(np.zeros(4))
        >>> try:
        ...     torchguard.safe_resize_(t, 5, 5)
        ... except RuntimeError:
        ...     print(torchguard.events()[-1].kind)
        rolled_back
    """
    with _lock:
        return _Events(sorted(_events.values(), key=lambda event: event.first))


def counts() -> Mapping[str, int]:
    """Return how often each kind happened, for loggers of numbers."""
    totals: dict[str, int] = {}
    for event in events():
        totals[event.kind] = totals.get(event.kind, 0) + event.count
    return totals


def summary() -> str:
    """Return a line for each event, or an empty text if nothing happened."""
    return "\n".join(
        f"  {event.count:>6} x {event.kind:<17} {event.guard}: {event.message}"
        + (f" ({event.where})" if event.where else "")
        for event in events()
    )


# ---- the line of your program ----


_INTERNAL = (
    *(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parent)),
    contextlib.__file__,  # runs the ends of our context managers
)
# What a user types has no file either: in a console, behind -c, in IPython, in a doctest.
_TYPED = ("<stdin", "<string>", "<console>", "<python-input", "<ipython-input", "<doctest ")


def frame_of_user(frame: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame, from this one out, that is neither of torch nor of torchguard."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_internal(file: str) -> bool:
    """Whether a file is one of torch or torchguard, or code that one of them has generated."""
    made = file.startswith("<") and not file.startswith(_TYPED)
    return made or file.startswith(_INTERNAL)


def user_line() -> str:
    """Return the line of that frame: ``model.py:130``."""
    frame = frame_of_user()
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def user_line_of(stack_trace: str | None) -> str:
    """Return that line for a node of a graph, whose stack is kept as a text."""
    for file, line in reversed(re.findall(r'File "(.+)", line (\d+)', stack_trace or "")):
        if not _is_internal(file):
            return f"{Path(file).name}:{line}"
    return ""


def warn_user(entry: str, text: str, category: type[Warning] = TorchGuardWarning) -> None:
    """Warn at the innermost line that is neither of torch nor of torchguard.

    ``entry`` is the heading of ``docs/reference/messages.md`` that explains it.
    """
    frame, level = sys._getframe(1), 2
    while _is_internal(frame.f_code.co_filename) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message_of(entry, text), category, stacklevel=level)
