"""verify_checkpoint(), ``python -m torchguard verify`` and load() find damage of each kind."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver

import torchguard
from support.writers import OLD, same
from torchguard.__main__ import main
from torchguard.checkpoint.folder import MARK

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def flipped(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << place % 8
    path.write_bytes(data)


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
        assert steps[-1] == (found.size, found.size)
    assert "has no checksums" in str(torchguard.verify_checkpoint(paths[2]))
    assert main(["verify", *map(str, paths)]) == 0
    assert capsys.readouterr().out.count("is whole") == len(paths)


def test_files_without_checksums_say_so(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
        state_dict_saver.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    finally:
        torch.serialization.set_crc32_options(True)
    found = torchguard.verify_checkpoint(tmp_path)
    assert found
    assert "a.pt was saved without checksums" in str(found)
    assert "__0_0.distcp has no CRC" in str(found)


def test_what_is_whole_loads_and_what_is_not_changes_nothing(tmp_path: Path) -> None:
    """A bit anywhere in a shard: in a tensor, in the padding, in a directory that torch reads."""
    state: Any = {"a": torch.arange(6.0), "b": torch.arange(6.0), "c": {"n": 1}}
    state_dict_saver.save(state, checkpoint_id=tmp_path)
    (shard,) = tmp_path.glob("*.distcp")
    whole, found = shard.read_bytes(), []
    for place in range(0, len(whole), 29):
        shard.write_bytes(whole)
        flipped(shard, place)
        found.append(bool(torchguard.verify_checkpoint(tmp_path)))
        loaded: Any = {"a": torch.zeros(6), "b": torch.zeros(6), "c": {"n": 0}}
        if found[-1]:
            torchguard.load_sharded(loaded, tmp_path)
            assert torch.equal(loaded["a"] + loaded["b"], state["a"] * 2)
        else:
            with pytest.raises(RuntimeError, match="no tensor has changed"):
                torchguard.load_sharded(loaded, tmp_path)
            assert not loaded["a"].any()
            assert not loaded["b"].any()
        assert loaded["c"]["n"] == found[-1]
    assert 0.2 < sum(found) / len(found) < 0.8


def test_a_file_that_is_cut_off_or_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"weight": torch.ones(300)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["verify", str(path)]) == 1
    assert "NOT whole" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "a.pt")]) == 2
    assert "there is nothing at" in capsys.readouterr().err
    assert "is cut off or damaged" in torchguard.verify_checkpoint(path).faults[0]


def test_a_name_in_the_directory_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.ones(3)}, path)
    data = bytearray(path.read_bytes())
    data[data.rindex(b"data.pkl")] = 0xBA
    path.write_bytes(data)
    (fault,) = torchguard.verify_checkpoint(path).faults
    assert "its directory is not what was written" in fault


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


def test_metadata_that_is_damaged(tmp_path: Path) -> None:
    """Pickle may raise anything, or make objects that lack a field."""
    state_dict_saver.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    metadata = tmp_path / ".metadata"
    whole = metadata.read_bytes()
    for name in (b"relative_path", b"offset", b"torch.distributed"):
        metadata.write_bytes(whole.replace(name, name[::-1]))
        assert ".metadata can't be read" in torchguard.verify_checkpoint(tmp_path).faults[0]


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


def test_what_is_no_checkpoint_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no checkpoint")
    for path in (tmp_path, tmp_path / "notes.txt"):
        assert "no checkpoint of a format" in torchguard.verify_checkpoint(path).faults[0]
    torch.save({"a": 1}, tmp_path / "model")
    found = torchguard.verify_checkpoint(tmp_path)
    assert found
    assert "notes.txt was not read" in str(found)


def saved_with_a_manifest(folder: Path, fill: float) -> Path:
    folder.mkdir()
    torch.save({"a": torch.full((3,), fill)}, folder / "a.pt")
    written = (folder / "a.pt").read_bytes()
    files = {"a.pt": {"size": len(written), "sha256": hashlib.sha256(written).hexdigest()}}
    mark = {"made by": "torchguard", "for": "run", "folder": folder.name, "files": files}
    (folder / MARK).write_text(json.dumps(mark))
    return folder


def test_a_mark_that_is_damaged(tmp_path: Path) -> None:
    """Each bit: it is said, but where only the name of the folder is another."""
    mark = saved_with_a_manifest(tmp_path / "run.1", 1.0) / MARK
    whole = mark.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            mark.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            if torchguard.verify_checkpoint(tmp_path):
                assert json.loads(mark.read_bytes())["files"] == json.loads(whole)["files"]
    for wrong in (b"", b"[]", b"null", whole.replace(b"files", b"others")):
        mark.write_bytes(wrong)
        found = torchguard.verify_checkpoint(tmp_path)
        assert found.faults == (f"{mark} does not hold what checkpoint_folder wrote",)


def test_files_of_other_programs_beside_a_checkpoint(tmp_path: Path) -> None:
    """Archives, text and lists whose names end as torch's do; they have no checksum known here."""
    torch.save({"a": 1}, tmp_path / "a.pt")
    np.savez(tmp_path / "b.npz", x=np.ones(3))
    with zipfile.ZipFile(tmp_path / "c.docx", "w") as archive:
        archive.writestr("word/document.xml", "<a/>")
    with tarfile.open(tmp_path / "d.tar", "w") as bundle:
        bundle.add(tmp_path / "a.pt", "a.pt")
    (tmp_path / "vocab.bin").write_text("hello\nworld\n")
    (tmp_path / "corpus.index.json").write_text('{"a": 1}')
    found = torchguard.verify_checkpoint(tmp_path)
    assert found, str(found)
    assert len(found.limits) == 5
    assert not torchguard.verify_checkpoint(tmp_path / "vocab.bin")


@pytest.mark.parametrize("name", ["a.pt", "a.bin", "a.ckpt", "a.pth.tar", "a"])
def test_files_of_torch_that_are_damaged_are_still_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    torch.save({"a": torch.ones(9)}, path)
    whole = path.read_bytes()
    wrong = [
        whole[:-60],
        whole[:4],
        b"",
        b"version https://git-lfs",
        whole.replace(b"\0\0\x80?", b""),
    ]
    wrong += [whole.replace(b"/version", b"/versiom"), b"x" + whole[1:]]
    with zipfile.ZipFile(tmp_path / "foreign.zip", "w") as archive:
        archive.writestr("b", "")
        archive.writestr("a/version", "3\n")
    for content in [*wrong, (tmp_path / "foreign.zip").read_bytes()]:
        path.write_bytes(content)
        assert not torchguard.verify_checkpoint(path), content


class TestLoad:
    def test_every_cut(self, tmp_path: Path) -> None:
        """A file that ends early is refused, and the error names it."""
        torch.save(OLD, tmp_path / "model.pt")
        whole = (tmp_path / "model.pt").read_bytes()
        cut = tmp_path / "cut.pt"
        for size in {*range(400), *range(0, len(whole), 97), len(whole) - 1}:
            cut.write_bytes(whole[:size])
            with pytest.raises(torchguard.DamagedFileError, match=r"cut.pt is (not whole|empty)"):
                torchguard.load(cut)

    def test_of_a_folder_it_names_the_files(self, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        with pytest.raises(IsADirectoryError, match="checkpoint is a folder with no file in it"):
            torchguard.load(folder)
        torchguard.save(1, folder / "trainer.pt")
        torchguard.save(1, folder / "model.pt")
        with pytest.raises(IsADirectoryError, match=r"model.pt, trainer.pt: .*load\('.*model.pt'"):
            torchguard.load(folder)
        (folder / ".metadata").touch()
        with (
            torchguard.install("load"),
            pytest.raises(IsADirectoryError, match=r"load_sharded\(state, "),
        ):
            torch.load(str(folder))

    def test_a_changed_bit_is_found(self, tmp_path: Path) -> None:
        """torch.load takes it without a word."""
        path = tmp_path / "model.pt"
        torch.save(OLD, path)
        whole = bytearray(path.read_bytes())
        whole[whole.index(OLD["weight"].numpy().tobytes()) + 101] ^= 4  # type: ignore[attr-defined]
        path.write_bytes(whole)
        assert not same(torch.load(path), OLD)
        with pytest.raises(torchguard.DamagedFileError, match="data/0"):
            torchguard.load(path)
        torchguard.load(path, mmap=True, map_location="cpu")  # asked for so as not to read all
        with pytest.raises(torchguard.DamagedFileError, match="data/0"):
            torchguard.load(path, mmap=True, check=True)
        torchguard.load(path, check=False)

    def test_every_byte_changed(self, tmp_path: Path) -> None:
        """In a name, a size, a version, the directory: it is found, or makes no difference."""
        small = {"weight": torch.arange(4.0), "step": 1}
        torch.save(small, tmp_path / "model.pt")
        whole = (tmp_path / "model.pt").read_bytes()
        changed, found = tmp_path / "changed.pt", 0
        for place in range(len(whole)):
            content = bytearray(whole)
            content[place] ^= 1 << place % 8
            changed.write_bytes(content)
            try:
                loaded = torchguard.load(changed)
            except torchguard.DamagedFileError:
                found += 1
            else:
                assert same(loaded, small)
        assert found > len(whole) / 2

    @pytest.mark.parametrize("options", [{}, {"mmap": True}])
    def test_a_bit_in_the_directory(self, tmp_path: Path, options: dict[str, Any]) -> None:
        """torch.load reads nothing of what is marked as a folder: uninitialised memory."""
        path = tmp_path / "model.pt"
        torch.save(OLD, path)
        whole = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            records = len(archive.infolist())
        entry = whole.index(b"PK\x01\x02")
        for _ in range(records):
            content = bytearray(whole)
            content[entry + 38] ^= 0x10  # external attributes
            path.write_bytes(content)
            with pytest.raises(torchguard.DamagedFileError, match="is marked as a folder"):
                torchguard.load(path, **options)
            entry = whole.find(b"PK\x01\x02", entry + 1)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7\n", "git lfs pull"),
            ("<!DOCTYPE html>\n<html>Sign in", "a web page.*<!DOCTYPE html>"),
            ("Grüße aus " + "ü" * 200, "text, and no checkpoint.*Grüße"),
        ],
    )
    def test_text_in_the_place_of_a_checkpoint(
        self, tmp_path: Path, content: str, message: str
    ) -> None:
        path = tmp_path / "model.pt"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(torchguard.DamagedFileError, match=message) as refused:
            torchguard.load(path)
        assert str(path) in str(refused.value)
        assert refused.value.__cause__ is not None

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"_use_new_zipfile_serialization": False},
            {"_use_new_zipfile_serialization": False, "pickle_protocol": 0},  # which is text
        ],
    )
    def test_a_class_that_is_not_allowed_is_torchs_error(
        self, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        path = tmp_path / "model.pt"
        torch.save(Path("x"), path, **options)
        assert torchguard.load(path, weights_only=False) == Path("x")
        with pytest.raises(pickle.UnpicklingError):
            torchguard.load(path, weights_only=True)

    def test_errors_that_are_no_damage_are_torchs(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            torchguard.load(tmp_path / "nowhere.pt")
        (tmp_path / "other.bin").write_bytes(bytes(range(200, 256)))
        with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
            archive.writestr("x", "y")
        for name in ("other.npz", "other.bin"):
            with pytest.raises(Exception, match=r".") as refused:
                torchguard.load(tmp_path / name)
            assert not isinstance(refused.value, torchguard.DamagedFileError)


def test_files_of_trainers_that_are_cut_off(tmp_path: Path) -> None:
    """JSON and pickles at every length: only the complete ones are whole."""
    contents = {
        "trainer_state.json": json.dumps({"global_step": 3, "losses": [0.5, 0.25]}).encode(),
        "random_states_0.pkl": pickle.dumps({"step": 3, "numpy": np.arange(9), "text": "a" * 300}),
    }
    for name, content in contents.items():
        for end in range(len(content)):
            (tmp_path / name).write_bytes(content[:end])
            assert not torchguard.verify_checkpoint(tmp_path), (name, end)
        (tmp_path / name).write_bytes(content)
    torch.save({"a": 1}, tmp_path / "optimizer.bin")
    found = torchguard.verify_checkpoint(tmp_path)
    assert found, str(found)
    assert "was not read" not in str(found)


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "was executed",)

    (tmp_path / "state.pkl").write_bytes(pickle.dumps(Runs()))
    assert torchguard.verify_checkpoint(tmp_path)
    assert not (tmp_path / "was executed").exists()


def test_what_may_end_anywhere_is_not_called_damaged(tmp_path: Path) -> None:
    """JSON Lines, two pickles in a file, and what is compressed under the name of a pickle."""
    torch.save({"a": 1}, tmp_path / "a.pt")
    (tmp_path / "data.json").write_text('{"a": 1}\n{"a": 2}\n')
    (tmp_path / "two.pkl").write_bytes(pickle.dumps(1) + pickle.dumps([2]))
    (tmp_path / "small.pkl").write_bytes(gzip.compress(pickle.dumps(1)))
    joblib = b"\x80\x04cjoblib.numpy_pickle\nNumpyArrayWrapper\n.\xff\xff\xff"
    (tmp_path / "scaler.pkl").write_bytes(joblib)
    assert torchguard.verify_checkpoint(tmp_path), torchguard.verify_checkpoint(tmp_path)


@pytest.mark.parametrize("path", [None, 3, {"a": 1}, b"model.pt"])
def test_what_is_not_a_path_is_named(path: Any) -> None:
    with pytest.raises(TypeError, match=r"verify_checkpoint: path is .* expected the path of a"):
        torchguard.verify_checkpoint(path)
