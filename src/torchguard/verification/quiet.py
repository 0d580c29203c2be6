"""Suppress what one thread prints, logs and warns of while graphs are tried that may fail.

FX, fake tensors and Dynamo print to standard error or log what goes wrong in a graph, though the
exception is caught. Only what this thread would print is kept back.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["quiet"]

# One thread after the other: each puts back what it has found.
_lock = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what this thread prints to ``sys.stderr``, logs under ``torch`` or warns of."""
    thread = threading.get_ident()
    with _lock, warnings.catch_warnings(), _without_logs(thread):
        warnings.simplefilter("ignore")
        before = sys.stderr
        sys.stderr = _Others(before, thread)
        try:
            yield
        finally:
            sys.stderr = before


class _Others:
    """A stream for all threads but one."""

    def __init__(self, stream: Any, thread: int) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _without_logs(thread: int) -> Iterator[None]:
    def from_others(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.name.partition(".")[0] != "torch"

    # A logger's filter does not see what its children log, a handler's does.
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {
        handler
        for logger in loggers
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
    }
    if logging.lastResort is not None:
        handlers.add(logging.lastResort)
    for handler in handlers:
        handler.addFilter(from_others)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(from_others)
