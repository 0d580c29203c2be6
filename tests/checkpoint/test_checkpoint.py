"""save(): a file is the old one or the new one, whole, and of one training step."""

from __future__ import annotations

import contextlib
import io
import os
import random
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from support.writers import OLD, kill_after, left, names, repeat, same, size_limited, start, status
from torchguard import _files
from torchguard._files import locked_file, replace_file, temporary_name, write_text

KILLS = int(os.environ.get("TORCHGUARD_KILLS", "60"))  # 500 for a release


NEW = {"weight": torch.arange(300.0) + 1, "step": 2}


class TestSave:
    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize("name", ["model.pt", "noext", "a.tar.pt", "m\xfc.pt"])
    def test_bytes_equal_torch_save(self, tmp_path: Path, name: str, zipped: bool) -> None:
        """The file is the one that torch.save writes under that name."""
        (tmp_path / "plain").mkdir()
        options: Any = {} if zipped else {"_use_new_zipfile_serialization": False}
        torch.save(OLD, tmp_path / "plain" / name, **options)
        torchguard.save(OLD, tmp_path / name, **options)
        if zipped:  # the older format holds addresses
            assert (tmp_path / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
        assert same(torch.load(tmp_path / name), OLD)
        assert not left(tmp_path)

    @pytest.mark.slow
    def test_every_byte_at_which_writing_fails(self, tmp_path: Path) -> None:
        """The old file stays whole; plain torch.save loses it nearly every time."""
        path, plain = tmp_path / "model.pt", tmp_path / "plain.pt"
        torchguard.save(OLD, path)
        whole, lost = path.read_bytes(), 0
        for limit in range(len(whole)):
            with size_limited(limit), pytest.raises((RuntimeError, OSError)):
                torchguard.save(NEW, path, fsync=False)
            assert path.read_bytes() == whole, limit
            assert not left(tmp_path), limit
        for limit in range(0, len(whole), 97):
            torch.save(OLD, plain)
            # 2.6 drops an error in the last bytes.
            with size_limited(limit), contextlib.suppress(RuntimeError):
                torch.save(NEW, plain)
            try:
                lost += not same(torch.load(plain), OLD)
            except Exception:  # noqa: BLE001
                lost += 1
        assert lost

    @pytest.mark.parametrize("fsync", [True, False])
    def test_file_then_folder_are_flushed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
    ) -> None:
        """The contents before the name, so that no power failure shows an empty file."""
        events: list[str] = []
        replace = os.replace

        def flushed(descriptor: int) -> None:
            events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

        def replaced(source: str, target: str) -> None:
            events.append("name")
            replace(source, target)

        monkeypatch.setattr(os, "fsync", flushed)
        monkeypatch.setattr(os, "replace", replaced)
        torchguard.save(OLD, tmp_path / "model.pt", fsync=fsync)
        assert events == (["file", "name", "folder"] if fsync else ["name"])

    def test_a_file_that_is_open_elsewhere_is_written_through(self, tmp_path: Path) -> None:
        """Whoever opened /dev/stdout keeps the file it led to."""
        with (tmp_path / "output.pt").open("wb") as file:
            torchguard.save(OLD, f"/proc/self/fd/{file.fileno()}")
            assert os.fstat(file.fileno()).st_nlink == 1
        assert same(torch.load(tmp_path / "output.pt"), OLD)

    def test_any_exception_leaves_the_old_file(self, tmp_path: Path) -> None:
        """Of the longest name, too: the temporary file next to it needs one."""

        class Refuses:
            def __reduce__(self) -> Any:
                raise KeyboardInterrupt

        path = tmp_path / f"{'m' * 252}.pt"
        torchguard.save(OLD, path)
        with pytest.raises(KeyboardInterrupt):
            torchguard.save({"weight": torch.ones(3), "bad": Refuses()}, path)
        assert same(torch.load(path), OLD)
        assert names(tmp_path) == [path.name]

    @pytest.mark.slow
    def test_killed_at_any_moment(self, tmp_path: Path) -> None:
        """60 processes die while they save; plain torch.save beside them loses both files."""
        moments = random.Random(1)  # noqa: S311
        states = [{"weight": torch.full((20_000,), float(i)), "step": i} for i in range(2)]

        def is_one_of(path: Path, states: list[Any]) -> bool:
            return any(same(torch.load(path), state) for state in states)

        def survives(save: Callable[[Any, Path], None], path: Path) -> bool:
            save(states[0], path)
            child = start(repeat, 10**6, lambda turn: save(states[turn % 2], path))
            kill_after(moments.uniform(0, 0.01), child)
            return status(start(is_one_of, path, states)) == 0

        path = tmp_path / "model.pt"
        assert all(survives(torchguard.save, path) for _ in range(KILLS))
        torchguard.save(OLD, path)
        assert names(tmp_path) == ["model.pt"], "the last save has removed what they left"
        assert not all(survives(torch.save, tmp_path / "plain.pt") for _ in range(60))

    def test_what_a_living_process_writes_stays(self, tmp_path: Path) -> None:
        """Only what no process uses any more is removed, and nothing that has another name."""
        path = tmp_path / "model.pt"
        reading, writing = os.pipe()

        class Waits:
            def __reduce__(self) -> Any:
                os.write(writing, b"x")
                time.sleep(60)
                return dict, ()

        child = start(torchguard.save, [torch.ones(3), Waits()], path)
        os.read(reading, 1)
        try:
            (others,) = left(tmp_path)
            (tmp_path / "model.torchguard-notes").touch()
            torchguard.save(OLD, path)
            assert others in left(tmp_path)
        finally:
            kill_after(0, child)
        torchguard.save(OLD, path)
        assert left(tmp_path) == ["model.torchguard-notes"]

    def test_mode_and_umask(self, tmp_path: Path) -> None:
        real = tmp_path / "real.pt"
        mask = os.umask(0o027)
        try:
            torchguard.save(OLD, real)
            assert stat.S_IMODE(real.stat().st_mode) == 0o640
        finally:
            os.umask(mask)
        for mode in (0o644, 0o600, 0o666):
            real.chmod(mode)
            torchguard.save(NEW, real)
            assert stat.S_IMODE(real.stat().st_mode) == mode

    @pytest.mark.parametrize("relative", [False, True])
    def test_a_link_to_another_file_system(self, tmp_path: Path, relative: bool) -> None:
        """Where there is one: /dev/shm is a folder of files, unlike other names in /dev."""
        shared = Path("/dev/shm")  # noqa: S108
        real = (shared if shared.is_dir() else tmp_path) / f"test-{os.getpid()}.pt"
        link = tmp_path / "model.pt"
        link.symlink_to(os.path.relpath(real, tmp_path) if relative else real)
        try:
            torchguard.save(OLD, link)
            for path in (link, real):
                with size_limited(100), pytest.raises((RuntimeError, OSError)):
                    torchguard.save(NEW, path)
                assert same(torch.load(real), OLD)
            assert link.is_symlink()
        finally:
            real.unlink(missing_ok=True)

    def test_no_path_goes_to_torch(self, tmp_path: Path) -> None:
        """File objects, pipes and devices are passed on as they are."""
        buffer = io.BytesIO()
        torchguard.save(OLD, buffer)
        buffer.seek(0)
        assert same(torch.load(buffer), OLD)
        torchguard.save(OLD, "/dev/null")
        fifo = tmp_path / "pipe"
        os.mkfifo(fifo)
        read: list[bytes] = []
        reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
        reader.start()
        with fifo.open("wb") as file:
            torchguard.save(OLD, file)
        reader.join()
        assert same(torch.load(io.BytesIO(read[0])), OLD)
        assert stat.S_ISFIFO(fifo.stat().st_mode)

    def test_torchs_own_errors(self, tmp_path: Path) -> None:
        """What torch refuses raises the same, and leaves nothing."""
        wrong = tmp_path / "nowhere" / "x.pt"
        with pytest.raises(Exception) as plain:  # noqa: PT011
            torch.save(OLD, wrong)
        with pytest.raises(type(plain.value)) as guarded:
            torchguard.save(OLD, wrong)
        assert str(guarded.value).split("\n")[0] == str(plain.value).split("\n")[0]
        assert not left(tmp_path)

    @pytest.mark.parametrize("mode", [0o555, 0o1777])
    def test_a_folder_that_takes_no_file(self, tmp_path: Path, mode: int) -> None:
        """Or, with the sticky bit, a new one and not one in the place of another user's."""
        if mode == 0o1777 and os.geteuid() != 0:
            pytest.skip("needs two users")
        path = tmp_path / "model.pt"
        torchguard.save(OLD, path)
        path.chmod(0o666)
        for folder in (tmp_path, *tmp_path.parents[:-2]):
            folder.chmod(folder.stat().st_mode | 0o055)
        tmp_path.chmod(mode)

        def refused() -> bool:
            if os.geteuid() == 0:
                os.seteuid(65534)  # the root user may write everywhere
            try:
                torchguard.save(NEW, path)
            except torchguard.errors.SaveError as error:
                return str(path) in str(error)
            return False

        try:
            assert status(start(refused)) == 0
        finally:
            tmp_path.chmod(0o755)
        assert same(torch.load(path), OLD)
        assert not left(tmp_path)

    def test_memory_mapped_from_the_old_file(self, tmp_path: Path) -> None:
        """Saving a mapped checkpoint over itself reads what was mapped (torchtune 1018)."""
        path = tmp_path / "model.pt"
        torchguard.save(OLD, path)
        mapped = torch.load(path, mmap=True)
        torchguard.save({"weight": mapped["weight"], "step": 1}, path)
        assert same(mapped, OLD)
        assert same(torch.load(path), OLD)


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
