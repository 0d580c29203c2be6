"""Shows which defects the installed torch has, and whether the guards close them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torchguard.defects.catalog import Family
from torchguard.defects.examination import Step, examine
from torchguard.defects.report import Report

__all__ = ["doctor"]


def doctor(
    only: Iterable[str] | None = None,
    family: Family | None = None,
    *,
    progress: Callable[[Step], None] | None = None,
    jobs: int | None = None,
    timeout: float = 120.0,
) -> Report:
    """Probe this torch for every defect of the catalog, bare and with the guards on.

    Equals running each probe by hand in a process of its own; nothing is run in the
    calling process and nothing of it is changed. A probe that crashes is a row.

    Args:
        only: identifiers of the defects to probe; all of them if None.
        family: probe this family only: ``"memory"``, ``"compile"`` or ``"gradient"``.
        progress: called with a :class:`Step` whenever a process starts or ends.
        jobs: how many processes run side by side; as many as there are cores if None.
        timeout: seconds after which a probe is killed and its row says ``timeout``.

    Raises:
        ValueError: if ``only`` or ``family`` names something that does not exist, or
            ``jobs`` or ``timeout`` is not positive.

    """
    return examine(only, family, progress, jobs, timeout)
