"""What the doctor found, as frozen data classes that survive a trip through JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torchguard.defects.catalog import Family

__all__ = [
    "FORMAT",
    "Bare",
    "BareStatus",
    "Environment",
    "Guarded",
    "GuardedStatus",
    "Report",
    "Row",
]

FORMAT = 2
"""Version of the JSON document; it grows when a reader of the old one would be misled."""

BareStatus = Literal[
    "absent",  # this torch does not have the defect
    "corrupt",  # a tensor, a buffer or a file was spoiled
    "wrong result",  # the program computed something else than it says
    "crash",  # the process died
    "not run",  # this machine lacks what the probe needs
    "timeout",  # the probe never ended: nobody knows
    "broken",  # the probe or the plug-in itself failed: nobody knows
]

GuardedStatus = Literal[
    "closed",  # live on bare torch, absent with the guards on
    "detected",  # live with the guards on, which find the damage where they are called
    "open",  # live with the guards on, or no guard exists yet
    "not run",  # never to be read as closed
    "broken",  # the guarded run failed in a way that proves nothing
    "-",  # nothing to close
]

_LIVE: tuple[BareStatus, ...] = ("corrupt", "wrong result", "crash")


@dataclass(frozen=True)
class Bare:
    """What happened on bare torch."""

    status: BareStatus
    detail: str = ""
    """The probe's sentence, the signal's name, or why there is no answer."""

    seconds: float = 0.0
    log: str = ""
    """The end of what the process wrote, where the status alone does not explain it."""


@dataclass(frozen=True)
class Guarded:
    """What happened with the guards on."""

    status: GuardedStatus
    detail: str = ""
    seconds: float = 0.0
    log: str = ""


@dataclass(frozen=True)
class Row:
    """One defect on this machine."""

    id: str
    family: Family | None
    """None for a broken plug-in: nobody can know what it would have been."""

    upstream: tuple[str, ...]
    summary: str
    bare: Bare
    guarded: Guarded
    guards: tuple[str, ...] = ()
    """Names for ``install()``, or ``"guarded"`` or ``"check_consistent"`` which are called."""

    planned: str | None = None
    advice: str = ""
    limits: str = ""
    """What the guards leave open."""

    @property
    def live(self) -> bool:
        """Whether this torch has the defect."""
        return self.bare.status in _LIVE

    @property
    def failed(self) -> bool:
        """Whether the defect is live and its guards did not do their part."""
        kept = self.guarded.status in {"closed", "detected"}
        return self.live and bool(self.guards) and not kept


@dataclass(frozen=True)
class Environment:
    """What the probes ran on."""

    torchguard: str
    torch: str
    python: str
    platform: str
    gpu: str
    """Name of the GPU that torch sees, or ``"none"``."""

    foreign: str | None
    """Version of somebody else's distribution named ``torchguard``, if it is installed."""


@dataclass(frozen=True)
class Report:
    """Every row, in the order of the catalog, and what it was measured on."""

    rows: tuple[Row, ...]
    environment: Environment

    @property
    def failed(self) -> tuple[Row, ...]:
        """Live defects which have a guard that neither closes nor detects them."""
        return tuple(row for row in self.rows if row.failed)

    @property
    def exit_status(self) -> int:
        """0 when every live defect that has a guard is closed or detected, else 1."""
        return 1 if self.failed else 0

    def to_json(self) -> str:
        """Write the report as one JSON document; :meth:`from_json` reads it."""
        document = {
            "format": FORMAT,
            "exit_status": self.exit_status,
            "environment": asdict(self.environment),
            "rows": [asdict(row) for row in self.rows],
        }
        return json.dumps(document, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: if the document is of another format.

        """
        document = json.loads(text)
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT:
            raise ValueError(f"expected a doctor's report of format {FORMAT}, got format {found!r}")
        rows = tuple(_row(values) for values in document["rows"])
        return cls(rows=rows, environment=Environment(**document["environment"]))


def _row(values: dict[str, Any]) -> Row:
    return Row(
        **{
            **values,
            "upstream": tuple(values["upstream"]),
            "guards": tuple(values["guards"]),
            "bare": Bare(**values["bare"]),
            "guarded": Guarded(**values["guarded"]),
        }
    )
