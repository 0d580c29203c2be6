"""``python -m benchmarks gpu``: whatever ends it, what was found until then is there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.bench_out_of_memory import limit
from benchmarks.bench_padding import BENCHMARK
from benchmarks.catalog import BENCHMARKS
from benchmarks.clocks import on_both_clocks, peak_bytes
from benchmarks.gpu import (
    CLOSING,
    CRASHES,
    PARTS,
    PIECES,
    Session,
    finished,
    limit_of,
    pieces_of,
    work_through,
)
from benchmarks.harness import Comparison, measure
from benchmarks.machine import context
from benchmarks.program import Setting
from benchmarks.stream import Stream, append, lines_of, records_of, text
from benchmarks.tables import Table

from support.child_process import output_of
from support.processes import wait_until_gone

ROOT = Path(__file__).resolve().parent.parent.parent


HEAD: dict[str, Any] = {
    "benchmark": "bench_padding",
    "device": "cuda",
    "quick": False,
    "revision": "abc",
    "date": "2026-11-22T10:00:00+00:00",
    "versions": {"torch": "2.11.0"},
    "hardware": {"gpu": "a GPU", "driver": "1"},
}


# --- results as they come


def test_a_killed_run_keeps_what_it_has_found(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    killed = Stream(path, HEAD)
    killed.keep("rows", {"id": "a", "device": "cuda", "value": 1})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"run": "torn in the mid')  # the process died here
    [record] = records_of(path)
    assert record["ended"] == "killed"
    assert [row["id"] for row in record["rows"]] == ["a"]
    append(path, {"piece": {"name": "padding"}})  # begins a line of its own
    assert lines_of(path)[-1] == {"piece": {"name": "padding"}}


def test_a_second_run_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = Stream(path, HEAD, seconds=0.001)
    first.keep("rows", {"id": "a", "device": "cuda", "value": 1})
    first.keep("rows", {"id": "a", "device": "cuda", "value": 2})  # more rounds
    time.sleep(0.01)
    assert first.time_is_up()
    first.end({"rows": [{"id": "b", "device": "cuda", "value": 3}], "fact": 7})
    [record] = records_of(path)
    assert (record["ended"], record["fact"]) == ("stopped", 7)
    second = Stream(path, HEAD)
    assert [row["value"] for row in second.known("rows")] == [1, 2, 3]
    assert not second.time_is_up()
    second.keep("rows", {"id": "c", "device": "cuda", "value": 4})
    second.end({})
    [record] = records_of(path)
    assert {row["id"]: row["value"] for row in record["rows"]} == {"a": 2, "b": 3, "c": 4}
    assert record["ended"] == "finished"


def test_what_was_measured_elsewhere_is_measured_again(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"revision": "another"},
        {"hardware": {"gpu": "another", "driver": "1"}},
        {"hardware": {"gpu": "a GPU", "driver": "2"}},
        {"versions": {"torch": "2.12.0"}},
        {"quick": True},
    ]
    for number, change in enumerate(changes):
        path = tmp_path / str(number)
        Stream(path, HEAD).keep("rows", {"id": "a", "device": "cuda"})
        assert Stream(path, {**HEAD, **change}).known("rows") == []
        assert len(records_of(path)) == 2


def test_a_benchmark_streams_and_skips_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    line = ["--quick", "--device", "cpu", "--lines", str(path)]
    assert BENCHMARK.main([*line, "--seconds", "0.000001"]) == 0
    [record] = records_of(path)
    assert record["ended"] == "stopped"
    assert record.get("rows", []) == []
    assert BENCHMARK.main(line) == 0
    [record] = records_of(path)
    assert record["ended"] == "finished"
    assert record["command"] == "python -m benchmarks run padding --quick --device cpu"
    assert BENCHMARK.main(line) == 0
    [again] = records_of(path)
    assert again["rows"] == record["rows"]


# --- the list, and its minutes


def test_every_part_of_the_list_can_be_chosen_and_left_out() -> None:
    assert {piece.part for piece in PIECES} == set(PARTS)
    assert [piece.part for piece in PIECES] == sorted(piece.part for piece in PIECES)
    assert pieces_of(None, None) == list(PIECES)
    assert {piece.part for piece in pieces_of("b, d", None)} == {"b", "d"}
    assert [piece.name for piece in pieces_of("c,end_to_end", "resize")] == [
        "kernels", "padding", "assign", "verified", "end_to_end",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"'speed' is neither a part \(a, b, c, d, e\)"):
        pieces_of("speed", None)


def test_each_piece_is_a_benchmark_with_known_options_and_enough_time() -> None:
    left = 534.0
    for number, piece in enumerate(PIECES):
        benchmark = BENCHMARKS[piece.name]
        assert "cuda" in benchmark.devices
        for quick in (False, True):
            options = piece.command("cuda", quick=quick)[4:]
            assert benchmark.parser().parse_args(options).device == "cuda"
        given = limit_of(piece, PIECES[number:], left)
        assert given >= 12  # an import of torch and torchguard, and something to measure
        left -= given
    assert left == pytest.approx(0)


@dataclass(frozen=True)
class Planned:
    """A piece that runs a program of the test."""

    program: str
    part: str = "c"
    name: str = "padding"
    share: float = 1

    def command(self, device: str, *, quick: bool) -> list[str]:
        return ["-c", self.program]


def session(tmp_path: Path, seconds: float = 60) -> Any:
    return Session(tmp_path, seconds + CLOSING, device="cpu")


CHILD = """
import subprocess, sys, time, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path({path!r}).write_text(str(child.pid))
print("begun", flush=True)
time.sleep(60)
"""


def test_a_piece_that_goes_on_too_long_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    running, pid = session(tmp_path), tmp_path / "pid"
    begun = time.monotonic()
    ended = running.run(Planned(CHILD.format(path=str(pid))), 2.0)
    assert time.monotonic() - begun < 8
    assert ended == "killed: time was up"
    assert wait_until_gone(int(pid.read_text()))
    [line] = lines_of(running.results)
    assert line["piece"]["ended"] == "killed: time was up"
    assert "begun" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_a_piece_that_fails_does_not_end_the_list_and_one_that_dies_is_begun_again(
    tmp_path: Path,
) -> None:
    running, marks = session(tmp_path), tmp_path / "marks"
    dies = f"import os; open({str(marks)!r}, 'a').write('x'); os.kill(os.getpid(), 11)"
    pieces: Any = [
        Planned("raise SystemExit(5)"),
        Planned(dies, name="resize"),
        Planned("print('after it')", name="kernels"),
    ]
    assert work_through(running, pieces, go_on=False) == [
        "c padding: failed with 5",
        "c resize: failed with -11",
        "c kernels: stopped by itself: its time was up",  # it wrote no end
    ]
    assert marks.read_text() == "x" * CRASHES
    assert "after it" in (tmp_path / "log.txt").read_text(encoding="utf-8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu", "--skip", "a", "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert printed.count("== ") == 1
    log = (tmp_path / "out" / "log.txt").read_text(encoding="utf-8")
    assert "torch.cuda.is_available() is False here" in log
    assert "no part can run without a CUDA GPU; --rehearse is for a CPU" in printed


def test_what_no_time_is_left_for_is_said(tmp_path: Path) -> None:
    running = session(tmp_path, 0.5)
    summary = work_through(running, PIECES, go_on=False)
    assert summary == [f"{piece.part} {piece.name}: no time was left" for piece in PIECES]


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
        running.wait(20)
    assert "stopped by SIGTERM" in rest
    assert started
    assert all(wait_until_gone(int(pid)) for pid in started)


def test_the_command_imports_no_torch_and_gives_its_children_the_checkout() -> None:
    program = f"""
        import os, pathlib, sys
        sys.path.insert(0, {str(ROOT)!r})
        import benchmarks.__main__, benchmarks.gpu
        assert "torch" not in sys.modules and "torchguard" not in sys.modules
        session = benchmarks.gpu.Session(pathlib.Path("."), 60, revision="abc")
        child = session.environment("scratch")
        print(child["PYTHONPATH"].split(os.pathsep)[0], child["BENCHMARKS_REVISION"])
    """
    assert output_of(program, fresh=True) == f"{ROOT / 'src'} abc\n"


def test_a_finished_piece_is_left_out_when_the_command_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    kernels, padding = pieces_of("kernels,padding", None)
    assert not finished(path, padding)
    Stream(path, HEAD).end({})
    assert finished(path, padding)
    assert not finished(path, kernels)
    Stream(path, HEAD)  # begun again, and killed
    assert not finished(path, padding)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What ``gpu --rehearse`` prints and writes on a CPU."""
    out = tmp_path_factory.mktemp("rehearsal")
    line = [sys.executable, "-m", "benchmarks", "gpu", "--rehearse", "--minutes", "8"]
    line += ["--only", "padding,kernels,cuda_tests", "--out", str(out)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


@pytest.mark.slow
def test_the_command_says_what_it_would_run_and_runs_it(
    rehearsal: tuple[str, Path], tmp_path: Path
) -> None:
    printed, out = rehearsal
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.jsonl"]
    names = ("cuda_tests", "kernels", "padding")
    for name in names:
        assert f"would run on a GPU: python -m benchmarks run {name} --device cuda" in printed
        assert f" {name}: finished" in printed
    lines = lines_of(out / "results.jsonl")
    assert tuple(line["piece"]["name"] for line in lines if "piece" in line) == names
    # The tests that need a GPU were found, and each says why it was skipped.
    tests = [line["row"] for line in lines if "test" in line.get("row", {})]
    assert len(tests) >= 60
    if not torch.cuda.is_available():
        assert {row["outcome"] for row in tests} == {"skipped"}
    with pytest.raises(ValueError, match="is of a rehearsal"):
        report.take_in(out, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected results\.jsonl"):
        report.take_in(tmp_path, tmp_path)


@pytest.mark.slow
def test_what_the_command_finds_on_a_gpu_becomes_records_and_pages(
    rehearsal: tuple[str, Path], tmp_path: Path
) -> None:
    lines = []
    for found in (rehearsal[1] / "results.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(
            found.replace('"cpu"', '"cuda"').replace('"quick": true', '"quick": false')
        )
        if "head" in line:
            hardware = {"gpu": "NVIDIA H100", "driver": "580.1", "cpu": "a CPU", "cores": 1}
            line["head"] |= {"hardware": hardware, "gpu_at_start": {"clocks.sm": "1980 MHz"}}
        if line.get("ended") and "kernels" in line["run"]:
            continue  # this one was killed
        lines.append(json.dumps(line))
    (tmp_path / "results.jsonl").write_text("\n".join(lines), encoding="utf-8")
    written = report.take_in(tmp_path, tmp_path / "records")
    names = {path.name[11:] for path in written}
    assert names == {"cuda_tests-cuda.json", "kernels-cuda.json", "padding-cuda.json"}
    assert report.main(tmp_path / "records", tmp_path) == 0
    page = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    machine = "on NVIDIA H100 (CUDA None, driver 580.1, SMs at 1980 MHz) and 1 cores of an a CPU"
    assert page.count(machine) == len(names)
    assert page.count("Time was up before all of it was measured") == 1


# --- what only a GPU has, checked against torch's signatures


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """torch.cuda as it would be called: a wrong argument raises as it would there."""
    names = (
        "Event", "synchronize", "reset_peak_memory_stats", "memory_allocated",
        "max_memory_allocated", "set_per_process_memory_fraction", "get_device_properties", "init",
    )  # fmt: skip
    mocked = {name: mock.create_autospec(getattr(torch.cuda, name)) for name in names}
    mocked["Event"].return_value.elapsed_time.return_value = 2.0
    mocked["memory_allocated"].return_value = 100
    mocked["max_memory_allocated"].return_value = 164
    mocked["get_device_properties"].return_value = mock.Mock(total_memory=1000)
    for name, function in mocked.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return mocked


def test_a_call_is_timed_between_two_events_and_on_the_host(gpu: dict[str, Any]) -> None:
    host, device = on_both_clocks(lambda: time.sleep(0.02))
    assert 0.02 <= host < 1
    assert device == 0.002
    assert gpu["Event"].call_args_list == [mock.call(enable_timing=True)] * 2
    assert gpu["synchronize"].call_count == 2
    assert peak_bytes(lambda: None) == 64


def test_rows_of_a_gpu_have_the_hosts_time_beside_that_of_events(gpu: dict[str, Any]) -> None:
    x = torch.ones(3)
    setting = Setting("cuda", quick=True, rounds=3, options=Namespace())
    comparison = Comparison("add", "an addition", {"x": x}, "x + 1", "x + 2")
    [row] = measure([comparison], setting, block_seconds=1e-3)
    assert row["host"]["baseline_ns"].median > 0
    assert row["baseline_ns"].median == pytest.approx(row["guarded_ns"].median)  # 2 ms a block
    page = Table().of(json.loads(text({"rows": [row]})), "cuda")
    assert "more on the host" in page


def test_memory_of_a_gpu_is_limited_by_a_share_of_the_card(gpu: dict[str, Any]) -> None:
    limit("cuda", 250)
    gpu["set_per_process_memory_fraction"].assert_called_once_with(0.25)


def test_a_copy_that_is_no_repository_is_told_its_revision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BENCHMARKS_REVISION", "abc1234")
    assert context("bench_padding", [])["revision"] == "abc1234"


# --- what a GPU machine may lack


def test_the_operators_database_is_read_without_expecttest() -> None:
    program = f"""
        import importlib.util, sys
        sys.path.insert(0, {str(ROOT)!r})
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: (
            None if name == "expecttest" else found(name, *rest)
        )
        from benchmarks.bench_failures import cases, outcome
        seen = []
        for case in cases("cpu"):
            seen.append(outcome(case, "cpu"))
            if len(seen) == 5:
                break
        assert {{each["verdict"] for each in seen}} == {{"holds"}}, seen
        assert "expecttest" not in sys.modules
        print(len(seen))
    """
    assert output_of(program) == "5\n"
