"""The probes of torchguard's own defects.

A decorator turns a probe into a row of the catalog. The name of the function is the id of the
defect: ``resize_locked`` shows ``resize-locked``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torchguard.defects.catalog import Defect, Family, NotRunHere


def _defect(
    family: Family, summary: str, *, upstream: tuple[str, ...] = (), **options: Any
) -> Callable[[Callable[[], str | None]], Defect]:
    def of_probe(probe: Callable[[], str | None]) -> Defect:
        name = probe.__name__.replace("_", "-")
        return Defect(name, summary, upstream, family, probe, **options)

    return of_probe


memory_defect = partial(_defect, "memory")
compile_defect = partial(_defect, "compile")
gradient_defect = partial(_defect, "gradient")


def share(tensor: Any) -> None:
    """Move a tensor to shared memory, which not every machine has."""
    try:
        tensor.share_memory_()
    except RuntimeError as error:
        raise NotRunHere("no shared memory on this machine") from error


def issues(*numbers: int) -> tuple[str, ...]:
    """Return the URLs of issues of PyTorch."""
    return tuple(f"https://github.com/pytorch/pytorch/issues/{number}" for number in numbers)
