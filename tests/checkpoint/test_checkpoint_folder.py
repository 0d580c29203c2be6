"""checkpoint_folder() shows several files in one step, and removes only what carries its mark."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from support.child_process import run_command
from support.writers import kill_after, left, names, repeat, start, status
from torchguard import _files
from torchguard._files import temporary_name
from torchguard.checkpoint import folder as folder_module
from torchguard.checkpoint.folder import MARK
from torchguard.errors import TorchGuardWarning


def save(path: Path, step: int, keep: int | None = 1) -> None:
    with torchguard.checkpoint_folder(path, keep=keep) as new:
        torch.save(step, new / "a.pt")


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

        save(path, 0)
        children = [start(repeat, 40, functools.partial(save, path)) for _ in range(2)]
        assert [status(child) for child in children] == [0, 0]
        assert torch.load(path / "a.pt") == 39
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
        save(tmp_path / "checkpoint", 1)
        assert torch.load(tmp_path / "checkpoint" / "a.pt") == 1
        assert taken


class TestTheLinkIsNotTheFolder:
    def test_writing_to_the_link_of_an_older_checkpoint(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint"
        save(path, 1)
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


def test_folders_of_the_same_pattern_stay(tmp_path: Path) -> None:
    """An empty one too, in whose place a rename would put a folder without a word."""
    for name in ("run.1", "run.3", "run.2024"):
        (tmp_path / name).mkdir()
    (tmp_path / "run.1" / "mine.txt").write_text("mine")
    for step in range(3):
        save(tmp_path / "run", step, keep=2)
    assert torch.load(tmp_path / "run" / "a.pt") == 2
    assert names(tmp_path) == sorted(["run", "run.1", "run.3", "run.2024", "run.4", "run.5"])
    assert (tmp_path / "run.1" / "mine.txt").read_text() == "mine"
    assert not list((tmp_path / "run.3").iterdir())


def test_copies_and_folders_that_were_renamed_stay(tmp_path: Path) -> None:
    """Their mark has another name than they have: somebody wants to keep them."""
    for step in range(2):
        save(tmp_path / "run", step)
    shutil.copytree(tmp_path / "run.2", tmp_path / "run.1000")
    (tmp_path / "run.2").rename(tmp_path / "run.999")
    (tmp_path / "run").unlink()
    for step in range(3):
        save(tmp_path / "run", step)
    assert names(tmp_path) == sorted(["run", "run.3", "run.999", "run.1000"])
    shutil.copytree(tmp_path, tmp_path / "elsewhere", symlinks=True)
    save(tmp_path / "elsewhere" / "run", 9)
    assert names(tmp_path / "elsewhere") == sorted(["run", "run.4", "run.999", "run.1000"])


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(lambda path: path.mkdir(), "is a folder that", id="folder"),
        pytest.param(lambda path: path.write_text("mine"), "is a file that", id="file"),
        pytest.param(link_to("exp_42"), "link to exp_42.*remove the link", id="link"),
        pytest.param(link_to("run.7"), "link to run.7.*remove the link", id="link to a number"),
        pytest.param(link_to("run.8"), "link to run.8.*remove the link", id="link to nothing"),
    ],
)
def test_what_is_somebody_elses_is_refused(
    make: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    for name in ("exp_42", "run.7"):
        (tmp_path / name).mkdir()
    make(tmp_path / "run")
    before = names(tmp_path)
    with pytest.raises(torchguard.errors.SaveError, match=says):
        save(tmp_path / "run", 0)
    assert names(tmp_path) == before


def test_another_process_shows_a_newer_one_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes the folder that the link led to a moment ago."""
    path, readlink = tmp_path / "run", os.readlink
    save(path, 0)

    def then_another_saves(link: Path) -> str:
        leads = readlink(link)
        monkeypatch.setattr(os, "readlink", readlink)
        save(path, 1)
        return leads

    monkeypatch.setattr(os, "readlink", then_another_saves)
    save(path, 2)
    assert names(tmp_path) == ["run", "run.3"]


def test_a_folder_that_is_not_finished_is_not_shown(tmp_path: Path) -> None:
    """Nothing is in it, or shards without the metadata that DCP writes last."""
    save(tmp_path / "run", 0)
    for files in ((), ("__0_0.distcp", ".metadata.tmp")):
        with pytest.raises(torchguard.errors.SaveError, match="wait inside the block"):
            with torchguard.checkpoint_folder(tmp_path / "run") as new:
                for name in files:
                    (new / name).touch()
    assert torch.load(tmp_path / "run" / "a.pt") == 0
    assert names(tmp_path) == ["run", "run.1"]


def test_a_later_step_removes_what_is_left_of_an_earlier_one(tmp_path: Path) -> None:
    """A run goes on from another step than the one at which it was stopped."""
    abandoned = tmp_path / temporary_name()
    abandoned.mkdir()
    (abandoned / MARK).write_text(json.dumps({"for": "step-10"}))
    with pytest.warns(TorchGuardWarning, match="a process was stopped"):
        save(tmp_path / "step-20", 0)
    assert not abandoned.exists()


def test_a_link_with_a_temporary_name_is_not_followed(tmp_path: Path) -> None:
    save(tmp_path / "run", 0)
    (tmp_path / temporary_name()).symlink_to("run.1")
    with pytest.raises(ValueError, match="keep"), torchguard.checkpoint_folder(tmp_path / "run"):
        assert torch.load(tmp_path / "run" / "a.pt") == 0
        raise ValueError("keep")
    assert torch.load(tmp_path / "run" / "a.pt") == 0


def test_what_appears_meanwhile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(torchguard.errors.SaveError, match="link to exp_42"):
        with torchguard.checkpoint_folder(tmp_path / "run") as new:
            torch.save(0, new / "a.pt")
            (tmp_path / "run").symlink_to("exp_42")
    assert names(tmp_path) == ["run"]


def test_only_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    """Of the same names, what has no mark or was made for another path stays."""
    left = [tmp_path / temporary_name() for _ in range(5)]
    for folder in left[:4]:
        folder.mkdir()
    for folder, path in ((left[0], "run"), (left[1], "other")):
        (folder / MARK).write_text(json.dumps({"for": path}))
        torch.save(1, folder / "half.pt")
    (left[2] / "mine.txt").write_text("mine")
    left[4].write_text("mine")
    (tmp_path / ".torchguard-link-run").symlink_to("run.1")
    with pytest.warns(TorchGuardWarning, match="a process was stopped"):
        save(tmp_path / "run", 0)
    stayed = [path.name for path in (left[1], left[2], left[4])]
    assert names(tmp_path) == sorted([*stayed, "run", "run.1"])


def test_a_file_with_a_temporary_name_that_is_none_stays(tmp_path: Path) -> None:
    folder, link = tmp_path / temporary_name("model"), tmp_path / temporary_name("model")
    folder.mkdir()
    link.symlink_to("elsewhere")
    torchguard.save(1, tmp_path / "model.pt")
    assert folder.is_dir()
    assert link.is_symlink()


def test_no_name_looks_like_a_checkpoint_while_it_is_written(tmp_path: Path) -> None:
    """torchtitan takes what matches ``step-(\\d+)`` and has a ``.metadata`` for one."""
    with torchguard.checkpoint_folder(tmp_path / "step-10") as new:
        torch.save(0, new / "a.pt")
        assert "step-10" not in new.name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "step-10", 1)


PROTECTED = """
import os, pathlib, sys, torch, torchguard, warnings
folder = pathlib.Path(sys.argv[1])
folder.chmod(0o777)
def save(step):
    with torchguard.checkpoint_folder(folder / "run") as new:
        torch.save(step, new / "a.pt")
    return os.listdir(folder)
save(0)  # imports what it takes
torch.load(folder / "run" / "a.pt")
if not os.getuid():
    os.setuid(65534)
warnings.simplefilter("error")
save(1)
os.chmod(folder / "run.2", 0o555)
print("run.2" in save(2), torch.load(folder / "run.2" / "a.pt"))
os.chmod(folder / "run.2", 0o755)
"""


def test_an_old_folder_that_is_write_protected_stays_whole() -> None:
    with tempfile.TemporaryDirectory() as folder:  # others than its owner may enter its parents
        done = run_command([sys.executable, "-c", PROTECTED, folder])
    assert done.stdout.splitlines() == ["True 1"], done.stderr


def test_who_saves_or_removes_meanwhile_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of another writer that has no mark yet, and one that is removed just now."""
    (tmp_path / temporary_name()).mkdir()
    save(tmp_path / "run", 0)
    removed, remove = [], folder_module._remove_marked

    def look(folder: Path) -> None:
        removed.extend(folder_module._remove_abandoned_folders(tmp_path / "run"))
        remove(folder)

    monkeypatch.setattr(folder_module, "_remove_marked", look)
    save(tmp_path / "run", 1)
    assert names(tmp_path) == ["run", "run.2"]
    assert removed == []


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes")
def test_a_pipe_and_a_broken_link_are_kept(tmp_path: Path) -> None:
    with torchguard.checkpoint_folder(tmp_path / "run") as new:
        (new / "state").write_text("1")
        os.mkfifo(new / "pipe")
        (new / "link").symlink_to("nothing")
    assert {each.name for each in (tmp_path / "run").iterdir()} == {MARK, "link", "pipe", "state"}


def test_a_block_in_the_folder_of_another_is_refused(tmp_path: Path) -> None:
    """It would wait for the lock that the outer block holds. Below that folder, there is none."""
    (tmp_path / "way").symlink_to(tmp_path, target_is_directory=True)
    with torchguard.checkpoint_folder(tmp_path / "run") as new:
        for place in (new, tmp_path / "way" / new.name):
            with (
                pytest.raises(torchguard.errors.SaveError, match="inside of the folder"),
                torchguard.checkpoint_folder(place / "inner"),
            ):
                pytest.fail("the block was entered")
        (new / "parts").mkdir()
        save(new / "parts" / "inner", 1)
        save(tmp_path / "other", 2)
        save(tmp_path / "run", 3)
        torch.save(4, new / "a.pt")
    assert torch.load(tmp_path / "run" / "parts" / "inner" / "a.pt") == 1
    assert torch.load(tmp_path / "other" / "a.pt") == 2
    assert torch.load(tmp_path / "run" / "a.pt") == 4
    save(tmp_path / "run" / "inner", 5)  # it is written, so its lock is free
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["step-{}", "epoch_{:03}", "{}", "e={}-loss=0.{}.ckpt", "run.{}"])
@pytest.mark.parametrize("keep", [1, 3])
def test_keep_that_counts_nothing_is_said(tmp_path: Path, name: str, keep: int) -> None:
    for number in range(keep):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(tmp_path / name.format(number, number), number, keep=keep)
    with pytest.warns(UserWarning, match=rf"keep={keep} .* {keep} with other numbers") as said:
        save(tmp_path / name.format(77, 77), 0, keep=keep)
    assert said[0].filename == __file__


def test_a_path_with_a_number_that_is_saved_to_again_is_not_warned_of(tmp_path: Path) -> None:
    """Folds of a cross-validation, one after the other; and steps without ``keep=``."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fold in range(5):
            for step in range(3):
                save(tmp_path / f"fold-{fold}", step, keep=2)
            with torchguard.checkpoint_folder(tmp_path / f"step-{fold}") as new:
                torch.save(1, new / "a.pt")
    assert len(names(tmp_path)) == 5 * 3 + 5 * 2


@pytest.mark.parametrize("keep", [0, -1, "3", 2.0, None])
def test_what_keep_may_be(tmp_path: Path, keep: Any) -> None:
    if keep is None:
        save(tmp_path / "run", 0, keep=keep)
        save(tmp_path / "run", 1, keep=keep)
        assert names(tmp_path) == ["run", "run.2"]
        return
    with pytest.raises(ValueError, match=f"keep is {keep!r}, expected an integer of 1 or more"):
        save(tmp_path / "run", 0, keep=keep)


def test_a_folder_without_with_says_what_to_type(tmp_path: Path) -> None:
    new: Any = torchguard.checkpoint_folder(tmp_path / "run")
    for use in (
        lambda: new / "a.pt",
        lambda: Path(new),
        lambda: torch.save(1, new),
        lambda: new(save),
    ):
        with pytest.raises(TypeError, match=r"with torchguard.checkpoint_folder\(path\) as new"):
            use()
    with pytest.raises(TypeError, match=r"with torchguard.checkpoint_folder\(path\):"):
        exec("with torchguard.checkpoint_folder: pass")  # noqa: S102 - a statement that raises
    assert names(tmp_path) == []


def _file(folder: Path, value: int) -> None:
    torchguard.save(value, folder / "a.pt")


def _folder(folder: Path, value: int) -> None:
    save(folder / "run", value)


DESCRIPTORS = Path("/proc/self/fd")


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="descriptors are not listed")
@pytest.mark.parametrize("write", [_file, _folder])
@pytest.mark.parametrize("error", [OSError(5, "injected"), KeyboardInterrupt()])
def test_an_error_in_any_system_call_leaves_no_file_and_no_descriptor(
    tmp_path: Path, write: Callable[[Path, int], None], error: BaseException
) -> None:
    """In each of those that our files make, but for ``close``."""
    ours = (_files.__file__, folder_module.__file__)
    write(tmp_path, 0)
    before, failed, waiting = len(list(DESCRIPTORS.iterdir())), 0, 0

    def fail(frame: Any, event: str, called: Any) -> None:
        nonlocal waiting
        is_system_call = getattr(called, "__module__", "") in {"posix", "fcntl"}
        if event == "c_call" and is_system_call and frame.f_code.co_filename in ours:
            waiting -= called is not os.close
            if waiting == -1:
                raise error

    for number in range(1000):
        waiting = number
        sys.setprofile(fail)
        try:
            write(tmp_path, 1)
        except (OSError, KeyboardInterrupt, torchguard.errors.SaveError):
            failed += 1
        finally:
            sys.setprofile(None)
        assert len(list(DESCRIPTORS.iterdir())) == before, number
        # What was written stays, if the folder before it is only half removed.
        assert left(tmp_path) == [] or torch.load(tmp_path / "run" / "a.pt") == 1, number
        write(tmp_path, 0)
        assert left(tmp_path) == []
        if waiting >= 0:
            break
    assert failed > 5
