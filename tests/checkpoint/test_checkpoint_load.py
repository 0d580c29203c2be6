"""load(): damage is found."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from support.writers import OLD, same


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
