"""One function replaces files: all of ours that is written in one step goes through it."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import torchguard
from support.writers import names, size_limited
from torchguard import _files
from torchguard._files import locked_file, replace_file, temporary_name, write_text

PACKAGE = Path(torchguard.__file__).parent
RENAMES = {"replace", "rename", "renames", "move"}


def renames(path: Path) -> list[str]:
    """The calls in a file that put one file in the place of another; str.replace takes two."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr=name), args=args, keywords=[]):
                of_module = isinstance(owner, ast.Name) and owner.id in {"os", "shutil"}
                if name in RENAMES and (of_module or len(args) == 1):
                    found.append(ast.unparse(node))
    return found


def test_no_other_file_renames() -> None:
    """checkpoint_folder renames folders; fsspec's files are moved into a temporary one."""
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if renames(path)}
    assert found == {"_files.py", "checkpoint/folder.py", "checkpoint/saving.py"}


def test_a_text_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "buckets.json"
    write_text(path, "old")
    with size_limited(100), pytest.raises(OSError, match="too large"):
        write_text(path, "new" * 100)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["buckets.json"]


def test_a_writer_that_puts_another_file_there_holds_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As safetensors and shutil.move do; without its lock it looks abandoned."""
    path, fsync = tmp_path / "model.pt", os.fsync

    def write(temporary: str) -> None:
        (tmp_path / "other").write_text("new")
        (tmp_path / "other").replace(temporary)

    def another_process(descriptor: int) -> None:
        _files.remove_abandoned(str(tmp_path), "model")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", another_process)
    replace_file(str(path), write)
    assert path.read_text() == "new"


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.setattr(_files, "fcntl", None)
    left = tmp_path / temporary_name("model")
    left.touch()
    (tmp_path / temporary_name()).mkdir()
    write_text(tmp_path / "model.pt", "x")
    with torchguard.checkpoint_folder(tmp_path / "run") as new:
        (new / "a").touch()
    assert left.exists()
    assert len(names(tmp_path)) == 5
    with pytest.raises(OSError, match="no locks"), locked_file(str(left)):
        pass
