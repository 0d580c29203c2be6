"""A benchmark runs, and its record becomes a part of the page; never how fast it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.machine import ROOT

from support.child_process import output_of

PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.catalog import BENCHMARKS
for name in ("assign", "sampler"):
    BENCHMARKS[name].main(["--quick", "--device", "cpu", "--json", sys.argv[1]])
"""


@pytest.mark.slow
def test_a_benchmark_runs_and_its_record_becomes_a_part_of_the_page(tmp_path: Path) -> None:
    output_of(PROGRAM, str(tmp_path))
    written = sorted(tmp_path.glob("*.json"))
    assert len(written) == 2
    with pytest.raises(ValueError, match="was made with --quick"):
        report.read_record(written[0])
    for path in written:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["rows"], path.name
        assert str(ROOT) not in json.dumps(record)
        path.write_text(json.dumps({**record, "quick": False}), encoding="utf-8")
    assert report.main(tmp_path, tmp_path) == 0
    page = (tmp_path / "docs" / "project" / "benchmarks.md").read_text(encoding="utf-8")
    assert page.count("[Record](") == len(written)


def test_the_committed_pages_say_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["report", "--check"]), capsys.readouterr().out) == (0, "")
