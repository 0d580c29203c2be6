"""Every benchmark runs, and its record becomes a part of the page; never how fast it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.catalog import BENCHMARKS
from benchmarks.machine import ROOT

from support.child_process import output_of

PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.catalog import BENCHMARKS
for each in BENCHMARKS.values():
    if "cpu" in each.devices:
        each.main(["--quick", "--device", "cpu", "--json", sys.argv[1]])
"""


@pytest.mark.slow
def test_every_benchmark_runs_and_its_record_becomes_a_part_of_the_page(tmp_path: Path) -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert {f"bench_{name}" for name in BENCHMARKS} == files
    output_of(PROGRAM, str(tmp_path))
    written = sorted(tmp_path.glob("*.json"))
    assert len(written) == len(BENCHMARKS) - 1  # cuda_tests has no record of a CPU
    with pytest.raises(ValueError, match="was made with --quick"):
        report.read_record(written[0])
    for path in written:
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["rows"], path.name
        assert str(ROOT) not in json.dumps(record)
        path.write_text(json.dumps({**record, "quick": False}), encoding="utf-8")
    assert report.main(tmp_path, tmp_path) == 0
    page = (tmp_path / "docs" / "project" / "benchmarks.md").read_text(encoding="utf-8")
    assert "no record yet" not in page
    assert page.count("[Record](") == len(written)


def test_the_committed_pages_say_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["report", "--check"]), capsys.readouterr().out) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "speed"], "no benchmark 'speed': there are end_to_end"),
        (["run", "--json", "all.json"], "--json all.json: several benchmarks need a folder"),
        (["run", "sampler", "--device", "cpu", "--rounds", "0"], "--rounds 0: expected 1 or more"),
        ([], "the following arguments are required: command"),
        (["gpu"], "one of the arguments --out --continue is required"),
        (["gpu", "--out", "{empty}", "--minutes", "0"], "--minutes 0: expected more than 0"),
        (["gpu", "--out", "{empty}", "--only", "z"], "'z' is neither a part"),
        (["gpu", "--continue", "{empty}"], "there is no results.jsonl to go on with"),
        (["gpu", "--out", "{full}"], "results.jsonl is there already; --continue"),
    ],
)
def test_bad_usage_ends_with_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.jsonl").touch()
    with pytest.raises(SystemExit) as ended:
        main([each.format(empty=tmp_path / "empty", full=tmp_path) for each in arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
