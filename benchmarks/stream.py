"""Results that are on disk as soon as they are there: one line of JSON each, in one file for all.

A run of a benchmark writes a line with its head (when, with what, on what machine), one for each
result, and one when it ends. Lines are appended whole, so the file can be read whenever its writer
was killed; a last line that was torn is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]

# Exit status of a benchmark that was asked for a GPU where there is none, or none of its compiler.
NO_GPU, NO_TRITON = 3, 4

_NAMES = ("id", "what", "phase", "guard", "row")


def text(value: Any, *, indent: int | None = None) -> str:
    """Write JSON; a data class becomes an object."""
    return json.dumps(value, indent=indent, default=_plain)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"a record can't hold {value!r}")


def identity(part: str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells a result from the others of its part: the names in it, and the device."""
    return (part, row.get("device", "cpu"), *(row.get(name) for name in _NAMES))


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line; several processes may do so, because it is written at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = (text(line) + "\n").encode()
    with path.open("a+b", buffering=0) as file:
        # Begin a line of its own if the last writer was killed in the middle of one.
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        torn = file.read(1) not in {b"", b"\n"}
        file.write(b"\n" + encoded if torn else encoded)


def lines_of(path: Path) -> list[Line]:
    """Read what there is; a line that is no whole JSON object is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [value for value in found if isinstance(value, dict)]


@dataclass
class Stream:
    """Where a run of one benchmark writes its results, and when it has to stop.

    Without a path it writes nothing, and without ``seconds`` it never has to stop.
    """

    path: Path | None = None
    head: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    stopped: bool = False

    def __post_init__(self) -> None:
        self._begun = time.monotonic()
        self._run = f"{self.head.get('benchmark', '')}-{os.getpid()}-{time.time_ns()}"
        self._kept: set[tuple[Any, ...]] = set()
        self._known: dict[str, list[Line]] = {}
        if self.path is not None:
            for line in _same_machine(lines_of(self.path), self.head):
                if "row" in line:
                    self._known.setdefault(line["part"], []).append(line["row"])
            append(self.path, {"run": self._run, "head": self.head})

    def known(self, part: str) -> list[Line]:
        """Return the results of earlier runs of the same benchmark, revision, torch and machine."""
        return self._known.get(part, [])

    def keep(self, part: str, row: Mapping[str, Any]) -> None:
        """Write a result; one that is written again replaces the first."""
        self._kept.add(identity(part, row))
        if self.path is not None:
            append(self.path, {"run": self._run, "part": part, "row": row})

    def time_is_up(self) -> bool:
        """Whether to stop; whoever asks and hears yes stops, and the run is not finished then."""
        if self.seconds is not None:
            self.stopped = time.monotonic() - self._begun >= self.seconds
        return self.stopped

    def end(self, results: Mapping[str, Any]) -> None:
        """Write what has not been written yet, and how the run ended."""
        if self.path is None:
            return
        facts = {name: found for name, found in results.items() if not isinstance(found, list)}
        for part, found in results.items():
            for row in found if isinstance(found, list) else ():
                if identity(part, row) not in self._kept:
                    self.keep(part, row)
        ended = "stopped" if self.stopped else "finished"
        append(self.path, {"run": self._run, "facts": facts, "ended": ended})


def _same_machine(lines: Iterable[Line], head: Mapping[str, Any]) -> list[Line]:
    lines = list(lines)
    key = _machine(head)
    runs = {line["run"] for line in lines if "head" in line and _machine(line["head"]) == key}
    return [line for line in lines if line.get("run") in runs]


def _machine(head: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what two runs must have in common for their results to stand in one table."""
    versions, hardware = head.get("versions", {}), head.get("hardware", {})
    return (
        head.get("benchmark"), head.get("device"), head.get("quick"), head.get("revision"),
        versions.get("torch"), hardware.get("gpu"), hardware.get("driver"),
    )  # fmt: skip


def records_of(path: Path) -> list[dict[str, Any]]:
    """Put the runs of each benchmark together: a record each, as ``--json`` writes it.

    ``ended`` says whether the last run finished; what an earlier run has found stays.
    """
    lines = lines_of(path)
    heads = {_machine(line["head"]): line["head"] for line in lines if "head" in line}
    records = []
    for head in heads.values():
        parts: dict[str, dict[tuple[Any, ...], Any]] = {}
        record = dict(head)
        for line in _same_machine(lines, head):
            if "head" in line:
                record["ended"] = "killed"  # until it says otherwise
            elif "row" in line:
                rows = parts.setdefault(line["part"], {})
                rows[identity(line["part"], line["row"])] = line["row"]
            elif "ended" in line:
                record.update(line["facts"], ended=line["ended"])
        record.update({part: list(rows.values()) for part, rows in parts.items()})
        records.append(record)
    return records
