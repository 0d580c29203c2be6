"""Environment variables that switch guards off, or choose them, without changing a program."""

from __future__ import annotations

import functools
import os

from torchguard._events import logger
from torchguard._public import message

SWITCH = "TORCHGUARD"
CHOICE = "TORCHGUARD_GUARDS"


def is_off() -> bool:
    """Whether ``TORCHGUARD=off`` is set: ``install()``, ``guarded()`` and ``run`` do nothing.

    ``0``, ``false`` and ``no`` mean the same, as people type them when something is on fire.
    """
    value = os.environ.get(SWITCH, "").strip().lower()
    if value in {"", "on", "1", "true", "yes"}:
        return False
    if value not in {"off", "0", "false", "no"}:
        raise ValueError(f"{SWITCH} is {value!r} in the environment, expected 'off' or 'on'")
    _say_so()
    return True


@functools.cache
def _say_so() -> None:
    """Log one line for the process."""
    value = os.environ.get(SWITCH)
    text = f"{SWITCH}={value} in the environment: install() and guarded() do nothing"
    logger.info(message("switched-off", text))


def chosen() -> tuple[str, ...]:
    """Return the names that ``TORCHGUARD_GUARDS=resize,save`` lists, or none."""
    parts = os.environ.get(CHOICE, "").split(",")
    return tuple(name for name in map(str.strip, parts) if name)
