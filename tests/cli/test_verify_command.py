"""verify_checkpoint() and ``python -m torchguard verify``: files and folders of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import torchguard
from torchguard.__main__ import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_whole_files_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"a": torch.ones(3), "b": torch.ones(4, dtype=torch.bool)}
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(state, tmp_path / "model.safetensors")
    state_dict_saver.save(state, checkpoint_id=tmp_path / "dcp")
    paths = [tmp_path / name for name in ("new.pt", "old.pt", "model.safetensors", "dcp")]
    steps: list[tuple[int, int]] = []
    for path in paths:
        found = torchguard.verify_checkpoint(path, progress=lambda *each: steps.append(each))
        assert found
        assert found.size > 0
        assert steps[-1][0] > 0
    assert "has no checksums" in str(torchguard.verify_checkpoint(paths[2]))
    assert main(["verify", *map(str, paths)]) == 0
    assert capsys.readouterr().out.count("is whole") == len(paths)


def test_flips_in_a_shard_are_seen_and_the_tensor_is_named(tmp_path: Path) -> None:
    """Bare DCP loads what was flipped."""
    state = {"a": torch.arange(3000.0), "b": torch.arange(3000.0)}
    state_dict_saver.save(state, checkpoint_id=tmp_path / "dcp")
    (shard,) = (tmp_path / "dcp").glob("*.distcp")
    whole = shard.read_bytes()
    content = state["b"].numpy().tobytes()
    second = whole.find(content, whole.find(content) + 1)
    for place in range(second, second + 12_000, 1200):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        shard.write_bytes(data)
        (fault,) = torchguard.verify_checkpoint(tmp_path / "dcp").faults
        assert "does not hold what was written at b" in fault
    loaded = {"a": torch.zeros(3000), "b": torch.zeros(3000)}
    with pytest.raises(RuntimeError, match="no tensor has changed"):
        torchguard.load_sharded(loaded, tmp_path / "dcp")
    assert not loaded["a"].any()
    state_dict_loader.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert loaded["a"].any()


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_file_that_is_cut_off(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    state = {"weight": torch.ones(300)}
    torch.save(state, path) if name == "a.pt" else save_file(state, path)
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["verify", str(path)]) == 1
    assert "NOT whole" in capsys.readouterr().out
    if name == "a.safetensors":
        assert "weight" in torchguard.verify_checkpoint(path).faults[0]


def test_a_file_that_an_index_lists_is_missed(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    for number in (1, 2):
        save_file({"ab"[number - 1]: torch.ones(2)}, tmp_path / f"model-{number}.safetensors")
    assert torchguard.verify_checkpoint(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    (fault,) = torchguard.verify_checkpoint(tmp_path).faults
    assert "model-2.safetensors is missing" in fault
    index.write_text("{}")
    assert "is damaged" in torchguard.verify_checkpoint(tmp_path).faults[0]


def test_a_sharded_save_that_was_stopped_is_not_whole(tmp_path: Path) -> None:
    """Before its metadata has its name, and when it has written over another one."""
    folder = tmp_path / "run" / "step-1"  # it may lie deeper than the path that is asked for
    state_dict_saver.save({"a": torch.ones(3)}, checkpoint_id=folder)
    (tmp_path / "run" / "notes.metadata.json").write_text("{}")  # of other programs
    assert torchguard.verify_checkpoint(tmp_path / "run")
    metadata = folder / ".metadata"
    (folder / ".metadata.tmp").write_bytes(metadata.read_bytes())
    assert "stopped before its end" in torchguard.verify_checkpoint(folder).faults[0]
    metadata.unlink()
    assert "has no .metadata" in torchguard.verify_checkpoint(folder).faults[0]
    assert not torchguard.verify_checkpoint(tmp_path / "run")


def test_what_is_no_checkpoint_or_is_not_there_is_not_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path / "a.pt")]) == 2
    assert "there is nothing at" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("no checkpoint")
    for path in (tmp_path, tmp_path / "notes.txt"):
        assert "no checkpoint of a format" in torchguard.verify_checkpoint(path).faults[0]
    torch.save({"a": 1}, tmp_path / "older", _use_new_zipfile_serialization=False)
    found = torchguard.verify_checkpoint(tmp_path)
    assert found
    assert "notes.txt was not read" in str(found)
