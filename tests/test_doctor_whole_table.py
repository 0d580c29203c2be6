"""The doctor on the torch at hand: the one slow test of it, because half of the rows compile."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchguard.defects import all_defects
from torchguard.defects.report import DoctorReport


@pytest.mark.slow
def test_the_whole_table_has_an_answer_for_every_row_and_every_guard_closes_its_defect() -> None:
    line = [sys.executable, "-m", "torchguard", "doctor", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    report = DoctorReport.from_json(done.stdout)
    assert [row.id for row in report.rows] == [row.id for row in all_defects()]
    unanswered = [row for row in report.rows if row.bare.status in {"timeout", "broken"}]
    assert unanswered == []
    assert report.failed == ()
    assert done.returncode == 0
    # A table in which everything is absent would show nothing of the guards: these two defects
    # are live on every torch there is.
    closed = {row.id for row in report.rows if row.guarded.status == "closed"}
    assert closed >= {"resize-locked", "resize-shared"}
