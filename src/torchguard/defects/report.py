"""What the doctor found, as frozen dataclasses that survive a round trip through JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torchguard._public import public
from torchguard.defects.catalog import Family

FORMAT = 2
"""Version of the JSON document; it grows when a reader of the old one would be misled."""

Status = Literal[
    # Of a run on bare torch:
    "absent",  # this torch does not have the defect
    "corrupt",  # live: a tensor, a buffer or a file was spoiled
    "wrong result",  # live: the program computed something else than it says
    "crash",  # live: the process died
    "timeout",  # the probe was killed after its time: neither live nor absent
    # Of a run with the guards on, which follows a live one:
    "closed",  # the defect is gone
    "detected",  # the damage is done, and the guards find it where they are called
    "open",  # still live, or no guard exists yet
    "-",  # nothing to close
    # Of either:
    "not run",  # this machine lacks what the probe needs; never to be read as closed
    "broken",  # the probe or the plug-in itself failed: it proves nothing
]


@dataclass(frozen=True)
class Verdict:
    """How the run of one probe ended."""

    status: Status
    detail: str = ""
    """The probe's sentence, the signal's name, or why there is no answer."""

    seconds: float = 0.0
    log: str = ""
    """The end of what the process wrote, where the status alone does not explain it."""

    @property
    def live(self) -> bool:
        """Whether bare torch showed the defect; a probe may do that by dying."""
        return self.status in {"corrupt", "wrong result", "crash"}


@dataclass(frozen=True)
class Row:
    """One defect on this machine."""

    id: str
    family: Family | None
    """None for a plug-in that could not be loaded."""

    upstream: tuple[str, ...]
    summary: str
    bare: Verdict
    """What happened on bare torch."""

    guarded: Verdict
    """What happened with the guards on."""

    guards: tuple[str, ...] = ()
    """Names for ``install()``, or ``"guarded"`` or ``"check_consistent"`` which are called."""

    planned: str | None = None
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
    """Version of the distribution named ``torchguard``, another project's, if it is installed."""


@public
@dataclass(frozen=True)
class DoctorReport:
    """What :func:`torchguard.doctor` found: a row for each defect, in the order of the catalog."""

    rows: tuple[Row, ...]
    environment: Environment
    """What the probes ran on."""

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
    def from_json(cls, text: str) -> DoctorReport:
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
    # JSON has lists where a row has tuples, and objects where it has verdicts.
    tuples = {name: tuple(values[name]) for name in ("upstream", "guards")}
    verdicts = {name: Verdict(**values[name]) for name in ("bare", "guarded")}
    return Row(**{**values, **tuples, **verdicts})
