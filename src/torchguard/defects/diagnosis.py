"""Shows which defects the installed torch has, and whether the guards close them."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torchguard._public import __version__, public
from torchguard.defects.catalog import FAMILIES, Defect, Family, all_defects
from torchguard.defects.runner import ENVIRONMENT, Schedule, Verdict, run

_MOST_WORKERS = 8  # each takes about half a gigabyte while it compiles


FORMAT = 2
"""Version of the JSON document; it grows when a reader of the old one would be misled."""


@dataclass(frozen=True)
class DefectRow:
    """One defect on this machine."""

    id: str
    family: Family
    upstream: tuple[str, ...]
    summary: str
    bare: Verdict
    """What happened on bare torch."""

    guarded: Verdict
    """What happened with the guards on."""

    guards: tuple[str, ...] = ()
    """Names for ``install()``, or those of ``catalog.CALLED_GUARDS``, which are called."""

    title: str = ""
    """What you would see, in at most 50 characters."""

    advice: str = ""
    limits: str = ""
    """What the guards leave open."""

    @property
    def live(self) -> bool:
        """Whether this torch has the defect."""
        return self.bare.live

    @property
    def failed(self) -> bool:
        """Whether the defect is live and its guards did not do their part."""
        held = self.guarded.status in {"closed", "detected"}
        return self.live and bool(self.guards) and not held


@dataclass(frozen=True)
class Environment:
    """What the probes ran on."""

    torchguard: str
    torch: str
    python: str
    platform: str
    gpu: str
    """Name of the first CUDA GPU that torch sees, or ``"none"``."""

    foreign: str | None
    """Version of the distribution named ``torchguard``, another project's, if it is installed."""


@public
@dataclass(frozen=True)
class DoctorReport:
    """What :func:`torchguard.doctor` found: a row for each defect, in the order of the catalog.

    Example:
        >>> import torchguard
        >>> report = torchguard.doctor(only=["index-partial"])
        >>> [row.id for row in report.failed], report.exit_status
        ([], 0)
    """

    rows: tuple[DefectRow, ...]
    environment: Environment
    """What the probes ran on."""

    @property
    def failed(self) -> tuple[DefectRow, ...]:
        """Live defects which have a guard that neither closes nor detects them."""
        return tuple(row for row in self.rows if row.failed)

    @property
    def exit_status(self) -> int:
        """0 when every live defect that has a guard is closed or detected, else 1."""
        return 1 if self.failed else 0

    def to_json(self) -> str:
        """Write the report as one JSON document."""
        document = {
            "format": FORMAT,
            "exit_status": self.exit_status,
            "environment": asdict(self.environment),
            "rows": [asdict(row) for row in self.rows],
        }
        return json.dumps(document, indent=2, ensure_ascii=False)


@public
def doctor(
    only: Iterable[str] | None = None,
    family: Family | None = None,
    *,
    progress: Callable[[DefectRow], None] | None = None,
    jobs: int | None = None,
    timeout: float = 120.0,
) -> DoctorReport:
    """Probe this torch for every defect of the catalog, bare and with the guards on.

    Equals running each probe by hand in a process of its own; nothing is run in the
    calling process and nothing of it is changed. A probe that crashes is a row.

    Args:
        only: identifiers of the defects to probe; all of them if None.
        family: probe this family only: ``"memory"``, ``"compile"`` or ``"gradient"``.
        progress: called with each row when it is complete.
        jobs: how many processes run side by side; as many as there are cores, at most 8, if None.
        timeout: seconds after which a probe is killed and its row says ``timeout``.

    Raises:
        TypeError: ``jobs`` or ``timeout`` is no number.
        ValueError: if ``only`` or ``family`` names something that does not exist, or
            ``jobs`` or ``timeout`` is not positive.

    Cost:
        Some minutes for all defects, some seconds for one.

    Example:
        >>> import torchguard
        >>> report = torchguard.doctor(only=["index-partial"])
        >>> report.rows[0].guarded.status
        'closed'
    """
    for name, given in (("jobs", jobs), ("timeout", timeout)):
        if given is not None and not isinstance(given, (int, float)):
            raise TypeError(f"doctor: {name} is {given!r}, expected a number")
    if jobs is not None and jobs < 1:
        raise ValueError(f"doctor: jobs is {jobs}, expected 1 or more")
    if not timeout > 0:
        raise ValueError(f"doctor: timeout is {timeout:g}, expected more than 0 seconds")
    chosen = {defect.id: defect for defect in select(only, family)}
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))  # those that this process may use
    # What compiles takes longest, so it starts first.
    compiles_first = sorted(chosen.values(), key=lambda defect: defect.family == "memory")
    rows, described = {}, Verdict("broken")
    with tempfile.TemporaryDirectory(prefix="tg-", ignore_cleanup_errors=True) as folder:
        Path(folder, "tmp").mkdir()
        schedule = Schedule(
            names=(ENVIRONMENT, *(defect.id for defect in compiles_first)),
            guarded=tuple(defect.id for defect in chosen.values() if defect.guards),
            folder=folder,
            workers=jobs or min(cores, _MOST_WORKERS),
            timeout=timeout,
            compiles=any(defect.family != "memory" for defect in chosen.values()),
        )
        with contextlib.closing(run(schedule)) as results:
            for name, verdicts in results:
                if name == ENVIRONMENT:
                    described = verdicts[0]
                    continue
                rows[name] = _row(chosen[name], *verdicts)
                if progress is not None:
                    progress(rows[name])
    return DoctorReport(tuple(rows[name] for name in chosen), _environment(described))


def select(only: Iterable[str] | None, family: str | None) -> list[Defect]:
    """Pick defects of the catalog by identifier and family.

    Raises:
        ValueError: if an identifier is unknown, with the nearest ones, or a family,
            or no defect that is both.

    """
    if family is not None and family not in FAMILIES:
        raise ValueError(f"no family {family!r}; the families are {', '.join(FAMILIES)}")
    known = {defect.id: defect for defect in all_defects()}
    wanted = list(known) if only is None else [only] if isinstance(only, str) else list(only)
    for identifier in wanted:
        if identifier not in known:
            raise ValueError(_unknown(identifier, list(known)))
    chosen = [
        each for each in known.values() if each.id in wanted and family in (None, each.family)
    ]
    if wanted and not chosen:
        named = ", ".join(f"{each} is of the family {known[each].family!r}" for each in wanted)
        raise ValueError(f"nothing to probe in the family {family!r}: {named}")
    return chosen


def _unknown(identifier: str, known: list[str]) -> str:
    near = difflib.get_close_matches(identifier, known, n=3, cutoff=0.5)
    near += [name for name in known if identifier and identifier in name and name not in near]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return f"no defect {identifier!r} in the catalog; {hint}"


def _row(defect: Defect, bare: Verdict, guarded: Verdict | None = None) -> DefectRow:
    if guarded is None:  # there was no guarded run
        if bare.live:
            guarded = Verdict("open", "no guard yet")
        else:
            guarded = Verdict("not run" if bare.status == "not run" else "-")
    names = ("id", "family", "upstream", "summary", "title", "guards", "advice", "limits")
    return DefectRow(bare=bare, guarded=guarded, **{name: getattr(defect, name) for name in names})


def _environment(described: Verdict) -> Environment:
    facts = {"torch": f"unknown ({described.status}: {described.detail})", "gpu": "unknown"}
    if described.status == "absent":
        facts = json.loads(described.detail)
    foreign = None
    with contextlib.suppress(PackageNotFoundError):
        # The library's own distribution is torchguard-runtime; this one is another project's,
        # and both own the folder `torchguard`.
        foreign = version("torchguard")
    return Environment(
        torchguard=__version__,
        torch=facts["torch"],
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        gpu=facts["gpu"],
        foreign=foreign,
    )
