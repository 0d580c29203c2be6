"""load() and checkpoint_folder(): damage is found, several files are shown in one step."""

from __future__ import annotations

import functools
import os
import pickle
import random
import re
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from support.writers import OLD, kill_after, left, names, repeat, same, start, status


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


class TestFolder:
    def test_shows_all_files_at_once_and_keeps_the_newest(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint"
        for step in range(5):
            with torchguard.checkpoint_folder(path, keep=3) as new:
                torch.save(step, new / "a.pt")
                assert not path.exists() or torch.load(path / "a.pt") == step - 1
                (new / "sub").mkdir()
                torch.save(step, new / "sub" / "b.pt")
            assert torch.load(path / "a.pt") == torch.load(path / "sub" / "b.pt") == step
        with pytest.raises(KeyboardInterrupt), torchguard.checkpoint_folder(path) as new:
            torch.save(5, new / "a.pt")
            raise KeyboardInterrupt
        assert torch.load(path / "a.pt") == 4
        found = names(tmp_path)
        assert found == ["checkpoint", "checkpoint.3", "checkpoint.4", "checkpoint.5"]

    def test_killed_at_any_moment(self, tmp_path: Path) -> None:
        """Two files never belong to two checkpoints."""
        path = tmp_path / "checkpoint"
        moments = random.Random(2)  # noqa: S311

        def write(first: int, turn: int = 0) -> None:
            step = first + turn
            with torchguard.checkpoint_folder(path, keep=2, fsync=False) as new:
                torch.save(step, new / "a.pt")
                torch.save(step, new / "b.pt")

        write(0)
        for turn in range(1, 41):
            child = start(repeat, 1000, functools.partial(write, turn * 1000))
            kill_after(moments.uniform(0, 0.02), child)
            assert torch.load(path / "a.pt") == torch.load(path / "b.pt")
            for each in tmp_path.glob("checkpoint.[0-9]*"):
                assert torch.load(each / "a.pt") == torch.load(each / "b.pt")
        # Of a folder in which nothing was written yet nothing is said.
        told = any(
            each.is_symlink() or any(each.iterdir())
            for each in map(tmp_path.joinpath, left(tmp_path))
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            write(-1)
        for warned in caught:
            assert re.search("a process was stopped.*Whole are: checkpoint", str(warned.message))
        assert bool(caught) <= told
        assert not left(tmp_path)

    def test_two_processes(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint"

        def write(number: int, _: int = 0) -> None:
            with torchguard.checkpoint_folder(path, keep=1, fsync=False) as new:
                torch.save(number, new / "a.pt")

        write(0)
        children = [start(repeat, 40, functools.partial(write, number)) for number in (1, 2)]
        assert [status(child) for child in children] == [0, 0]
        assert torch.load(path / "a.pt") in {1, 2}
        assert len(names(tmp_path)) == 2

    def test_another_process_removes_the_new_folder_before_it_is_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder without a lock looks abandoned, for the moment between mkdir and flock."""
        taken: list[Any] = []
        opened = os.open

        def open_(path: Any, *arguments: Any, **options: Any) -> int:
            if not taken and Path(path).name.startswith(".torchguard-"):
                taken.append(path)
                Path(path).rmdir()
            return opened(path, *arguments, **options)

        monkeypatch.setattr(os, "open", open_)
        with torchguard.checkpoint_folder(tmp_path / "checkpoint") as new:
            torch.save(1, new / "a.pt")
        assert torch.load(tmp_path / "checkpoint" / "a.pt") == 1
        assert taken


class TestTheLinkIsNotTheFolder:
    def test_writing_to_the_link_of_an_older_checkpoint(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint"
        with torchguard.checkpoint_folder(path) as new:
            torch.save(1, new / "model.pt")
        with (
            pytest.raises(torchguard.errors.SaveError, match=r"wrote model.pt into .*new / "),
            torchguard.checkpoint_folder(path),
        ):
            torch.save(2, path / "model.pt")

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
    def test_writing_to_a_link_that_is_not_there(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint"
        with pytest.raises(RuntimeError) as raised, torchguard.checkpoint_folder(path):
            torch.save(1, path / "model.pt")
        (note,) = raised.value.__notes__  # type: ignore[attr-defined]
        assert "Write into the folder that is yielded" in note
        with pytest.raises(RuntimeError) as raised, torchguard.checkpoint_folder(path) as new:
            torch.save(1, new / "none" / "model.pt")
        assert not hasattr(raised.value, "__notes__")
