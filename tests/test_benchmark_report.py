"""Every benchmark runs, and its record becomes a part of the page; never how fast it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The records of quick runs, with the word taken away that keeps them out of the page."""
    folder = tmp_path_factory.mktemp("records")
    done = benchmarks("run", "--quick", "--device", "cpu", "--json", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    for path in folder.iterdir():
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record.pop("quick") is True
        path.write_text(json.dumps(record), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> dict[str, Any]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.iterdir())]
    return {record["benchmark"]: record for record in found}


@pytest.fixture(scope="module")
def checkout(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the report of these records was written."""
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    to = tmp_path_factory.mktemp("checkout")
    done = benchmarks("report", "--records", str(folder), "--to", str(to))
    assert done.returncode == 0, done.stdout + done.stderr
    return to


def check(folder: Path, checkout: Path) -> subprocess.CompletedProcess[str]:
    return benchmarks("report", "--check", "--records", str(folder), "--to", str(checkout))


def test_every_benchmark_runs_and_writes_its_record(folder: Path, records: dict[str, Any]) -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert set(records) == files
    for name, record in records.items():
        assert record["rows"], name
        assert record["revision"] is None or record["revision"]
        assert record["command"].startswith(f"python benchmarks/{name}.py --device cpu --quick")
        assert str(ROOT) not in json.dumps(record)
    without_gpu = {name for name, each in records.items() if "note" in each}
    assert without_gpu == files - {"bench_fit", "bench_host", "bench_import"}
    named = {path.name[len("2026-11-21-") :] for path in folder.iterdir()}
    assert named == {f"{name.removeprefix('bench_')}-cpu.json" for name in files}


def test_a_guard_calls_no_operator_and_needs_no_byte_more(records: dict[str, Any]) -> None:
    rows = records["bench_kernels"]["rows"]
    claimed = [row for row in rows if row["target"] is not None]
    assert len(claimed) >= 15
    assert [row["what"] for row in claimed if row["verdict"] != "holds"] == []
    # What copies on purpose says so, which shows that the counting sees it.
    [copying] = [row for row in rows if row["what"].endswith("guarded(data=True)")]
    assert copying["more"]["aten::clone"] == 1
    assert copying["peak_bytes"][1] == copying["peak_bytes"][0] + 4096


def test_a_step_needs_no_byte_more_and_no_scope_disturbs_another(records: dict[str, Any]) -> None:
    rows = records["bench_end_to_end"]["rows"]
    assert {row["mode"] for row in rows} == {"eager", "compiled"}
    assert len({row["what"] for row in rows}) == 3
    assert len({row["phase"] for row in rows}) == 3
    for row in rows:
        where = {name: row[name] for name in ("what", "phase", "mode", "scope")}
        assert row["more_bytes"] == 0, where
        assert row["compiled_again"] == 0, where
        assert (row["graphs"] > 0) == (row["mode"] == "compiled"), where
        assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"], where


def test_when_memory_runs_out_plain_torch_loses_the_tensor_and_a_guard_does_not(
    records: dict[str, Any],
) -> None:
    plain, guarded = records["bench_out_of_memory"]["rows"]
    assert plain["way"] == "plain torch"
    assert plain["verdict"] == "the cache is lost"
    assert plain["says_bytes"] > plain["holds_bytes"]
    assert guarded["verdict"] == "nothing lost"
    assert guarded["says_bytes"] == guarded["holds_bytes"]
    assert plain["training_equal"]
    assert guarded["training_equal"]


def test_the_page_has_every_record_and_says_what_was_not_measured(
    checkout: Path, records: dict[str, Any]
) -> None:
    page = (checkout / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for record in records.values():
        assert f"command `{record['command']}`" in page
    assert "no record yet" not in page
    assert page.count("Not measured on a GPU yet") == len(records) - 3
    for image in (checkout / "docs" / "img").iterdir():
        assert f"](img/{image.name})" in page
        assert image.read_bytes().startswith(b"\x89PNG")
    assert page.count("![") == len(list((checkout / "docs" / "img").iterdir())) == 7


def test_a_page_that_says_something_else_is_found(checkout: Path, folder: Path) -> None:
    assert check(folder, checkout).returncode == 0
    page = checkout / "docs" / "benchmarks.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("times", "thimes", 1), encoding="utf-8")
    try:
        done = check(folder, checkout)
    finally:
        page.write_text(text, encoding="utf-8")
    assert done.returncode == 1
    assert "docs/benchmarks.md does not say what the records say" in done.stdout


def test_a_plot_of_another_record_is_found(checkout: Path, folder: Path) -> None:
    [path] = folder.glob("*-padding-*.json")
    text = path.read_text(encoding="utf-8")
    path.write_text(text + "\n", encoding="utf-8")  # the same figures, but not the same file
    try:
        done = check(folder, checkout)
    finally:
        path.write_text(text, encoding="utf-8")
    assert done.returncode == 1
    assert done.stdout.startswith("docs/img/bench_padding.png does not say")


def test_a_gpu_record_has_a_section_and_a_plot_of_its_own(
    folder: Path, records: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    both = tmp_path / "records"
    both.mkdir()
    for path in folder.iterdir():
        (both / path.name).write_bytes(path.read_bytes())
    made_up = json.loads(json.dumps(records["bench_kernels"]).replace('"cpu"', '"cuda"'))
    made_up["hardware"] |= {"cpu": "a CPU", "gpu": "a GPU"}
    made_up["rows"][0]["kernels"] = [3, 4]
    made_up["rows"][0]["verdict"] = "does not hold"
    (both / "2026-11-22-kernels-cuda.json").write_text(json.dumps(made_up), encoding="utf-8")
    padding = json.loads(json.dumps(records["bench_padding"]).replace('"cpu"', '"cuda"'))
    padding["hardware"] |= {"cpu": "a CPU", "gpu": "a GPU"}
    (both / "2026-11-22-padding-cuda.json").write_text(json.dumps(padding), encoding="utf-8")
    done = benchmarks("report", "--records", str(both), "--to", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert "### Kernels on a CPU" in page
    assert "### Kernels on a GPU" in page
    assert "on a GPU (CUDA None) and" in page
    assert "| 3 → 4 |" in page
    assert f"{made_up['rows'][0]['what']}: no operator" in page
    assert "Not measured on a GPU yet: `python -m benchmarks run kernels" not in page
    assert "](img/bench_padding_cuda.png)" in page
    assert (tmp_path / "docs" / "img" / "bench_padding_cuda.png").exists()
