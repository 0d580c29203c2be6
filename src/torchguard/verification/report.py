"""What has become of every compiled graph, for ``.stats()`` and ``verification_report()``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

__all__ = ["GraphRecord", "Records", "VerificationReport", "new_record", "verification_report"]

Status = Literal["compiled", "verified", "mismatched", "unverified"]


@dataclass
class GraphRecord:
    """One compiled graph."""

    function: str
    """The function or module that was decorated, or else the one that Dynamo compiled."""

    place: str
    """``file:line`` of the graph's last statement."""

    nodes: int
    """How many operations it has."""

    status: Status = "compiled"
    """``compiled``: not called yet. ``mismatched``: it did not do what eager does."""

    runs: str = ""
    """What runs now: a step of the ladder, such as ``inductor`` or ``eager``."""

    reason: str = ""
    """Why it is unverified, or what differs in a verified one because rounding decides there."""

    differences: tuple[str, ...] = ()
    """What the first step did otherwise than eager."""

    checks: int = 0
    """How many calls were checked."""

    seconds: float = 0.0
    """What checking took, compiling further steps of the ladder included."""

    reproducer: str | None = None
    """The script that shows the difference, where one was written."""


@dataclass(frozen=True)
class VerificationReport:
    """The graphs compiled so far; printed, it is a table."""

    graphs: tuple[GraphRecord, ...]

    @property
    def verified(self) -> int:
        """How many graphs do what eager does."""
        return self._count("verified")

    @property
    def mismatched(self) -> int:
        """How many did not; what runs instead stands in their rows."""
        return self._count("mismatched")

    @property
    def unverified(self) -> int:
        """How many could not be checked; the reason stands in their rows."""
        return self._count("unverified")

    @property
    def seconds(self) -> float:
        """What all checks took together."""
        return sum(graph.seconds for graph in self.graphs)

    def _count(self, status: Status) -> int:
        return sum(graph.status == status for graph in self.graphs)

    def __str__(self) -> str:
        rows = [("graph", "operations", "status", "runs", "seconds", "because")]
        for graph in self.graphs:
            because = graph.reason or "; ".join(graph.differences)
            name = f"{graph.function} ({graph.place})"
            seconds = f"{graph.seconds:.3f}"
            rows.append((name, str(graph.nodes), graph.status, graph.runs, seconds, because))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]
            )
            for row in rows
        ]
        return "\n".join(line.rstrip() for line in [*lines, self._summary()])

    def _summary(self) -> str:
        return (
            f"{len(self.graphs)} graphs: {self.verified} verified, {self.mismatched} mismatched, "
            f"{self.unverified} unverified; {self.seconds:.3f} s spent on checks"
        )


class Records:
    """The graphs of one backend."""

    def __init__(self) -> None:
        self.graphs: list[GraphRecord] = []

    def stats(self) -> VerificationReport:
        """Return what has become of the graphs compiled so far."""
        return VerificationReport(tuple(self.graphs))


_lock = threading.Lock()
_all: list[GraphRecord] = []


def new_record(records: Records, function: str, place: str, nodes: int) -> GraphRecord:
    """Enter a graph in a backend's list and in that of the process."""
    record = GraphRecord(function, place, nodes)
    with _lock:
        records.graphs.append(record)
        _all.append(record)
    return record


def verification_report() -> VerificationReport:
    """Return what has become of every graph this process has compiled with a check.

    Print it for a table. It holds numbers and texts only, no tensor and no graph.
    """
    with _lock:
        return VerificationReport(tuple(_all))
