"""Every benchmark runs, and its record becomes a part of the page; never how fast it was."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.bench_end_to_end import judged
from benchmarks.bench_failures import Case as Failing
from benchmarks.bench_failures import outcome
from benchmarks.bench_host import bound_of, entered
from benchmarks.bench_kernels import Case, compare
from benchmarks.catalog import BENCHMARKS
from benchmarks.counting import counted
from benchmarks.harness import AddedTarget, Target
from benchmarks.machine import ROOT
from benchmarks.paired import Variant, ratios, take_turns
from benchmarks.records import committed, read_record
from benchmarks.spread import Interval

import torchguard
from support.child_process import output_of

PROGRAM = f"""
import pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.catalog import BENCHMARKS
for name, each in BENCHMARKS.items():
    path = pathlib.Path(sys.argv[1], f"2026-01-01-{{name}}.json")
    if "cpu" in each.devices:
        each.main(["--quick", "--device", "cpu", "--json", str(path)])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of quick runs in one process, without the word that keeps them out of the page."""
    folder = tmp_path_factory.mktemp("records")
    output_of(PROGRAM, str(folder))
    for path in folder.iterdir():
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record.pop("quick") is True
        path.write_text(json.dumps(record), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> dict[str, Any]:
    return {record["benchmark"].removeprefix("bench_"): record for record in committed(folder)}


@pytest.mark.slow
def test_every_benchmark_runs_and_writes_its_record(records: dict[str, Any]) -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert {f"bench_{name}" for name in BENCHMARKS} == files
    assert set(records) == {*BENCHMARKS} - {"cuda_tests"}
    for name, record in records.items():
        assert record["rows"], name
        assert record["command"].startswith(f"python -m benchmarks run {name} --quick --device cpu")
        assert record["date"].endswith("+00:00")
        assert set(record["versions"]) == {"torchguard", "torch", "cuda", "numpy", "python"}
        assert str(ROOT) not in json.dumps(record)
    rows = records["resize"]["rows"]
    assert len(rows) == len({row["id"] for row in rows}) >= 20
    for row in rows:
        for figure in ("baseline_ns", "guarded_ns", "added_ns", "ratio"):
            assert row[figure]["q1"] <= row[figure]["median"] <= row[figure]["q3"], row["id"]
        assert (row["target"] is None) == (row["verdict"] is None)
        assert not row["id"].startswith("grow-") or row["making_ns"]["median"] > 0


@pytest.mark.slow
def test_what_they_count_holds(records: dict[str, Any]) -> None:
    """No operator, kernel or byte more, no graph compiled anew, nothing lost: on any machine."""
    for row in records["failures"]["rows"]:
        assert row["verdict"] == "holds", row
        assert row["torch"].startswith("corrupt"), row
    rows = records["kernels"]["rows"]
    claimed = [row for row in rows if row["target"] is not None]
    assert len(claimed) >= 15
    assert [row["what"] for row in claimed if row["verdict"] != "holds"] == []
    # What copies on purpose says so, which shows that the counting sees it.
    [copying] = [row for row in rows if row["what"].endswith("guarded(data=True)")]
    assert copying["more"]["aten::clone"] == 1
    assert copying["peak_bytes"][1] == copying["peak_bytes"][0] + 4096
    for row in records["end_to_end"]["rows"]:
        assert (row["more_bytes"], row["compiled_again"]) == (0, 0), row
        assert (row["graphs"] > 0) == (row["mode"] == "compiled"), row
    for row in records["host"]["rows"]:  # the figures of the README
        assert row["count"] == 0 or row["scope"] != "install()"
    plain, guarded = records["out_of_memory"]["rows"]
    assert plain["verdict"] == "the cache is lost"
    assert guarded["verdict"] == "nothing lost"
    assert guarded["says_bytes"] == guarded["holds_bytes"]
    untouched = records["resize"]["untouched"]
    assert untouched["verdict"].startswith("reached")
    assert untouched["the_same_object_after_uninstall"] == untouched["attributes"]


@pytest.mark.slow
def test_the_page_has_every_record_and_a_wrong_page_is_found(
    folder: Path, records: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    guards = tmp_path / "docs" / "guards.md"
    guards.parent.mkdir()
    guards.write_text("before\n<!-- begin: costs, of old -->\nold\n<!-- end: costs -->\nafter")
    assert report.main(folder, tmp_path) == 0
    assert report.main(folder, tmp_path, check=True) == 0
    costs = guards.read_text(encoding="utf-8")
    assert costs.startswith("before\n<!-- begin: costs, written by ")
    assert costs.endswith("<!-- end: costs -->\nafter")
    path = tmp_path / "docs" / "benchmarks.md"
    page = path.read_text(encoding="utf-8")
    for record in records.values():
        assert f"command `{record['command']}`" in page
    assert "no record yet" not in page
    on_gpus = [name for name in records if "cuda" in BENCHMARKS[name].devices]
    assert page.count("Not measured on a GPU yet") == len(on_gpus) + 1
    images = list((tmp_path / "docs" / "img").iterdir())
    assert sorted(re.findall(r"!\[.*\]\(img/(.*)\)", page)) == sorted(each.name for each in images)
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in images)

    for stale in (path, guards):
        text = stale.read_text(encoding="utf-8")
        stale.write_text(text.replace("times", "thimes", 1), encoding="utf-8")
        assert report.main(folder, tmp_path, check=True) == 1
        stale.write_text(text, encoding="utf-8")
    [drawn] = folder.glob("*-resize.json")
    text = drawn.read_text(encoding="utf-8")
    drawn.write_text(text + "\n", encoding="utf-8")  # the same figures, but not the same file
    assert report.main(folder, tmp_path, check=True) == 1
    drawn.write_text(text, encoding="utf-8")


def test_the_committed_pages_and_plots_say_what_the_records_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (main(["report", "--check"]), capsys.readouterr().out) == (0, "")


def test_a_quick_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    path.write_text('{"quick": true}', encoding="utf-8")
    with pytest.raises(ValueError, match="was made with --quick"):
        read_record(path)


def test_list_names_every_benchmark_and_what_it_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(BENCHMARKS)
    assert all(line.endswith("?") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "speed"], "no benchmark 'speed': there are end_to_end"),
        (["run", "--json", "all.json"], "--json all.json: several benchmarks need a folder"),
        (["run", "fit", "--device", "tpu"], "invalid choice"),
        (["run", "fit", "--device", "cpu", "--rounds", "0"], "--rounds 0: expected 1 or more"),
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


# --- what they measure with


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    held = 0
    for _ in range(100):
        # Now and then another program runs: the median does not mind.
        rounds = random.normal(1.002, 0.01, 60) + 0.5 * (random.random(60) < 0.05)
        found = Interval.of(rounds.tolist())
        held += found.low <= 1.003 and found.high >= 1.001
    assert held >= 88
    assert Interval.of([1.0, 1.0, 1.0]).holds_one
    assert not Interval.of(random.normal(1.01, 0.002, 50).tolist()).holds_one


def test_variants_take_turns_inside_their_scopes_and_the_ratio_is_of_one_round() -> None:
    seen: list[str] = []
    inside: list[str] = []

    @contextlib.contextmanager
    def scope() -> Any:
        inside.append("")
        yield
        inside.pop()

    def step(name: str) -> None:
        assert bool(inside) == (name == "guarded")
        seen.append(name)

    variants = [
        Variant("plain", lambda: step("plain"), contextlib.nullcontext),
        Variant("guarded", lambda: step("guarded"), scope),
    ]
    found = take_turns(variants, rounds=2, calls=2, device="cpu")
    # One call to warm up and two that are timed; the second round the other way round.
    assert seen == ["plain"] * 3 + ["guarded"] * 6 + ["plain"] * 3
    assert [len(times) for times in found.values()] == [2, 2]
    interval = ratios({"plain": [1.0, 10.0], "guarded": [2.0, 20.0]}, "plain")["guarded"]
    assert (interval.low, interval.median, interval.high) == (2.0, 2.0, 2.0)


def test_what_a_call_makes_torch_do_is_counted() -> None:
    x, before = torch.ones(256), torch.ones(256)

    def two() -> object:
        first = x * x
        second = first * x
        del first
        third = second + x  # takes the place of the first
        return second, third

    def frees() -> object:
        before.resize_(0)
        return x * x

    double = counted(two, "cpu")
    assert double.operators == {"aten::mul": 2, "aten::add": 1}
    assert (double.calls, double.kernels, double.copies, double.peak_bytes) == (3, 0, 0, 2048)
    # What was there before is not counted when it goes.
    assert counted(frees, "cpu").peak_bytes == 1024
    more = compare(Case("one more", lambda: x * x, lambda: x * x + x), "cpu")
    assert (more["verdict"], more["more"]) == ("does not hold", {"aten::add": 1})
    larger = compare(Case("larger", lambda: torch.empty(8), lambda: torch.empty(9)), "cpu")
    assert larger["verdict"] == "does not hold"


def test_targets_say_by_how_much_they_are_missed_and_whether_it_is_noise() -> None:
    assert Target(2).verdict([(100, 199)] * 3) == "reached"
    assert Target(2).verdict([(100, 250)] * 3) == "missed: 2.5 times"
    assert AddedTarget(1).verdict([(100, 1100)] * 3) == "reached"
    assert AddedTarget(1).verdict([(100, 2100)] * 3) == "missed: 2 us more"
    restless = [(100.0, 100.0 + 10 * number) for number in range(-4, 8)]
    assert "95 % interval 0.8" in Target(1.02).verdict(restless)
    assert "the target lies in it" in AddedTarget(0.002).verdict(restless)


def test_a_step_on_a_gpu_is_judged_by_time_and_by_memory() -> None:
    def verdict(median: float, low: float, high: float, more: int = 0) -> str:
        return judged(1.001, Interval(median, low, high), more)["verdict"]

    assert verdict(1.0002, 1.0001, 1.0004) == "reached"
    assert verdict(1.002, 0.99, 1.01) == "reached: not distinguishable from nothing"
    assert verdict(1.003, 1.002, 1.004) == "missed: 0.20 % more than it allows"
    assert verdict(1.0, 1.0, 1.0, more=1) == "missed: 1 bytes more at the peak"


def test_every_call_that_enters_a_guard_is_counted_however_it_is_reached() -> None:
    x, y = torch.ones(3), torch.empty(3)
    with torchguard.install("resize", "out", only_if_needed=False):
        held = torch.add  # as a module that imported it by name holds it

        def step() -> None:
            torch.mul(x, 2)
            held(x, 1)
            torch.add(x, 1, out=y)
            torch.empty(3).resize_(5).resize_(2)
            torch.empty(0).set_(x.untyped_storage())
            x.add_(1).view(3).sum()  # nothing patches these

        found = entered(step)
    assert found == {
        "without out=": {"mul": 1, "add": 1, "empty": 2},
        "with out=": {"add": 1},
        "resize_": {"resize_": 2},
        "set_": {"set_": 1},
    }
    cost = {"without out=": 1.0, "with out=": 10.0, "resize_": 100.0, "set_": 1000.0}
    assert bound_of(found, cost) == 1214.0
    with pytest.raises(KeyError):  # what was not measured does not count as free
        bound_of({"another kind": {"add": 1}}, cost)


def test_a_call_of_a_checked_graph_is_counted() -> None:
    backend = torchguard.verified_backend("aot_eager")
    checked = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    x = torch.ones(3)
    for _ in range(3):
        checked(x)
    assert entered(lambda: checked(x)) == {"checked graph": {"a compiled graph": 1}}


def test_a_failure_that_no_guard_undoes_is_found() -> None:
    def spoils(out: torch.Tensor) -> None:
        torch._C.TensorBase.resize_(out, 9)  # behind every guard's back

    kept = outcome(Failing("kept", (torch.float32,), lambda _: 1 / 0, False), "cpu")
    assert (kept["torch"], kept["guarded"], kept["verdict"]) == ("as it was", "as it was", "holds")
    found = outcome(Failing("spoils", (torch.float32,), spoils, True, ("resize",)), "cpu")
    assert found["torch"] == found["installed"] == "corrupt after RuntimeError"
    assert found["verdict"] == "does not hold"
