"""Results of a record as a Markdown table: each column is a template over a row.

    Table({"": "{what}", "per call": "{baseline_ns.median:time}"})

``{ratio.median:times}`` looks ``median`` up in the row's ``ratio``. Beside Python's own format
specifications there are ``time`` (nanoseconds), ``bytes``, ``times`` and ``percent``.
A cell is empty where the row lacks one of its values or has None there, and a column that is empty
in every row is left out. In the first column a value stands once for the rows that share it.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

_TEMPLATE = string.Formatter()
_KIB = 1024


def of_device(record: Row, part: str, device: str) -> list[Row]:
    """Return a part's results for one device; those that name none are the CPU's."""
    return [row for row in record.get(part, []) if row.get("device", "cpu") == device]


def _time(nanoseconds: float) -> str:
    """``1.2 µs``."""
    units = ((1e3, 1.0, "ns"), (1e6, 1e3, "µs"), (1e9, 1e6, "ms"), (float("inf"), 1e9, "s"))
    divisor, unit = next((by, unit) for limit, by, unit in units if abs(nanoseconds) < limit)
    value = nanoseconds / divisor
    return f"{value:.{0 if abs(value) >= 100 else 1}f} {unit}"  # noqa: PLR2004  three digits


def _bytes(number: int) -> str:
    """``256 MiB``, and the exact number below one KiB."""
    for limit, unit in ((_KIB**3, "GiB"), (_KIB**2, "MiB"), (_KIB, "KiB")):
        if abs(number) >= limit:
            return f"{number / limit:.4g} {unit}"
    return f"{number} B"


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "time": _time,
    "bytes": _bytes,
    "times": lambda ratio: f"{ratio:.2f}×",
    "percent": lambda share: f"{100 * share:.0f} %",
}


def filled(template: str, values: Row) -> str:
    """Fill a template; the empty string if one of its values is missing or None."""
    parts = []
    for text, name, specification, _ in _TEMPLATE.parse(template):
        parts.append(text)
        if name is None:
            continue
        value: Any = values
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            return ""
        how = specification or ""
        parts.append(_FORMATS[how](value) if how in _FORMATS else format(value, how))
    return "".join(parts)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay a table out in Markdown."""
    lines = (header, ("---",) * len(header), *rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


@dataclass(frozen=True)
class Table:
    """How one part of a record is shown."""

    columns: Mapping[str, str] | None = None
    """Templates by their headings; None: those of a comparison, or a column for each value that
    is a number or a word."""

    lead: str = ""
    """What stands above: a template over the record, whose ``n`` is that of the first row."""

    rows: str | Callable[[Row, str], Sequence[Row]] = "rows"
    """A part of the record, or what makes rows of a record and a device."""

    def of(self, record: Row, device: str) -> str:
        """Lay out a record's results for a device; the empty string if there are none."""
        part = self.rows
        rows = of_device(record, part, device) if isinstance(part, str) else part(record, device)
        if not rows:
            return ""
        columns = self.columns or (COMPARISONS if "baseline_ns" in rows[0] else _plain(rows[0]))
        cells = {
            heading: [filled(template, row) for row in rows]
            for heading, template in columns.items()
        }
        first = next(iter(cells.values()))
        first[1:] = ["" if one == other else other for one, other in itertools.pairwise(first)]
        kept = [heading for heading, column in cells.items() if any(column)]
        parts = [
            filled(self.lead, {**record, "n": rows[0].get("n")}),
            markdown(kept, zip(*(cells[heading] for heading in kept), strict=True)),
        ]
        return "\n\n".join(part for part in parts if part)


def _plain(row: Row) -> Mapping[str, str]:
    shown = [name for name, value in row.items() if isinstance(value, (str, int, float))]
    return {name.replace("_", " "): f"{{{name}}}" for name in shown if name != "device"}


COMPARISONS = {
    "": "{what}",
    "plain": "`{baseline}`",
    "against": "`{guarded}`",
    "per call": "{baseline_ns.median:time} → {guarded_ns.median:time}",
    "ratio [quartiles]": "{ratio.median:times} [{ratio.q1:.3g}, {ratio.q3:.3g}]",
}
"""Of what ``harness.measure`` returns: the medians of rounds in which both sides took turns."""


def described(record: Row) -> str:
    """Say when, on what and how a record was made."""
    versions, hardware = record["versions"], record["hardware"]
    gpu = ""
    if hardware["gpu"] is not None:
        at = record.get("gpu_at_end") or record.get("gpu_at_start", {})
        facts = [f"CUDA {versions['cuda']}", filled("driver {driver}", hardware)]
        facts += [f"{what} at {at[name]}" for name, what in _CLOCKS.items() if name in at]
        gpu = f"{hardware['gpu']} ({', '.join(filter(None, facts))}) and "
    threads = record["threads"]
    return (
        f"Measured on {record['date'][:10]} with torch {versions['torch']} and Python "
        f"{versions['python']} on {gpu}{hardware['cores']} cores of an {hardware['cpu']}, "
        f"{threads} thread{'s' if threads != 1 else ''}, load average "
        f"{record['load_average_at_start']} at the start. "
        f"Revision `{record['revision']}`, command `{record['command']}`."
    )


_CLOCKS = {"clocks.sm": "SMs", "clocks.mem": "memory"}
