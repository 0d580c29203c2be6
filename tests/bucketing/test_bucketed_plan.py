"""A file of buckets: what save_plan and the command plan write, and plan= reads."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from torchguard import Buckets, bucketed
from torchguard.bucketing.decorator.ladders import Ladder, read_buckets, write_buckets

OPTIONS: Any = {"dims": {"x": {0: "t"}}}


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def ladder(*sizes: int) -> list[Ladder]:
    return [Ladder(("t",), Buckets(sizes), growing=False)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """What a function with buckets 8 and 16 has written after three calls."""
    wrapped = bucketed(double, buckets=[8, 16], **OPTIONS)
    for length in (5, 12, 5):
        wrapped(torch.ones(length))
    wrapped.save_plan(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_it_holds_sizes_and_how_often_each_was_seen(path: Path) -> None:
    document = json.loads(path.read_text())
    assert document["buckets"] == {"t": [8, 16]}
    assert document["seen"] == [[[5], 2], [[12], 1]]
    assert read_buckets(path) == {"t": Buckets([8, 16])}


def test_what_is_read_is_proven_in_the_process_that_reads_it(path: Path) -> None:
    again = bucketed(double, plan=path, **OPTIONS)
    assert torch.equal(again(torch.ones(7)), 2 * torch.ones(7))
    assert again.stats().hits == {(8,): 1}
    assert again.stats().proven == ((8,),)


def test_a_file_of_an_older_release_is_read_without_what_it_kept(path: Path) -> None:
    document = json.loads(path.read_text())
    document["kept"] = {"proofs": {}, "compiled": "not read"}
    path.write_text(json.dumps(document))
    assert bucketed(double, plan=path, **OPTIONS)(torch.ones(7)).shape == (7,)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", "null", '"text"', "{}", '{"format": "torchguard plan"}',
        '{"format": "torchguard plan", "version": 0, "buckets": {}, "pairs": []}',
        '{"format": "torchguard plan", "version": 1, "buckets": {"t": [0]}, "pairs": []}',
    ],
)  # fmt: skip
def test_a_foreign_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json' is not a buckets file"):
        bucketed(double, plan=path, **OPTIONS)


def test_a_torn_file_is_refused(path: Path) -> None:
    whole = path.read_text()
    for length in range(0, len(whole) - 2, 17):
        path.write_text(whole[:length])
        with pytest.raises(ValueError, match="is not a buckets file"):
            bucketed(double, plan=path, **OPTIONS)


def test_a_write_that_fails_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_text()

    def fails(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.raises(OSError, match="No space"):
        write_buckets(path, ladder(4), {})
    assert path.read_text() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_several_writers_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_buckets(path, ladder(1), {})

    def write(number: int) -> None:
        for _ in range(30):
            write_buckets(path, ladder(number), dict.fromkeys(range(5000), number))

    writers = [threading.Thread(target=write, args=(number,)) for number in (2, 3, 4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert isinstance(read_buckets(path), dict)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


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
    again = bucketed(lambda ids: 2 * ids, dims={"ids": {1: "t"}}, plan=written)
    again(torch.ones(1, 50))
    assert again.stats().hits == {(100,): 1}
