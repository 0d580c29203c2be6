"""What a defect of the catalog is, and where the catalog comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Defect", "Family", "NotRunHere"]

Family = Literal["memory", "compile", "gradient"]


class NotRunHere(Exception):  # noqa: N818  it is an answer, not an error
    """Raised by a probe that can't run on this machine; the text says what it lacks."""


@dataclass(frozen=True)
class Defect:
    """One upstream defect and the probe that shows it.

    A probe runs in a process of its own. It returns ``None`` when the defect is
    absent, or one short sentence that says what it saw when the defect is live;
    it may also kill the process, which counts as live. It raises
    :class:`NotRunHere` where it can't run (no GPU, no POSIX shared memory).
    """

    id: str
    """Short name, words joined by hyphens: ``resize-locked``."""

    summary: str
    """What goes wrong, in one plain sentence that fits a table."""

    upstream: tuple[str, ...]
    """URLs of the upstream issues; empty when nobody has reported it yet."""

    family: Family

    probe: Callable[[], str | None]
    """Shows the defect on whatever torch is imported, guarded or not."""

    guards: tuple[str, ...] = ()
    """Guards that close it together: names for ``install()``, or guards that are called.

    ``"guarded"`` stands for ``guarded(data=True)``. Empty while no guard closes it.
    """

    planned: str | None = None
    """The guard that is meant to close it one day, where ``guards`` is empty."""

    guarded_probe: Callable[[], str | None] | None = None
    """Replaces ``probe`` in the guarded run, for a guard that is called and not installed."""

    advice: str = ""
    """What to use or write meanwhile; shown where no guard closes the defect."""

    only_detects: bool = False
    """Whether the guards find the damage and do not prevent it: "detected", not "closed"."""

    limits: str = ""
    """What the guards leave open, in one short sentence; shown where the defect is live."""
