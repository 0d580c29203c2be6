"""Writes the table of ``docs/project/compatibility.md`` from what nox has found.

A session of ``nox -s matrix`` leaves ``torch-2.8.0.json`` (the doctor) and ``torch-2.8.0.xml`` (the
tests) in ``.nox/results``, one of ``nox -s pythons`` ``python-3.13.json`` and its ``.xml``. The
table has a column for each: what ran, how its tests ended, and what became of each defect. Where
only the doctor has run, the column says so.
"""  # noqa: INP001

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / ".nox" / "results"
PAGE = DOCS / "project" / "compatibility.md"

# What is between these lines is replaced; the rest of the page is written by hand.
BEGIN = "<!-- begin: written by docs/make_compatibility.py -->"
END = "<!-- end -->"


@dataclass(frozen=True)
class Result:
    """What one session of the matrix has found."""

    of: str
    """What was varied: ``torch`` or ``python``."""

    asked: str
    """The version that was asked for: ``2.13.0``. The build that answered may say more."""

    tests: Counter[str]
    """How many ended in which way; empty where they have not run."""

    seconds: float
    date: str
    commit: str
    doctor: dict[str, Any]


def read(folder: Path) -> list[Result]:
    """Read every finished session: each torch, then each Python, the oldest first."""
    results = [
        _read_one(report, report.with_name(f"{report.stem}.xml"))
        for of in ("python", "torch")
        for report in folder.glob(f"{of}-*.json")
        if report.stat().st_size
    ]
    oldest = sorted(results, key=lambda result: [int(part) for part in result.asked.split(".")])
    return sorted(oldest, key=lambda result: result.of, reverse=True)


def _read_one(report: Path, junit: Path) -> Result:
    of, _, asked = report.stem.partition("-")
    doctor = json.loads(report.read_text(encoding="utf-8"))
    if not junit.exists():
        return Result(of, asked, Counter(), 0.0, "", "", doctor)
    suite = ET.parse(junit).getroot().find("testsuite")  # noqa: S314 - our own pytest wrote it
    if suite is None:
        raise ValueError(f"{junit} has no test suite in it")
    return Result(
        of=of,
        asked=asked,
        tests=Counter(_outcome(case) for case in suite.iter("testcase")),
        seconds=float(suite.get("time", "0")),
        date=suite.get("timestamp", "")[:10],
        commit=suite.get("name", ""),  # noxfile.py names it so
        doctor=doctor,
    )


def _outcome(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "expected to fail" if skipped.get("type") == "pytest.xfail" else "skipped"


LEGEND = """\
Meaning of the cells: `-` the defect is absent, `closed` live and closed by its guards, `detected`
live, and found by its guards where it has happened, `open` live in spite of its guards,
`no guard` live, `needs a GPU` the machine had none, `?` no answer."""


def table(results: list[Result]) -> str:
    """Lay out a column for each session: its tests and its defects."""
    only = {True: "", False: ", doctor only"}
    header = ("", *(f"{each.of} {each.asked}{only[bool(each.tests)]}" for each in results))
    ran_on = [result.doctor["environment"] for result in results]
    rows = [
        ("torch", *(each["torch"] for each in ran_on)),
        ("Python", *(each["python"].rpartition(" ")[2] for each in ran_on)),
        ("GPU", *(each["gpu"] for each in ran_on)),
        ("commit", *(_of_tests(each, f"{each.commit}, {each.date}") for each in results)),
        ("minutes of tests", *(_of_tests(each, f"{each.seconds / 60:.0f}") for each in results)),
        *(
            (f"tests {outcome}", *(_of_tests(r, str(r.tests[outcome])) for r in results))
            for outcome in ("passed", "failed", "skipped", "expected to fail")
            if any(result.tests[outcome] for result in results) or outcome == "failed"
        ),
    ]
    seen = [{row["id"]: _cell(row) for row in result.doctor["rows"]} for result in results]
    names = dict.fromkeys(name for cells in seen for name in cells)
    rows += [(f"`{name}`", *(cells.get(name, "?") for cells in seen)) for name in names]
    lines = (header, ("---",) * len(header), *rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _of_tests(result: Result, text: str) -> str:
    return text if result.tests else ""


def _cell(row: dict[str, Any]) -> str:
    status = row["bare"]["status"]
    if status in {"absent", "not run"}:
        return "-" if status == "absent" else "needs a GPU"
    if status in {"broken", "timeout"}:
        return "?"
    if not row["guards"]:
        return "no guard"
    status = row["guarded"]["status"]
    return status if status in {"closed", "detected"} else "open"


def main() -> int:
    """Replace the table of the page."""
    results = read(RESULTS)
    if not results:
        sys.stderr.write(f"nothing in {RESULTS}: run `nox -s matrix` first\n")
        return 1
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.stderr.write(f"{PAGE} has lost the lines that say where the table goes\n")
        return 1
    text = f"{before}{BEGIN}\n\n{LEGEND}\n\n{table(results)}\n\n{END}{after}"
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
