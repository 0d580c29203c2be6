"""The catalog of upstream defects: a probe for each, in the files of ``probes/``."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Family = Literal["memory", "compile", "gradient"]

FAMILIES: tuple[Family, ...] = get_args(Family)
"""The families in the order in which the catalog lists them."""

CALLED_GUARDS = {
    "rollback_on_error": "rollback_on_error(data=True)",
    "check_consistent": "check_consistent()",
    "bucketed": "bucketed()",
    "transaction": "transaction()",
    "verified_python": 'verified(against="python")',
}
"""Guards that are called, and how; every other name is one for ``install()``."""

_PROBES = "torchguard.defects.probes"


class NotRunHere(Exception):  # noqa: N818 - it reports no error
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
    """URLs of the upstream issues; empty while there is none."""

    family: Family

    probe: Callable[..., str | None]
    """Shows the defect on whatever torch is imported, guarded or not."""

    guards: tuple[str, ...] = ()
    """Guards that close it together: names for ``install()``, or guards that are called.

    ``"rollback_on_error"`` stands for ``rollback_on_error(data=True)``. Empty while there is none.
    """

    guarded_with: Any = None
    """What the probe is called with in the guarded run, for a guard that is called."""

    advice: str = ""
    """What to use or write meanwhile; shown where no guard closes the defect."""

    only_detects: bool = False
    """Whether the guards find the damage and do not prevent it: "detected", not "closed"."""

    title: str = ""
    """What you would see, in at most 50 characters; the summary if it is empty."""

    limits: str = ""
    """What the guards leave open, in one short sentence; shown where the defect is live."""

    def run(self, *, guarded: bool = False) -> str | None:
        """Run the probe in this process; guarded, with what it takes for the called guard."""
        if guarded and self.guarded_with is not None:
            return self.probe(self.guarded_with)
        return self.probe()


def all_defects() -> list[Defect]:
    """Return every defect there is a probe for, by family, then by id."""
    package = importlib.import_module(_PROBES)
    defects: list[Defect] = []
    for file in pkgutil.iter_modules(package.__path__, f"{_PROBES}."):
        try:
            module = importlib.import_module(file.name)
        except ImportError as error:  # of a name that another PyTorch does not have
            from torchguard._events import warn_user  # noqa: PLC0415 - imports torch

            warn_user("probes-left-out", f"{file.name} is left out: {error}")
            continue
        # Every defect that a file defines counts: there is no second list to forget it in.
        defects += [value for value in vars(module).values() if isinstance(value, Defect)]
    return sorted(defects, key=lambda defect: (FAMILIES.index(defect.family), defect.id))


def find(identifier: str) -> Defect:
    """Return the defect called ``identifier``."""
    for defect in all_defects():
        if defect.id == identifier:
            return defect
    raise LookupError(f"the catalog has no defect called {identifier!r}")


def all_ids() -> list[str]:
    """Return the ids of the defects, by name, without importing torch."""
    return sorted(
        node.name.replace("_", "-")
        for file in (Path(__file__).parent / "probes").glob("[!_]*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        # A decorator makes a defect of a function.
        if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name[0] != "_"
    )
