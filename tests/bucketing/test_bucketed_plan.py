"""A file of buckets: what save_plan and the command plan write, and plan= reads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from support.bucketed import double, wrap


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """What a function with buckets 8 and 16 has written after three calls."""
    wrapped = wrap(double, buckets=[8, 16])
    for length in (5, 12, 5):
        wrapped(torch.ones(length))
    wrapped.save_plan(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def planned(path: Path, **options: Any) -> Any:
    return wrap(double, **{"buckets": None, "plan": path, **options})


def test_it_holds_sizes_and_how_often_each_was_seen(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["buckets"] == {"t": [8, 16]}
    assert document["seen"] == [[[5], 2], [[12], 1]]


@pytest.mark.parametrize("more", [{}, {"kept": {"proofs": {}, "compiled": "not read"}}])
def test_what_is_read_is_proven_in_the_process_that_reads_it(path: Path, more: Any) -> None:
    """Also from a file of an older release, without what that kept."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    again = planned(path)
    assert torch.equal(again(torch.ones(7)), 2 * torch.ones(7))
    assert again.stats().hits == {(8,): 1}
    assert again.stats().proven == ((8,),)
    with pytest.raises(ValueError, match="both given"):
        planned(path, buckets=[8])


def test_a_foreign_or_torn_file_is_refused(path: Path) -> None:
    whole = path.read_text()
    for text in (
        *(whole[:length] for length in range(0, len(whole) - 2, 17)),
        "[]", "3", "null", '"text"', "{}", '{"format": "torchguard plan"}',
        '{"format": "torchguard plan", "version": 0, "buckets": {}, "pairs": []}',
        '{"format": "torchguard plan", "version": 1, "buckets": {"t": [0]}, "pairs": []}',
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match=r"plan\.json' is not a buckets file"):
            planned(path)


def test_several_writers_leave_one_whole_file(path: Path) -> None:
    def write(number: int) -> None:
        wrapped = wrap(double, buckets=range(number, 3000))
        for _ in range(15):
            wrapped.save_plan(path)

    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write, number) for number in (2, 3, 4)]
        while not all(writer.done() for writer in writers):
            planned(path)
    assert [each.name for each in path.parent.iterdir()] == ["plan.json"]


def test_what_the_command_writes_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchguard.__main__ import main  # noqa: PLC0415

    lengths, written = tmp_path / "lengths.txt", tmp_path / "ladder.json"
    lengths.write_text(" ".join(map(str, [10, 10, 11, 90, 100])))
    main(["plan", str(lengths), "--buckets", "2", "--json", str(written)])
    line = capsys.readouterr().out.splitlines()[-1].strip()
    names: Any = {"bucketed": torchguard.bucketed, "model": lambda input_ids: 2 * input_ids}
    wrapped = eval(line.replace("compile=True", "compile=None"), names)  # noqa: S307
    wrapped(torch.ones(1, 50))
    assert wrapped.stats().hits == {(100,): 1}
    wrapped.save_plan(written)  # in place of what the command wrote
    again = planned(written, dims=({1: "t"},))
    again(torch.ones(1, 50))
    assert again.stats().hits == {(100,): 1}
