"""Every benchmark runs, and its record becomes a part of the page; never how fast it was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import report
from benchmarks.catalog import BENCHMARKS
from benchmarks.machine import ROOT
from benchmarks.records import committed, newest, read_record
from benchmarks.stream import lines_of
from benchmarks.tables import AIM, Table, described, filled

from support.child_process import output_of

PROGRAM = """
import pathlib, sys
sys.path.insert(0, {root!r})
from benchmarks.catalog import BENCHMARKS
for name, each in BENCHMARKS.items():
    path = pathlib.Path({folder!r}, f"2026-01-01-{{name}}.json")
    if "cpu" in each.devices:
        each.main(["--quick", "--device", "cpu", "--json", str(path)])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of quick runs in one process, without the word that keeps them out of the page."""
    folder = tmp_path_factory.mktemp("records")
    output_of(PROGRAM.format(root=str(ROOT), folder=str(folder)))
    for path in folder.iterdir():
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record.pop("quick") is True
        path.write_text(json.dumps(record), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> dict[str, Any]:
    return {record["benchmark"]: record for record in committed(folder)}


@pytest.mark.slow
def test_every_benchmark_runs_and_writes_its_record(records: dict[str, Any]) -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert {each.file for each in BENCHMARKS.values()} == files
    assert set(records) == files - {"bench_cuda_tests"}
    for name, record in records.items():
        assert record["rows"], name
        assert record["command"].startswith(f"python benchmarks/{name}.py --quick --device cpu")
        assert record["date"].endswith("+00:00")
        assert set(record["versions"]) == {"torchguard", "torch", "cuda", "numpy", "python"}
        assert str(ROOT) not in json.dumps(record)


@pytest.mark.slow
def test_what_they_count_holds(records: dict[str, Any]) -> None:
    """No operator, kernel or byte more, no graph compiled anew, nothing lost: on any machine."""
    for row in records["bench_failures"]["rows"]:
        assert row["verdict"] == "holds", row
        assert row["torch"].startswith("corrupt"), row
    claimed = [row for row in records["bench_kernels"]["rows"] if row["target"] is not None]
    assert len(claimed) >= 15
    assert [row["what"] for row in claimed if row["verdict"] != "holds"] == []
    # What copies on purpose says so, which shows that the counting sees it.
    rows = records["bench_kernels"]["rows"]
    [copying] = [row for row in rows if row["what"].endswith("guarded(data=True)")]
    assert copying["more"]["aten::clone"] == 1
    assert copying["peak_bytes"][1] == copying["peak_bytes"][0] + 4096
    for row in records["bench_end_to_end"]["rows"]:
        assert (row["more_bytes"], row["compiled_again"]) == (0, 0), row
        assert (row["graphs"] > 0) == (row["mode"] == "compiled"), row
    plain, guarded = records["bench_out_of_memory"]["rows"]
    assert plain["verdict"] == "the cache is lost"
    assert guarded["verdict"] == "nothing lost"
    assert guarded["says_bytes"] == guarded["holds_bytes"]
    untouched = records["bench_resize"]["untouched"]
    assert untouched["verdict"].startswith("reached")
    assert untouched["the_same_object_after_uninstall"] == untouched["attributes"]


@pytest.mark.slow
def test_comparisons_have_figures_of_both_sides_and_their_ratio(records: dict[str, Any]) -> None:
    rows = records["bench_resize"]["rows"]
    assert len(rows) == len({row["id"] for row in rows}) >= 20
    for row in rows:
        for figure in ("baseline_ns", "guarded_ns", "added_ns", "ratio"):
            assert row[figure]["q1"] <= row[figure]["median"] <= row[figure]["q3"], row["id"]
        assert (row["target"] is None) == (row["verdict"] is None)
    growing = [row for row in rows if row["id"].startswith("grow-")]
    assert all(row["making_ns"]["median"] > 0 for row in growing)


@pytest.mark.slow
def test_the_page_has_every_record_and_a_wrong_page_is_found(
    folder: Path, records: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    assert report.main(folder, tmp_path) == 0
    assert report.main(folder, tmp_path, check=True) == 0
    path = tmp_path / "docs" / "benchmarks.md"
    page = path.read_text(encoding="utf-8")
    for record in records.values():
        assert f"command `{record['command']}`" in page
    assert "no record yet" not in page
    on_gpus = [name for name in records if "cuda" in BENCHMARKS[name[6:]].devices]
    assert page.count("Not measured on a GPU yet") == len(on_gpus) + 1
    images = list((tmp_path / "docs" / "img").iterdir())
    assert sorted(re.findall(r"!\[.*\]\(img/(.*)\)", page)) == sorted(each.name for each in images)
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)

    path.write_text(page.replace("times", "thimes", 1), encoding="utf-8")
    assert report.main(folder, tmp_path, check=True) == 1
    path.write_text(page, encoding="utf-8")
    [padding] = folder.glob("*-padding.json")
    text = padding.read_text(encoding="utf-8")
    padding.write_text(text + "\n", encoding="utf-8")  # the same figures, but not the same file
    assert report.main(folder, tmp_path, check=True) == 1
    padding.write_text(text, encoding="utf-8")


def test_the_committed_pages_and_plots_say_what_the_records_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = report.main(ROOT / "benchmarks" / "records", check=True)
    assert (status, capsys.readouterr().out) == (0, "")


def test_another_figure_in_the_record_makes_another_table() -> None:
    record = newest(committed(), "resize", "cpu")
    assert record is not None
    page = "before\n<!-- begin: costs, of old -->\nold\n<!-- end: costs -->\nafter"
    written = report.rewritten(page, "costs", report._costs(record))
    assert written.startswith("before\n<!-- begin: costs, written by ")
    assert written.endswith("<!-- end: costs -->\nafter")
    for row in record["rows"]:
        row["guarded_ns"]["median"] *= 2
    assert report.rewritten(written, "costs", report._costs(record)) != written
    assert report.rewritten("# A page without marks\n", "costs", "x") == "# A page without marks\n"


def test_a_quick_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    path.write_text('{"quick": true}', encoding="utf-8")
    with pytest.raises(ValueError, match="was made with --quick"):
        read_record(path)


def test_a_table_shows_what_its_templates_name() -> None:
    rows = [
        {"a": "one", "ns": 1234.5, "target": "less", "verdict": "missed", "why": "it is new"},
        {"a": "one", "ns": 12.3e6, "target": None, "verdict": None, "only": {"x": 2}},
    ]
    table = Table({"": "{a}", "time": "{ns:time}", "more": "{only:counted}", "target": AIM})
    assert table.of({"rows": rows}, "cpu") == (
        "|  | time | more | target |\n| --- | --- | --- | --- |\n"
        "| one | 1.2 µs |  | less: missed |\n|  | 12.3 ms | 2 `x` |  |\n\n"
        "- Where a target is missed: it is new."
    )
    assert table.of({"rows": rows}, "cuda") == ""
    assert "| a | ns |" in Table().of({"rows": [{"a": 1, "ns": 2, "device": "cpu"}]}, "cpu")
    assert filled("{there:times} {missing}", {"there": 1}) == ""


# --- what a GPU's machine has found


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
def test_the_command_of_the_day_says_what_it_would_run_and_runs_it(
    rehearsal: tuple[str, Path], tmp_path: Path
) -> None:
    printed, out = rehearsal
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.jsonl"]
    names = ("cuda_tests", "kernels", "padding")
    for name in names:
        assert f"would run on a GPU: python benchmarks/bench_{name}.py --device cuda" in printed
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
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    lines = []
    for text in (rehearsal[1] / "results.jsonl").read_text(encoding="utf-8").splitlines():
        text = text.replace('"cpu"', '"cuda"').replace('"quick": true', '"quick": false')  # noqa: PLW2901
        line = json.loads(text)
        if "head" in line:
            hardware = {"gpu": "NVIDIA H100", "driver": "580.1", "cpu": "a CPU"}
            line["head"]["hardware"] = {"cores": 1} | hardware
        if line.get("ended") and "kernels" in line["run"]:
            continue  # this one was killed
        lines.append(json.dumps(line))
    (tmp_path / "results.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = report.take_in(tmp_path, tmp_path / "records")
    names = {path.name[11:] for path in found}
    assert names == {"cuda_tests-cuda.json", "kernels-cuda.json", "padding-cuda.json"}
    assert report.main(tmp_path / "records", tmp_path) == 0
    page = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page.count("NVIDIA H100 (CUDA None, driver 580.1)") == len(names)
    assert page.count("Time was up before all of it was measured") == 1
    assert "](img/bench_padding_cuda.png)" in page
    assert (tmp_path / "docs" / "img" / "bench_padding_cuda.png").exists()


def test_a_record_tells_the_clocks_of_its_gpu() -> None:
    record = {
        "date": "2026-11-22", "command": "c", "revision": "r", "threads": 1,
        "load_average_at_start": 0.1, "gpu_at_start": {"clocks.sm": "1980 MHz"},
        "versions": {"torch": "2.11.0", "python": "3.12", "cuda": "13.0"},
        "hardware": {"cpu": "CPU", "cores": 16, "gpu": "NVIDIA H100", "driver": "580.1"},
    }  # fmt: skip
    assert "on NVIDIA H100 (CUDA 13.0, driver 580.1, SMs at 1980 MHz) and 16" in described(record)
