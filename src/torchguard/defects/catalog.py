"""The catalog of upstream defects: torchguard's own probes, then what other packages add.

A package adds defects through the entry-point group ``torchguard.defects``; the entry point
loads to one :class:`Defect` or to an iterable of them. A plug-in that can't be used becomes a
:class:`BrokenDefect`, so one bad plug-in never hides the other rows.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal, get_args

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

ENTRY_POINT_GROUP = "torchguard.defects"

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

    probe: Callable[[], str | None]
    """Shows the defect on whatever torch is imported, guarded or not."""

    guards: tuple[str, ...] = ()
    """Guards that close it together: names for ``install()``, or guards that are called.

    ``"rollback_on_error"`` stands for ``rollback_on_error(data=True)``. Empty while there is none.
    """

    guarded_probe: Callable[[], str | None] | None = None
    """Replaces ``probe`` in the guarded run, for a guard that is called and not installed."""

    advice: str = ""
    """What to use or write meanwhile; shown where no guard closes the defect."""

    only_detects: bool = False
    """Whether the guards find the damage and do not prevent it: "detected", not "closed"."""

    limits: str = ""
    """What the guards leave open, in one short sentence; shown where the defect is live."""


@dataclass(frozen=True)
class BrokenDefect:
    """A row that can't be probed because its file or its plug-in can't be used."""

    id: str
    """The file's or the entry point's name, and the item's where it has several."""

    reason: str
    """What is wrong with it, in one sentence."""


def all_defects() -> list[Defect | BrokenDefect]:
    """Return every defect there is a probe for.

    The order is fixed: torchguard's own by family, then by id; after them those of
    plug-ins by entry-point name, in the order in which each plug-in lists them.
    """
    rows: list[Defect | BrokenDefect] = list(built_in())
    owners = {row.id: "torchguard itself" for row in rows}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        for item in _plugged_in(point):
            row = item
            if isinstance(row, Defect) and row.id in owners:
                reason = f"{_origin(point)} repeats an id that belongs to {owners[row.id]}"
                row = BrokenDefect(f"{point.name}:{row.id}", reason)
            while row.id in owners:  # only a broken one gets here
                row = replace(row, id=f"{row.id}'")
            owners[row.id] = _origin(point)
            rows.append(row)
    return rows


def find(identifier: str) -> Defect:
    """Return the defect called ``identifier``; plug-ins are only loaded if they must be."""
    for rows in (built_in, all_defects):
        for row in rows():
            if isinstance(row, Defect) and row.id == identifier:
                return row
    raise LookupError(f"the catalog has no defect called {identifier!r}")


def built_in_ids() -> list[str]:
    """Return the ids of torchguard's own defects, by name, without importing torch."""
    return sorted(
        node.name.replace("_", "-")
        for file in (Path(__file__).parent / "probes").glob("[!_]*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        # A decorator makes a defect of a function.
        if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name[0] != "_"
    )


def built_in() -> list[Defect | BrokenDefect]:
    """Return torchguard's own defects, those of ``probes/``, without any plug-in."""
    defects: list[Defect] = []
    broken: list[Defect | BrokenDefect] = []
    package = importlib.import_module(_PROBES)
    for module_info in pkgutil.iter_modules(package.__path__):
        try:
            module = importlib.import_module(f"{_PROBES}.{module_info.name}")
        except Exception as error:  # noqa: BLE001 - one bad file must not hide the other rows
            broken.append(BrokenDefect(module_info.name, f"can't be imported: {error_text(error)}"))
            continue
        # Every defect that a file defines counts: there is no second list to forget it in.
        defects += [value for value in vars(module).values() if isinstance(value, Defect)]
    defects.sort(key=lambda defect: (FAMILIES.index(defect.family), defect.id))
    return [*defects, *broken]


def _plugged_in(point: EntryPoint) -> Iterator[Defect | BrokenDefect]:
    """Yield what one entry point adds; whatever it does wrong becomes a row."""
    try:
        loaded = point.load()
        single = isinstance(loaded, str) or not isinstance(loaded, Iterable)
        items = [loaded] if single else list(loaded)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a plug-in ends the plug-in only
        yield BrokenDefect(point.name, f"{_origin(point)} fails to load: {error_text(error)}")
        return
    for position, item in enumerate(items):
        fault = _fault(item)
        if fault is None:
            yield item
        else:
            name = point.name if len(items) == 1 else f"{point.name}[{position}]"
            yield BrokenDefect(name, f"{_origin(point)} {fault}")


def _fault(item: object) -> str | None:
    """Say why a plug-in's item can't be used as a defect; dataclasses check no types themselves."""
    if not isinstance(item, Defect):
        return f"gives {type(item).__name__}, expected torchguard.defects.Defect"
    if item.family not in FAMILIES:
        return f"has a defect of family {item.family!r}: it has to be one of {', '.join(FAMILIES)}"
    for names, fits, kind in _FIELDS:
        for name in names:
            value = getattr(item, name)
            if not fits(value) or (name == "id" and not value):
                return f"has a defect whose {name} is {value!r}: it has to be {kind}"
    return None


def _is_tuple_of_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, str) for part in value)


_FIELDS: tuple[tuple[tuple[str, ...], Callable[[object], bool], str], ...] = (
    (("id", "summary", "advice", "limits"), lambda value: isinstance(value, str), "a text"),
    (("guards", "upstream"), _is_tuple_of_texts, "a tuple of texts"),
    (("probe",), callable, "a function"),
    (("guarded_probe",), lambda value: value is None or callable(value), "a function"),
)


def _origin(point: EntryPoint) -> str:
    owner = f" of the package {point.dist.name}" if point.dist is not None else ""
    return f"the entry point {point.name!r}{owner}"


def error_text(error: BaseException) -> str:
    """Write an exception as the last line of its traceback does."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
