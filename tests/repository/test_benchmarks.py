"""The benchmark runs and writes a record that the pages can be written from; never how fast."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.usefixtures("benchmarks_can_be_imported")


@pytest.fixture(scope="module", params=["file", "module"])
def record(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What quick mode writes, run in both ways that the documentation names."""
    path = tmp_path_factory.mktemp("records") / "record.json"
    program = {"file": ["benchmarks/bench_resize.py"], "module": ["-m", "benchmarks.bench_resize"]}
    options = ["--quick", "--device", "cpu", "--json", str(path)]
    subprocess.run([sys.executable, *program[request.param], *options], cwd=ROOT, check=True)
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_record_says_when_with_what_and_on_what_it_was_made(record: Any) -> None:
    assert record["benchmark"] == "bench_resize"
    assert record["date"].endswith("+00:00")
    assert set(record["versions"]) == {"torchguard", "torch", "cuda", "numpy", "python"}
    assert record["hardware"]["cpu"]
    assert record["hardware"]["cores"] >= 1
    assert record["threads"] == 1
    assert record["command"].startswith("python benchmarks/bench_resize.py --quick --device cpu")
    assert record["note"] == "not measured on a GPU yet"
    assert record["quick"] is True
    assert "revision" in record


def test_every_row_has_figures_of_both_sides_and_their_ratio(record: Any) -> None:
    identifiers = [row["id"] for row in record["rows"]]
    assert len(identifiers) == len(set(identifiers)) >= 20
    for row in record["rows"]:
        assert row["n"] == 3
        assert row["block"] >= 1
        for figure in ("baseline_ns", "guarded_ns", "added_ns", "ratio"):
            spread = row[figure]
            assert spread["q1"] <= spread["median"] <= spread["q3"], (row["id"], figure)
        assert (row["target"] is None) == (row["verdict"] is None)
        if row["verdict"] not in {None, "reached"}:
            assert row["verdict"].startswith("missed: ")
            assert row["why"]


def test_a_row_that_grows_times_the_making_of_its_tensor_too(record: Any) -> None:
    growing = [row for row in record["rows"] if row["id"].startswith("grow-")]
    assert len(growing) == 5
    assert all(row["making_ns"]["median"] > 0 for row in growing)


def test_operations_that_are_not_patched_are_the_same_objects(record: Any) -> None:
    found = record["untouched"]
    assert found["verdict"].startswith("reached")
    assert found["patched"] > 300
    assert found["the_same_object"] == found["attributes"] - found["patched"]
    assert found["the_same_object_after_uninstall"] == found["attributes"]


def test_the_pages_say_what_the_newest_record_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.publish", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_figure_in_the_record_makes_another_table() -> None:
    from benchmarks.publish import newest_record, rewritten, summary  # noqa: PLC0415
    from benchmarks.records import read_record  # noqa: PLC0415

    path = newest_record()
    committed = {**read_record(path), "file": path.name}
    page = (ROOT / "docs" / "guards.md").read_text(encoding="utf-8")
    assert rewritten(page, "costs", summary(committed)) == page
    slower = copy.deepcopy(committed)
    for row in slower["rows"]:
        row["guarded_ns"]["median"] *= 2
    assert rewritten(page, "costs", summary(slower)) != page


def test_what_verified_costs_is_told_of_a_stream_of_lengths_once_it_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks import publish  # noqa: PLC0415
    from benchmarks.records import committed, newest  # noqa: PLC0415

    record = copy.deepcopy(newest(committed(), "verified", "cpu"))
    assert record is not None
    row = {**record["first_calls"][0], "id": "first-lengths", "checks": 87}
    record["first_calls"] = [row]
    monkeypatch.setattr(publish, "committed", lambda: [record])
    text = publish.verified_costs({})
    assert (
        "| a stream of 120 lengths through one graph, its compilation included, 87 checks |" in text
    )


def test_a_gpus_record_is_told_of_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import publish  # noqa: PLC0415
    from benchmarks.records import committed, newest  # noqa: PLC0415

    records = [each for each in committed() if each["hardware"]["gpu"] is None]
    monkeypatch.setattr(publish, "committed", lambda: records)
    resize = newest(records, "resize", "cpu")
    assert resize is not None
    assert "On an" not in publish.overhead(resize)
    assert "Not measured on a GPU yet." in publish.summary(resize)
    assert "not measured on a GPU yet" in publish.every_row(resize)
    for name in ("end_to_end", "resize"):
        made_up = copy.deepcopy(newest(records, name, "cpu"))
        assert made_up is not None
        made_up["hardware"]["gpu"] = "NVIDIA H100"
        for row in made_up["rows"]:
            row["device"] = "cuda"
            if name == "end_to_end":
                row["ratio"]["median"] = 1.0004
        records.append(made_up)
    text = "On an NVIDIA H100 it differs by +0.04 % to +0.04 % with `install()`"
    assert text in publish.overhead(resize)
    assert "On an NVIDIA H100: [benchmarks]" in publish.summary(resize)
    for page in (publish.summary, publish.every_row):
        assert "not measured on a GPU yet" not in page(resize).lower()


def test_a_quick_record_is_not_published(record: Any, tmp_path: Path) -> None:
    from benchmarks.records import read_record  # noqa: PLC0415

    path = tmp_path / "quick.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match="was made with --quick"):
        read_record(path)


def test_a_page_without_its_marks_is_refused() -> None:
    from benchmarks.publish import rewritten  # noqa: PLC0415

    with pytest.raises(ValueError, match="has lost the lines"):
        rewritten("# A page\n", "costs", "| a | b |")


def test_the_plot_is_drawn(record: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from benchmarks.plots import PLOTS, shows  # noqa: PLC0415

    path = tmp_path / "plot.png"
    assert not shows(path, record)
    PLOTS["resize"](record, "cpu", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert shows(path, record)
    assert not shows(path, {**record, "digest": "another"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rounds", "0"], "--rounds 0: expected 1 or more"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_bad_usage_ends_with_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.bench_resize import main  # noqa: PLC0415

    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
