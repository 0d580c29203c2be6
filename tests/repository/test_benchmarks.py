"""A benchmark runs, and its record becomes a part of the page; never how fast it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.machine import ROOT
from benchmarks.stream import lines_of

from support.child_process import output_of, wait_until_gone

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


# --- ``python -m benchmarks gpu``: whatever ends it, what was found until then is there


def test_a_command_that_is_told_to_stop_ends_what_it_runs(tmp_path: Path) -> None:
    line = ["-m", "benchmarks", "gpu", "--rehearse", "--only", "resize", "--out", str(tmp_path)]
    line = [sys.executable, *line]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        next(printed for printed in running.stdout if "would run on a GPU" in printed)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        for _ in range(100):
            if started := children.read_text(encoding="utf-8").split():
                break
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        rest = running.stdout.read()
        running.wait(60)
    assert "stopped by SIGTERM" in rest
    assert started
    assert all(wait_until_gone(int(pid)) for pid in started)


@pytest.mark.slow
def test_what_the_command_finds_becomes_records_and_pages(tmp_path: Path) -> None:
    out, taken = tmp_path / "out", tmp_path / "taken"
    line = [sys.executable, "-m", "benchmarks", "gpu", "--rehearse", "--minutes", "8"]
    line += ["--only", "assign,cuda_tests", "--out", str(out)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.jsonl"]
    for name in ("cuda_tests", "assign"):
        assert f"would run on a GPU: python -m benchmarks run {name} --device cuda" in done.stdout
        assert f" {name}: finished" in done.stdout
    # The tests that need a GPU were found, and each says why it was skipped.
    tests = [
        line["row"] for line in lines_of(out / "results.jsonl") if "test" in line.get("row", {})
    ]
    assert len(tests) >= 30
    if not torch.cuda.is_available():
        assert {row["outcome"] for row in tests} == {"skipped"}
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
    assert {path.name[11:] for path in written} == {"cuda_tests-cuda.json", "assign-cuda.json"}
    assert report.main(tmp_path / "records", tmp_path) == 0
    page = (tmp_path / "docs" / "project" / "benchmarks.md").read_text(encoding="utf-8")
    machine = "on NVIDIA H100 (CUDA None, driver 580.1, SMs at 1980 MHz) and 1 cores of an a CPU"
    assert page.count(machine) == len(written)
