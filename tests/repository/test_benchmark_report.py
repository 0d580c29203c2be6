"""Every benchmark runs, and its record becomes a part of the page; never how fast it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("benchmarks_can_be_imported")]


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What ``gpu --rehearse`` prints and writes: the command of the day, on a CPU."""
    out = tmp_path_factory.mktemp("rehearsal")
    done = benchmarks("gpu", "--rehearse", "--minutes", "14", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


@pytest.fixture(scope="module")
def folder(rehearsal: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of quick runs, with the word taken away that keeps them out of the page.

    Most are of the rehearsal; the benchmarks that don't ask for a GPU are run here.
    """
    from benchmarks.catalog import BENCHMARKS  # noqa: PLC0415
    from benchmarks.gpu import PIECES  # noqa: PLC0415
    from benchmarks.report import take_in  # noqa: PLC0415

    folder, results = tmp_path_factory.mktemp("records"), tmp_path_factory.mktemp("results")
    text = (rehearsal[1] / "results.jsonl").read_text(encoding="utf-8")
    (results / "results.jsonl").write_text(text.replace('"quick": true', '"quick": false'))
    assert len(take_in(results, folder)) == len(PIECES)
    rest = [name for name in BENCHMARKS if name not in {piece.name for piece in PIECES}]
    assert {"fit", "host", "import"} <= set(rest)
    done = benchmarks("run", *rest, "--quick", "--device", "cpu", "--json", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in rest:
        [path] = folder.glob(f"*-{name}-cpu.json")
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
    named = {path.name[len("2026-11-21-") :] for path in folder.iterdir()}
    assert named == {f"{name.removeprefix('bench_')}-cpu.json" for name in files}


def test_the_command_of_the_day_says_what_it_would_run_and_runs_it(
    rehearsal: tuple[str, Path],
) -> None:
    from benchmarks.gpu import PARTS, PIECES  # noqa: PLC0415
    from benchmarks.stream import lines_of, records_of  # noqa: PLC0415

    printed, out = rehearsal
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "results.jsonl"]
    for letter, what in PARTS.items():
        assert f"== {letter}: {what}" in printed
    for piece in PIECES:
        command = " ".join(piece.command("cuda", quick=False)).split(" 'bucketed")[0][:60]
        assert f"would run on a GPU: python {command}" in printed
        assert f"{piece.part} {piece.name}: finished" in printed
    ended = [line["piece"] for line in lines_of(out / "results.jsonl") if "piece" in line]
    assert [each["name"] for each in ended] == [piece.name for piece in PIECES]
    found = {record["benchmark"]: record for record in records_of(out / "results.jsonl")}
    assert set(found) == {f"bench_{piece.name}" for piece in PIECES}
    assert {record["ended"] for record in found.values()} == {"finished"}
    # The tests that need a GPU were found, and each says why it was skipped.
    tests = found["bench_cuda_tests"]["rows"]
    assert len(tests) >= 60
    if not torch.cuda.is_available():
        assert {row["outcome"] for row in tests} == {"skipped"}
        assert all("needs a CUDA GPU" in row["why"] for row in tests)


def test_a_rehearsal_is_not_published(rehearsal: tuple[str, Path], tmp_path: Path) -> None:
    from benchmarks.report import take_in  # noqa: PLC0415

    with pytest.raises(ValueError, match="is of a rehearsal"):
        take_in(rehearsal[1], tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected results\.jsonl"):
        take_in(tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_operators_that_fail_leave_their_outputs_with_a_guard_alone(
    records: dict[str, Any],
) -> None:
    rows = records["bench_failures"]["rows"]
    assert len(rows) == 12
    assert {row["verdict"] for row in rows} == {"holds"}
    assert all(row["torch"].startswith("corrupt") for row in rows)
    assert {"Tensor.resize_", "Tensor.resize_as_", "Tensor.set_"} < {
        row["operator"] for row in rows
    }


def test_no_step_calls_what_install_patches(records: dict[str, Any]) -> None:
    rows = [row for row in records["bench_host"]["rows"] if row["scope"] == "install()"]
    assert len(rows) == 12
    assert {row["count"] for row in rows} == {0}


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
    from benchmarks.catalog import BENCHMARKS  # noqa: PLC0415

    page = (checkout / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name, record in records.items():
        if name not in {"bench_doctor", "bench_cuda_tests"}:  # rehearsed on a CPU, and no more
            assert f"command `{record['command']}`" in page
    assert "no record yet" not in page
    on_gpus = [name for name in records if "cuda" in BENCHMARKS[name[6:]].devices]
    assert page.count("Not measured on a GPU yet") == len(on_gpus)
    for image in (checkout / "docs" / "img").iterdir():
        assert f"](img/{image.name})" in page
        assert image.read_bytes().startswith(b"\x89PNG")
    assert page.count("![") == len(list((checkout / "docs" / "img").iterdir())) == 9


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


def test_what_the_command_finds_on_a_gpu_becomes_records_and_pages(
    rehearsal: tuple[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from benchmarks.gpu import PIECES  # noqa: PLC0415

    lines = []
    for text in (rehearsal[1] / "results.jsonl").read_text(encoding="utf-8").splitlines():
        for of_cpu, of_gpu in (
            ('"cpu"', '"cuda"'),
            ('"quick": true', '"quick": false'),
            ('"gpu_bytes": null', '"gpu_bytes": 1048576'),
        ):
            text = text.replace(of_cpu, of_gpu)  # noqa: PLW2901
        line = json.loads(text)
        if "head" in line:
            hardware = line["head"]["hardware"]
            hardware |= {"gpu": "NVIDIA H100", "driver": "580.1", "cpu": "a CPU"}
            hardware.pop("cuda", None)
        if line.get("ended") and "end_to_end" in line["run"]:
            continue  # this one was killed
        lines.append(json.dumps(line))
    (tmp_path / "results.jsonl").write_text("\n".join(lines), encoding="utf-8")
    records = tmp_path / "records"
    records.mkdir()
    given = ("--records", str(records), "--to", str(tmp_path))
    done = benchmarks("report", str(tmp_path), *given)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name[len("2026-11-22-") :] for path in records.iterdir()}
    assert names == {f"{piece.name}-cuda.json" for piece in PIECES}
    page = (tmp_path / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert "Not measured on a GPU yet" not in page
    assert page.count("NVIDIA H100 (CUDA None, driver 580.1)") == len(PIECES)
    assert page.count("Time was up before all of it was measured") == 1
    for image in (tmp_path / "docs" / "img").iterdir():
        assert image.name.endswith("_cuda.png")
        assert f"](img/{image.name})" in page
