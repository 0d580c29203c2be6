"""What has become of every compiled graph, for ``.stats()`` and ``verification_report()``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torchguard._environment import is_off
from torchguard._events import is_trial, record
from torchguard._public import html_table, public
from torchguard._torch import warn_at_compiled_call
from torchguard.errors import UnverifiedWarning

if TYPE_CHECKING:
    from torchguard.equivalence.compare import Difference

Status = Literal["compiled", "verified", "mismatched", "unverified"]


@public
@dataclass
class GraphRecord:
    """One compiled graph.

    Example:
        >>> import torch, torchguard
        >>> double = torchguard.verified(backend="aot_eager")(lambda x: 2 * x)
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
        >>> graph = double.stats().graphs[0]
        >>> graph.status, graph.differences
        ('verified', ())
    """

    function: str
    """The function or module that was decorated, or else the one that Dynamo compiled."""

    place: str
    """``file:first-last``: the lines of the function that the graph computes."""

    nodes: int
    """How many operations it has."""

    status: Status = "compiled"
    """``compiled``: no call has been checked yet. ``mismatched``: it did not do what eager does."""

    runs: str = ""
    """What runs now: the backend, or ``eager`` if that was wrong."""

    reason: str = ""
    """Why it is unverified, or what differs in a verified one because rounding decides there."""

    differences: tuple[str, ...] = ()
    """What the backend's graph did otherwise than eager."""

    checks: int = 0
    """How many calls were checked."""

    seconds: float = 0.0
    """What checking took."""

    reproducer: str | None = None
    """The script that shows the difference, where one was written."""


@public
@dataclass(frozen=True)
class VerificationReport:
    """The graphs compiled so far; printed, it is a table.

    Example:
        >>> import torch, torchguard
        >>> double = torchguard.verified(backend="aot_eager")(lambda x: 2 * x)
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
        >>> report = double.stats()
        >>> report.verified, report.mismatched, report.unverified
        (1, 0, 0)
    """

    graphs: tuple[GraphRecord, ...]

    @property
    def verified(self) -> int:
        """How many graphs do what eager does."""
        return self._count("verified")

    @property
    def mismatched(self) -> int:
        """How many differ from eager; their rows say what runs instead."""
        return self._count("mismatched")

    @property
    def unverified(self) -> int:
        """How many could not be checked; their rows say why."""
        return self._count("unverified")

    @property
    def seconds(self) -> float:
        """What all checks took together."""
        return sum(graph.seconds for graph in self.graphs)

    def _count(self, status: Status) -> int:
        return sum(graph.status == status for graph in self.graphs)

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [_HEAD]
        for graph in self.graphs:
            because = graph.reason or "; ".join(graph.differences)
            name = f"{graph.function} ({graph.place})"
            seconds = f"{graph.seconds:.3f}"
            rows.append((name, str(graph.nodes), graph.status, graph.runs, seconds, because))
        return rows

    def _summary(self) -> str:
        summary = (
            f"{len(self.graphs)} graphs: {self.verified} verified, {self.mismatched} mismatched, "
            f"{self.unverified} unverified; {self.seconds:.3f} s spent on checks"
        )
        return summary if self.graphs else f"{summary}\n{_EMPTY}"

    def __str__(self) -> str:
        rows = self._rows()
        widths = [*(max(len(row[column]) for row in rows) for column in range(5)), 0]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in rows]
        return "\n".join(line.rstrip() for line in [*lines, self._summary()])

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return html_table(self._rows(), self._summary())


_HEAD = ("graph", "operations", "status", "runs", "seconds", "because")
_EMPTY = (
    "If it was called: its calls run graphs that were compiled for another instance of this code, "
    "or Dynamo has compiled this code too often and runs it in eager, as in a notebook whose cell "
    "defines a class again and again. torchguard.verification_report() has every graph, and "
    "torch._dynamo.reset() starts again"
)

ALL_GRAPHS: list[GraphRecord] = []
"""The graphs of every backend of this process. Appending is one step, so it needs no lock."""


@public
def verification_report() -> VerificationReport:
    """Return the result for every graph that this process has compiled with a check.

    Print it for a table. It holds numbers and texts only, no tensor and no graph.

    Cost:
        Nothing is computed.

    Example:
        >>> import torch, torchguard
        >>> double = torchguard.verified(backend="aot_eager")(lambda x: 2 * x)
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
        >>> torchguard.verification_report().graphs[-1].status
        'verified'
    """
    return VerificationReport(tuple(ALL_GRAPHS))


def note_mismatch(
    record: GraphRecord, found: Sequence[Difference], on_mismatch: str, right: str
) -> None:
    """Note in the record what differs, and what runs from now on."""
    record.status, record.differences = "mismatched", tuple(map(str, found))
    record.runs = {"fallback": right, "warn": record.runs, "raise": "nothing"}[on_mismatch]


_unverified: set[tuple[str, str]] = set()
"""The functions, with their files, of which it was said that a graph is not checked."""


def say_unverified(graph: GraphRecord) -> None:
    """Warn that a graph is not checked, once for each function."""
    function = graph.function, graph.place.partition(":")[0]
    if graph.status != "unverified" or function in _unverified or is_trial() or is_off():
        return
    _unverified.add(function)
    said = f"could not check {graph.function} ({graph.place}): {graph.reason}"
    record("unverified", "verified", said, is_said=True)
    text = (
        f"verified {said}. It runs as it was compiled. If you depend on it, compare a few "
        "steps with those of TORCH_COMPILE_DISABLE=1; torchguard.verification_report() lists "
        "every such graph"
    )
    warn_at_compiled_call("unverified", text, UnverifiedWarning)


def message_of(
    record: GraphRecord, head: str, found: Sequence[Difference], on_mismatch: str, *more: str
) -> str:
    """Return the text of the warning, or of the error, for what was compiled wrong.

    ``head`` says who was wrong about what; ``more`` are lines for the end.
    """
    largest = max((each.largest for each in found if each.finite), default=None)
    now = {
        "fallback": f"{record.runs} runs instead",
        "warn": 'the wrong version still runs, because of on_mismatch="warn"',
        "raise": "it is not run",
    }[on_mismatch]
    lines = [
        f"{head} wrong:",
        *(f"  {line}" for line in first_of(found)),
        f"  lines: {record.place}",
        *([] if largest is None else [f"  largest difference: {largest:.3g}"]),
        f"  now: {now}",
        *(f"  {line}" for line in more),
    ]
    return "\n".join(lines)


def first_of(found: Sequence[Difference]) -> list[str]:
    """Return the first differences as text, and how many there are besides."""
    shown = [str(difference) for difference in found[:3]]
    if len(found) > len(shown):
        shown.append(f"and {len(found) - len(shown)} more differences")
    return shown
