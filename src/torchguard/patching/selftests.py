"""The self-tests of guards: what each is tried with once it is in place.

Each calls public functions of PyTorch as a program would, on tiny inputs, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

SELF_TESTS: Mapping[str, Callable[[], str | None]] = {}
"""By the guard's name: returns None if the guard protects, else what no longer holds."""
