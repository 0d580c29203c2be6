"""The tests that need a GPU: ``pytest -m cuda``, with a line for each test as it ends.

On a CPU the same tests are collected and skipped, each with its reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.program import Benchmark, Results, Setting
from benchmarks.tables import Row, Table

_TOLD = "TORCHGUARD_TESTS_TOLD_TO"  # a file descriptor that the plug-in below writes to
_GRACE = 2.0  # seconds that pytest gets to end by itself


def _tell(report: Any, outcome: str, why: str) -> None:
    line = {"test": report.nodeid, "outcome": outcome, "why": why[-2000:]}
    line["seconds"] = round(getattr(report, "duration", 0.0), 3)
    os.write(int(os.environ[_TOLD]), (json.dumps(line) + "\n").encode())


def pytest_runtest_logreport(report: Any) -> None:
    """Tell of a test as soon as it has ended: this file is pytest's plug-in, too."""
    if report.when == "call" or not report.passed:
        skipped = isinstance(report.longrepr, tuple)  # a file, a line, and the reason
        outcome = "error" if report.when != "call" and report.failed else report.outcome
        _tell(report, outcome, report.longrepr[2] if skipped else report.longreprtext)


def pytest_collectreport(report: Any) -> None:
    """Tell of a file that can't be imported: its tests would be missing without a word."""
    if report.failed:
        _tell(report, "error", report.longreprtext)


def files() -> list[str]:
    """Return the files that have such tests; the others need not be imported."""
    marked = re.compile(r"\bmark\.cuda\b")
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [path for path in tests if marked.search(path.read_text(encoding="utf-8"))]
    return [str(path.relative_to(ROOT)) for path in found]


def results(setting: Setting, done: set[str]) -> Iterator[dict[str, Any]]:
    """Run them in a process of its own; it is ended when time is up."""
    verdicts = {"passed": "reached", "skipped": None}
    reading, writing = os.pipe()
    line = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "--tb=short", *files()]
    line += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "benchmarks.bench_cuda_tests"]
    line += ["--continue-on-collection-errors", *(f"--deselect={test}" for test in sorted(done))]
    with subprocess.Popen(  # noqa: S603 - our own tests
        line, cwd=ROOT, env={**os.environ, _TOLD: str(writing)}, pass_fds=(writing,)
    ) as running:
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as lines:
            for each in lines:
                row = {"device": setting.device, **json.loads(each), "target": "passes"}
                yield row | {"verdict": verdicts.get(row["outcome"], "missed: it fails")}
                if setting.stream.time_is_up():
                    running.terminate()
                    time.sleep(_GRACE)
                    running.kill()
                    return


def run(setting: Setting) -> Results:
    """Run the tests that have not passed yet."""
    known = setting.stream.known("rows")
    done = {row["test"] for row in known if row["outcome"] == "passed"}
    return {"rows": setting.kept(results(setting, done))}


def _listed(record: Row, _: str) -> list[Row]:
    """Return how many passed, and each test that did not."""
    rows = record["rows"]
    passed = sum(row["outcome"] == "passed" for row in rows)
    others = [row | {"last": (row["why"].splitlines() or [""])[-1]} for row in rows]
    return [
        {"test": f"{passed} of {len(rows)}", "outcome": "passed"},
        *(row for row in others if row["outcome"] != "passed"),
    ]


BENCHMARK = Benchmark(
    "cuda_tests",
    "Do the tests that need a GPU pass on one?",
    run,
    rounds=1,
    devices=("cuda",),
    tables=(Table({"test": "`{test}`", "": "{outcome}", "why": "{last}"}, rows=_listed),),
)
