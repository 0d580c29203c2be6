"""Benchmarks run, and their records become parts of the page; never how fast they were."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.machine import ROOT

from support.child_process import run_command


def test_the_committed_pages_say_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["report", "--check"]), capsys.readouterr().out) == (0, "")


@pytest.mark.slow
def test_what_the_command_finds_becomes_records_and_pages(tmp_path: Path) -> None:
    out, taken = tmp_path / "out", tmp_path / "taken"
    line = [sys.executable, "-m", "benchmarks", "gpu", "--rehearse", "--minutes", "8"]
    line += ["--only", "assign", "--out", str(out)]
    done = run_command(line, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.jsonl"]
    assert "would run on a GPU: python -m benchmarks run assign --device cuda" in done.stdout
    assert " assign: finished" in done.stdout
    assert str(ROOT) not in (out / "results.jsonl").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="is of a rehearsal"):
        report.take_in(out, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected results\.jsonl"):
        report.take_in(tmp_path, tmp_path)
    found = (out / "results.jsonl").read_text(encoding="utf-8")
    found = found.replace('"cpu"', '"cuda"').replace('"quick": true', '"quick": false')
    taken.mkdir()
    lines = [json.loads(line) for line in found.splitlines()]
    for line in lines:
        if "head" in line:
            hardware = {"gpu": "NVIDIA H100", "driver": "580.1", "cpu": "a CPU", "cores": 1}
            line["head"] |= {"hardware": hardware, "gpu_at_start": {"clocks.sm": "1980 MHz"}}
    (taken / "results.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    written = report.take_in(taken, tmp_path / "records")
    assert {path.name[11:] for path in written} == {"assign-cuda.json"}
    assert report.main(tmp_path / "records", tmp_path) == 0
    page = (tmp_path / "docs" / "project" / "benchmarks.md").read_text(encoding="utf-8")
    machine = "on NVIDIA H100 (CUDA None, driver 580.1, SMs at 1980 MHz) and 1 cores of an a CPU"
    assert page.count(machine) == len(written)
