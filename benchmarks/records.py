"""The committed records: dated, complete, and made without ``--quick``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

RECORDS = ROOT / "benchmarks" / "records"

Record = dict[str, Any]


def read_record(path: Path) -> Record:
    """Read a record; a quick one is refused, because its figures mean nothing.

    ``file`` and ``digest`` are added: where it lies and what is in it.
    """
    content = path.read_bytes()
    record: Record = json.loads(content)
    if record.get("quick", False):
        raise ValueError(f"{path} was made with --quick, which shows only that the benchmark runs")
    return {**record, "file": path.name, "digest": hashlib.sha256(content).hexdigest()[:16]}


def committed(folder: Path = RECORDS) -> list[Record]:
    """Read every record, oldest first: their names begin with the date."""
    return [read_record(path) for path in sorted(folder.glob("*.json"))]


def of_device(record: Mapping[str, Any], part: str, device: str) -> list[Mapping[str, Any]]:
    """Return a part's results for one device; those that name none are the CPU's."""
    return [row for row in record.get(part, []) if row.get("device", "cpu") == device]


def newest(records: list[Record], benchmark: str, device: str) -> Record | None:
    """Return the newest record of a benchmark that has results of this device."""
    of_it = (record for record in records if record["benchmark"] == f"bench_{benchmark}")
    found = (record for record in of_it if of_device(record, "rows", device))
    return max(found, key=lambda record: str(record["date"]), default=None)
