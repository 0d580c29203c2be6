"""Behind ``doctor()``: picks the defects, has their probes run, and turns verdicts into rows."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from torchguard.defects.child import ENVIRONMENT, Verdict
from torchguard.defects.processes import Plan, events
from torchguard.defects.registry import FAMILIES, BrokenDefect, catalog
from torchguard.defects.report import Bare, BareStatus, Environment, Guarded, Report, Row
from torchguard.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchguard.defects.catalog import Defect, Family
    from torchguard.defects.processes import Event

__all__ = ["Step", "examine", "select"]

# Seconds that a row takes on a core of its own, roughly: compiling outweighs the rest by far.
_START, _QUICK, _COMPILED = 5.0, 0.5, 15.0
_MOST_WORKERS = 8  # each takes about half a gigabyte while it compiles


@dataclass(frozen=True)
class Step:
    """What ``progress`` is called with, whenever a process starts or ends."""

    done: int
    total: int
    running: tuple[str, ...]
    """Identifiers of the defects that are being probed right now."""

    row: Row | None
    """The row that has just been completed, if one was."""

    remaining: float | None = None
    """How many seconds the rest will take: a guess, which the rows that are done make better."""


def examine(
    only: Iterable[str] | None,
    family: Family | None,
    progress: Callable[[Step], None] | None,
    jobs: int | None,
    timeout: float,
) -> Report:
    """Do what ``doctor()`` says, with all of its arguments."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"expected jobs of 1 or more, got {jobs}")
    if timeout <= 0:
        raise ValueError(f"expected a timeout of more than 0 seconds, got {timeout:g}")
    chosen = select(catalog(), only, family)
    with tempfile.TemporaryDirectory(prefix="tg-", ignore_cleanup_errors=True) as folder:
        Path(folder, "tmp").mkdir()
        plan = _plan(chosen, folder, jobs or min(_cores(), _MOST_WORKERS), timeout)
        return _Examination(chosen, progress or (lambda _: None)).run(plan)


def select(
    rows: Iterable[Defect | BrokenDefect], only: Iterable[str] | None, family: str | None
) -> list[Defect | BrokenDefect]:
    """Pick rows of the catalog by identifier and family.

    Broken plug-ins belong to no family, so they are part of each.

    Raises:
        ValueError: if there is no such identifier, with the nearest ones, or no such family,
            or no row that is both.

    """
    rows = list(rows)
    if family is not None and family not in FAMILIES:
        raise ValueError(f"no family {family!r}; the families are {', '.join(FAMILIES)}")
    wanted = None if only is None else list(only)
    if wanted is not None:
        known = [row.id for row in rows]
        for identifier in wanted:
            if identifier not in known:
                raise ValueError(_unknown(identifier, known))
    chosen = [
        row
        for row in rows
        if (wanted is None or row.id in wanted)
        and (family is None or isinstance(row, BrokenDefect) or row.family == family)
    ]
    if wanted and family is not None and not chosen:
        families = {row.id: row.family for row in rows if not isinstance(row, BrokenDefect)}
        named = ", ".join(f"{each} is of the family {families.get(each)!r}" for each in wanted)
        raise ValueError(f"nothing to probe in the family {family!r}: {named}")
    return chosen


def _unknown(identifier: str, known: list[str]) -> str:
    near = difflib.get_close_matches(identifier, known, n=3, cutoff=0.5)
    near += [name for name in known if identifier and identifier in name and name not in near]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return f"no defect {identifier!r} in the catalog; {hint}"


def _plan(chosen: list[Defect | BrokenDefect], folder: str, workers: int, timeout: float) -> Plan:
    defects = [row for row in chosen if not isinstance(row, BrokenDefect)]
    # What compiles takes longest, so it starts first.
    by_length = sorted(defects, key=lambda defect: defect.family == "memory")
    return Plan(
        bare=(ENVIRONMENT, *(defect.id for defect in by_length)),
        with_guards=tuple(defect.id for defect in defects if defect.guards),
        folder=folder,
        workers=workers,
        timeout=timeout,
        compiles=any(defect.family != "memory" for defect in defects),
    )


class _Examination:
    """Follows the processes and completes one row after the other."""

    def __init__(
        self, chosen: list[Defect | BrokenDefect], progress: Callable[[Step], None]
    ) -> None:
        self._chosen = chosen
        self._progress = progress
        self._defects = {row.id: row for row in chosen if not isinstance(row, BrokenDefect)}
        self._bare: dict[str, Verdict] = {}
        self._rows: dict[str, Row] = {}
        self._running: list[str] = []
        self._begun, self._expected, self._share = time.monotonic(), 0.0, dict[str, float]()
        self._facts: dict[str, str] = {}

    def run(self, plan: Plan) -> Report:
        self._estimate(plan.workers)
        for row in self._chosen:
            if isinstance(row, BrokenDefect):
                self._tell(_broken_row(row))
        with contextlib.closing(events(plan)) as happening:
            for event in happening:
                if event.task.id != ENVIRONMENT:
                    self._take(self._defects[event.task.id], event)
                elif event.verdict is not None:
                    self._facts = _facts(event.verdict)
        rows = tuple(self._rows[row.id] for row in self._chosen)
        return Report(rows, _environment(self._facts))

    def _take(self, defect: Defect, event: Event) -> None:
        verdict = event.verdict
        if verdict is None:
            if defect.id not in self._running:  # a second start, where the server has died
                self._running.append(defect.id)
            self._tell(None)
            return
        self._running.remove(defect.id)
        if event.task.guarded:
            self._tell(_row(defect, self._bare[defect.id], verdict))
        elif verdict.live and defect.guards:
            self._bare[defect.id] = verdict  # the guarded run follows
            self._tell(None)
        else:
            self._tell(_row(defect, verdict, None))

    def _tell(self, row: Row | None) -> None:
        if row is not None:
            self._rows[row.id] = row
        total = len(self._chosen)
        left = self._remaining()
        self._progress(Step(len(self._rows), total, tuple(self._running), row, left))

    def _estimate(self, workers: int) -> None:
        """Say what the whole will take, before anything has been seen."""
        seconds = {
            name: _QUICK if defect.family == "memory" else _COMPILED
            for name, defect in self._defects.items()
        }
        whole = sum(seconds.values())
        self._share = {name: each / whole for name, each in seconds.items()}
        together = max(1, min(workers, len(seconds)))
        self._expected = _START + max([whole / together, *seconds.values()])

    def _remaining(self) -> float:
        """Trust the estimate at the beginning, and what was seen the more rows are done."""
        done = sum(self._share.get(name, 0.0) for name in self._rows)
        if not done:
            return self._expected
        seen = (time.monotonic() - self._begun) / done
        return max(0.0, (1 - done) * ((1 - done) * self._expected + done * seen))


def _row(defect: Defect, bare: Verdict, guarded: Verdict | None) -> Row:
    return Row(
        id=defect.id,
        family=defect.family,
        upstream=defect.upstream,
        summary=defect.summary,
        bare=_bare(defect, bare),
        guarded=_not_run_guarded(bare) if guarded is None else _guarded(defect, guarded),
        guards=defect.guards,
        planned=defect.planned,
        advice=defect.advice,
        limits=defect.limits,
    )


def _broken_row(broken: BrokenDefect) -> Row:
    return Row(
        id=broken.id,
        family=None,
        upstream=(),
        summary="",
        bare=Bare("broken", broken.reason),
        guarded=Guarded("-"),
    )


def _bare(defect: Defect, verdict: Verdict) -> Bare:
    status: BareStatus
    match verdict.kind:
        case "live":
            status = "corrupt" if defect.family == "memory" else "wrong result"
        case "described":  # the environment's task only
            status = "broken"
        case kind:
            status = kind
    return Bare(status, verdict.text, verdict.seconds, verdict.log)


def _not_run_guarded(bare: Verdict) -> Guarded:
    """Return what stands in the guarded column where there was no guarded run."""
    if bare.live:
        return Guarded("open", "no guard yet")
    return Guarded("not run" if bare.kind == "not run" else "-")


def _guarded(defect: Defect, verdict: Verdict) -> Guarded:
    seconds, log = verdict.seconds, verdict.log
    match verdict.kind:
        case "absent":
            return Guarded("detected" if defect.only_detects else "closed", "", seconds, log)
        case "live" | "timeout":
            return Guarded("open", verdict.text, seconds, log)
        case "crash":
            return Guarded("open", f"crash: {verdict.text}", seconds, log)
        case "not run":
            return Guarded("not run", verdict.text, seconds, log)
        case _:
            return Guarded("broken", verdict.text, seconds, log)


def _facts(verdict: Verdict) -> dict[str, str]:
    if verdict.kind != "described":
        return {"torch": f"unknown ({verdict.kind}: {verdict.text})", "gpu": "unknown"}
    values: dict[str, str] = json.loads(verdict.text)
    return values


def _environment(facts: dict[str, str]) -> Environment:
    try:
        # The library's own distribution is torchguard-runtime; this one is somebody else's,
        # and both own the folder `torchguard`.
        foreign = version("torchguard")
    except PackageNotFoundError:
        foreign = None
    return Environment(
        torchguard=__version__,
        torch=facts["torch"],
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        gpu=facts["gpu"],
        foreign=foreign,
    )


def _cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
