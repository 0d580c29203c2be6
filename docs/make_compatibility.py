"""Writes the tables of ``docs/compatibility.md`` from what nox has found.

A session of ``nox -s matrix`` leaves ``torch-2.8.0.json`` (the doctor) and ``torch-2.8.0.xml`` (the
tests) in ``.nox/results``, one of ``nox -s pythons`` ``python-3.13.json`` and its ``.xml``. Where
tests failed and were mended, a second run of these alone, with
``--junitxml=.nox/results/torch-2.8.0.again.xml``, is counted beside the first and not in
place of it.
"""  # noqa: INP001

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / ".nox" / "results"
PAGE = DOCS / "compatibility.md"

# What is between these lines is replaced; the rest of the page is written by hand.
BEGIN = "<!-- begin: written by docs/make_compatibility.py -->"
END = "<!-- end -->"

MENDED = "passed the second time"


@dataclass(frozen=True)
class Result:
    """What one session of the matrix has found."""

    of: str
    """What was varied: ``torch`` or ``python``."""

    asked: str
    """The version that was asked for: ``2.13.0``. The build that answered may say more."""

    tests: dict[str, int]
    seconds: float
    date: str
    doctor: dict[str, Any]


def read(folder: Path) -> list[Result]:
    """Read every finished session: each torch, then each Python, the oldest first."""
    results = [
        _read_one(report, _beside(report, ".xml"), _beside(report, ".again.xml"))
        for of in ("python", "torch")
        for report in folder.glob(f"{of}-*.json")
        if _beside(report, ".xml").exists() and report.stat().st_size
    ]
    oldest = sorted(results, key=lambda result: [int(part) for part in result.asked.split(".")])
    return sorted(oldest, key=lambda result: result.of, reverse=True)


def _beside(report: Path, suffix: str) -> Path:
    return report.with_name(f"{report.name.removesuffix('.json')}{suffix}")


def _read_one(report: Path, junit: Path, again: Path) -> Result:
    """Read a session and, where there is one, a second run of what had failed in it."""
    suite = _suite(junit)
    outcomes = _outcomes(suite)
    if again.exists():
        for name, outcome in _outcomes(_suite(again)).items():
            before = outcomes.get(name)
            outcomes[name] = MENDED if (before, outcome) == ("failed", "passed") else outcome
    tests = dict.fromkeys(("passed", "failed", MENDED, "skipped", "expected failures"), 0)
    for outcome in outcomes.values():
        tests[outcome] += 1
    return Result(
        of=report.stem.partition("-")[0],
        asked=report.stem.partition("-")[2],
        tests=tests,
        seconds=float(suite.get("time", "0")),
        date=suite.get("timestamp", "")[:10],
        doctor=json.loads(report.read_text(encoding="utf-8")),
    )


def _suite(junit: Path) -> ET.Element:
    suite = ET.parse(junit).getroot().find("testsuite")  # noqa: S314 - our own pytest wrote it
    if suite is None:
        raise ValueError(f"{junit} has no test suite in it")
    return suite


def _outcomes(suite: ET.Element) -> dict[tuple[str | None, str | None], str]:
    return {
        (case.get("classname"), case.get("name")): _outcome(case) for case in suite.iter("testcase")
    }


def _outcome(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "expected failures" if skipped.get("type") == "pytest.xfail" else "skipped"


def tables(results: list[Result]) -> str:
    """Lay out the tests and the defects, one column or row per version."""
    versions = [result for result in results if result.of == "torch"]
    return "\n\n".join((_tests(results), _LEGEND, _defects(versions)))


def _tests(results: list[Result]) -> str:
    header = ("torch", "Python", "system", "GPU", *results[0].tests, "minutes", "date")
    rows = []
    for result in results:
        ran_on = result.doctor["environment"]
        system = ran_on["platform"].partition("-")[0]
        where = (ran_on["torch"], ran_on["python"], system, ran_on["gpu"])
        counts = map(str, result.tests.values())
        rows.append((*where, *counts, f"{result.seconds / 60:.1f}", result.date))
    return _table(header, rows)


_LEGEND = """\
What the doctor saw: `-` the defect is absent, `closed` live and closed by its guards, `detected`
live, and found by its guards where it has happened, `open` live in spite of its guards,
`no guard yet` live, `not run` the machine lacked what the probe needs, `?` no answer."""


def _defects(results: list[Result]) -> str:
    identifiers = list(
        dict.fromkeys(row["id"] for result in results for row in result.doctor["rows"])
    )
    seen = [{row["id"]: _cell(row) for row in result.doctor["rows"]} for result in results]
    rows = [(f"`{name}`", *(cells.get(name, "?") for cells in seen)) for name in identifiers]
    return _table(("defect", *(result.asked for result in results)), rows)


def _cell(row: dict[str, Any]) -> str:
    status = row["bare"]["status"]
    if status == "absent":
        return "-"
    if status == "not run":
        return "not run"
    if status in {"broken", "timeout"}:
        return "?"
    if not row["guards"]:
        return "no guard yet"
    status = row["guarded"]["status"]
    return status if status in {"closed", "detected"} else "open"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = (header, ("---",) * len(header), *rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> int:
    """Replace the tables of the page."""
    results = read(RESULTS)
    if not results:
        sys.stderr.write(f"nothing in {RESULTS}: run `nox -s matrix` first\n")
        return 1
    page = (
        PAGE.read_text(encoding="utf-8")
        if PAGE.exists()
        else f"# Compatibility\n\n{BEGIN}\n{END}\n"
    )
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.stderr.write(f"{PAGE} has lost the lines that say where the tables go\n")
        return 1
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
