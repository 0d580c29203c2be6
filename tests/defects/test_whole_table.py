"""The doctor on the torch at hand: a file of its own, without the planted defects."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from torchguard.defects import all_defects
from torchguard.defects.doctor import DoctorReport


@pytest.mark.slow
def test_whole_table() -> None:
    """On the torch at hand every row has an answer, and every guard closes its defect."""
    line = [sys.executable, "-m", "torchguard", "doctor", "--json"]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache_dir()}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
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
