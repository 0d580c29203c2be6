"""The benchmark of bucketed runs, in each of its ways, and its record can be drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def benchmarks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


def test_a_row_runs_in_a_process_of_its_own() -> None:
    from benchmarks.processes import in_a_process  # noqa: PLC0415

    row = in_a_process("bench_buckets", "run_row", "eager", "training", "cpu", 2, None)
    assert len(row["seconds"]) == 2
    assert row["graphs"] == row["waste"] == 0
    assert row["total_s"] > 0


def test_every_row_can_be_made() -> None:
    import torch  # noqa: PLC0415
    import torch._dynamo.config as settings  # noqa: PLC0415
    from benchmarks.bench_buckets import ROWS, Model, wrapped  # noqa: PLC0415

    limit = "recompile_limit" if hasattr(settings, "recompile_limit") else "cache_size_limit"
    with settings.patch({limit: getattr(settings, limit)}):  # some rows raise it
        for row in ROWS:
            torch.compiler.reset()
            call, module = wrapped(row, Model(), None)
            assert callable(call)
            assert (module is not None) == row.startswith("bucketed")


def test_verdicts_name_every_target(tmp_path: Path) -> None:
    from benchmarks.bench_buckets import ROWS, main, overhead, verdicts  # noqa: PLC0415

    overheads = [overhead(count, 2) for count in (1, 2)]
    assert [each["buckets"] for each in overheads] == [1, 2]
    rows = [
        {"row": row, "phase": "forward", "device": "cpu", "total_s": 2.0, "steady_total_s": 1.0}
        for row in ROWS
    ]
    found = verdicts(rows, overheads)
    assert [line.partition(":")[0] for line in found] == [
        "adds at most 15 us",
        "flat within 10 % to 64 buckets",
        "forward, cpu",
    ]
    assert "reached (1.000 times)" in found[-1]
    path = tmp_path / "record.json"
    main(["--quick", "--device", "cpu", "--rows", "eager", "--json", str(path)])
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["quick"] is True
    assert [row["phase"] for row in record["rows"]] == ["training"]
    assert record["targets"]
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from benchmarks.plots import PLOTS  # noqa: PLC0415

    PLOTS["buckets"](record, "cpu", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_bad_usage_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.bench_buckets import main  # noqa: PLC0415

    with pytest.raises(SystemExit) as ended:
        main(["--batches", "0"])
    assert ended.value.code == 2
    assert "--batches 0: expected 1 or more" in capsys.readouterr().err
