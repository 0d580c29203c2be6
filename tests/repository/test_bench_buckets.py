"""The benchmark of bucketed runs, in each of its ways, and its record can be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.usefixtures("benchmarks_can_be_imported")


def test_a_row_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    from benchmarks.bench_buckets import Cache  # noqa: PLC0415

    cache = Cache(tmp_path, [])
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "row.so").touch()
    row = cache.run("eager", "training", "cpu", 2, None)
    assert not (tmp_path / "earlier").exists()
    assert len(row["seconds"]) == 2
    assert row["process_s"] > row["total_s"]
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


def _row(row: str, seconds: list[float], step: float) -> dict[str, Any]:
    return {
        "row": row,
        "phase": "forward",
        "device": "cpu",
        "seconds": seconds,
        "total_s": sum(seconds),
        "steady_ms": 1e3 * step,
        "steady_total_s": step * len(seconds),
        "graphs": 1,
        "recompiles": 0,
        "waste": 0.08,
    }


@pytest.mark.parametrize(
    ("ours", "dynamic", "said"),
    [
        # (first batch, every other batch), 10 batches
        ((8.0, 1.0), (2.0, 2.0), "From batch 7 on, all that went before included"),
        ((20.0, 1.0), (2.0, 2.0), "earned back after about 19 batches; for fewer, dynamic=True"),
        ((20.0, 2.0), (2.0, 1.0), "Buckets never earn back what compiling them costs"),
    ],
)
def test_the_page_says_from_which_batch_on_buckets_win(
    ours: tuple[float, float], dynamic: tuple[float, float], said: str
) -> None:
    from benchmarks.publish_buckets import DYNAMIC, OURS, laid_out  # noqa: PLC0415

    rows = [
        _row(name, [first, *[step] * 9], step)
        for name, (first, step) in ((OURS, ours), (DYNAMIC, dynamic))
    ]
    record = {
        "date": "2026-01-02T03:04:05",
        "versions": {"torch": "2.13.0+cpu"},
        "hardware": {"cores": 2, "cpu": "Model, 2.0 GHz"},
        "load_average_at_start": 0.1,
        "command": "command",
        "rows": rows,
        "overhead": [{"buckets": count, "added_padded_us": 9.5} for count in (1, 64)],
        "targets": ["adds at most 15 us: reached (9.5 us)"],
        "note": "not measured on a GPU yet",
    }
    page = laid_out(record)
    assert said in page
    assert "| bucketed fit 8 |" in page
    assert "costs 9.5 µs more" in page
    assert "not measured on a GPU yet" in page


def test_the_page_says_what_the_newest_record_says() -> None:
    from benchmarks.publish_buckets import main  # noqa: PLC0415

    assert main(["--check"]) == 0
