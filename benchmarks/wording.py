"""How figures are written: times with their unit, tables, and where a record is from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["described", "from_to", "made", "number_of_bytes", "table", "time", "times"]

_THREE_DIGITS = 100  # from here on a decimal would be a fourth
_KIB = 1024


def time(nanoseconds: float) -> str:
    """``1.2 µs``."""
    return f"{_number(nanoseconds)} {_unit(nanoseconds)[1]}"


def from_to(row: dict[str, Any]) -> str:
    """``1.2 → 1.3 µs``: what plain torch takes and what it takes with the guard."""
    before, after = row["baseline_ns"]["median"], row["guarded_ns"]["median"]
    if _unit(before) == _unit(after):
        return f"{_number(before)} → {time(after)}"
    return f"{time(before)} → {time(after)}"


def times(ratio: float) -> str:
    """``1.17 times``."""
    return f"{ratio:.2f} times"


def number_of_bytes(number: int) -> str:
    """``256 MiB``, and the exact number below one KiB."""
    for limit, unit in ((_KIB**3, "GiB"), (_KIB**2, "MiB"), (_KIB, "KiB")):
        if abs(number) >= limit:
            return f"{number / limit:.4g} {unit}"
    return f"{number} B"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay a table out in Markdown."""
    lines = (header, ("---",) * len(header), *rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def made(record: dict[str, Any]) -> str:
    """Say in two sentences when, on what and how a record of comparisons was made."""
    rounds = record["rows"][0]["n"]
    order = f"medians of {rounds} rounds in which both sides took turns"
    return f"{_measured(record)}; {order}. {_source(record)}"


def described(record: dict[str, Any]) -> str:
    """Say the same of any record."""
    return f"{_measured(record)}. {_source(record)}"


def _measured(record: dict[str, Any]) -> str:
    versions, hardware = record["versions"], record["hardware"]
    busy = record["load_average_at_start"]
    threads = record["threads"]
    gpu = "" if hardware["gpu"] is None else f"{_gpu(record)} and "
    return (
        f"Measured on {record['date'][:10]} with torch {versions['torch']} and Python "
        f"{versions['python']} on {gpu}{hardware['cores']} cores of an {hardware['cpu']}, "
        f"{threads} thread{'s' if threads != 1 else ''}, load average {busy} at the start"
    )


def _gpu(record: dict[str, Any]) -> str:
    """Name the GPU with its driver, and with the clocks it ran at when the last row was made."""
    hardware = record["hardware"]
    found = record.get("gpu_at_end") or record.get("gpu_at_start", {})
    facts = [f"CUDA {record['versions']['cuda']}"]
    if hardware.get("driver"):
        facts.append(f"driver {hardware['driver']}")
    facts += [
        f"{clock} at {found[name]}"
        for name, clock in (("clocks.sm", "SMs"), ("clocks.mem", "memory"))
        if name in found
    ]
    return f"{hardware['gpu']} ({', '.join(facts)})"


def _source(record: dict[str, Any]) -> str:
    return f"Revision `{record['revision']}`, command `{record['command']}`."


def _unit(nanoseconds: float) -> tuple[float, str]:
    for limit, divisor, unit in ((1e3, 1.0, "ns"), (1e6, 1e3, "µs")):
        if abs(nanoseconds) < limit:
            return divisor, unit
    return 1e6, "ms"


def _number(nanoseconds: float) -> str:
    value = nanoseconds / _unit(nanoseconds)[0]
    digits = 0 if abs(value) >= _THREE_DIGITS else 1
    return f"{value:.{digits}f}"
