"""Environment variables that switch guards off, or choose them, without changing a program."""

from __future__ import annotations

import functools
import os

from torchguard._events import logger

SWITCH = "TORCHGUARD"
CHOICE = "TORCHGUARD_GUARDS"


def is_off() -> bool:
    """Whether ``TORCHGUARD=off`` is set: ``install()``, ``guarded()`` and ``run`` do nothing."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value in {"", "on"}:
        return False
    if value != "off":
        raise ValueError(f"{SWITCH} is {value!r} in the environment, expected 'off' or 'on'")
    _say_so()
    return True


@functools.cache
def _say_so() -> None:
    """Log one line for the process."""
    logger.info("%s=off in the environment: install() and guarded() do nothing", SWITCH)


def chosen() -> tuple[str, ...]:
    """Return the names that ``TORCHGUARD_GUARDS=resize,save`` lists, or none."""
    parts = os.environ.get(CHOICE, "").split(",")
    return tuple(name for name in map(str.strip, parts) if name)
