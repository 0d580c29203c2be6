"""Files that are whole: save, load and checkpoint_folder against kills, full disks and threads."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import random
import resource
import shutil
import signal
import stat
import subprocess
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard
from torchguard.checkpoint.saving import save_file
from torchguard.checkpoint.whole_file import temporary_name

KILLS = int(os.environ.get("TORCHGUARD_KILLS", "60"))  # 500 for a release
OLD = {"weight": torch.arange(300.0), "step": 1}
NEW = {"weight": torch.arange(300.0) + 1, "step": 2}


def same(state: Any, other: Any) -> bool:
    return state["step"] == other["step"] and torch.equal(state["weight"], other["weight"])


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def left(folder: Path) -> list[str]:
    """The temporary files in a folder."""
    return [name for name in names(folder) if "torchguard-" in name]


@contextmanager
def file_size_limited(size: int) -> Iterator[None]:
    """Writing beyond this size fails, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def start(run: Callable[..., object], *args: Any) -> int:
    """Run this in a forked process, return its number; it ends with 0 unless it returns False."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if run(*args) is not False else 1)
        except BaseException:  # noqa: BLE001  the parent's tests must not go on here
            traceback.print_exc()
        finally:
            os._exit(2)
    return child


def status(child: int) -> int:
    return os.waitpid(child, 0)[1]


def repeat(times: int, write: Callable[[int], object]) -> None:
    for turn in range(times):
        write(turn)


def kill_after(seconds: float, child: int) -> None:
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


class TestSave:
    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize(
        "name", ["model.pt", "noext", "a.tar.pt", "m\N{LATIN SMALL LETTER U WITH DIAERESIS}.pt"]
    )
    def test_bytes_equal_torch_save(self, tmp_path: Path, name: str, zipped: bool) -> None:
        """The file is the one that torch.save writes under that name."""
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        shared = torch.ones(4)
        obj: dict[str, Any] = {
            "state": module.state_dict(),
            "module": module,
            "views": (shared[1:], shared[:2]),
            "sparse": torch.eye(3).to_sparse(),
            "other": OrderedDict(a=1, b=[None, "text"]),
        }
        (tmp_path / "plain").mkdir()
        options: Any = {} if zipped else {"_use_new_zipfile_serialization": False}
        torch.save(obj, tmp_path / "plain" / name, **options)
        torchguard.save(obj, tmp_path / name, **options)
        if zipped:  # the older format holds addresses
            assert (tmp_path / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
        loaded = torch.load(tmp_path / name, weights_only=False)
        assert torch.equal(loaded["state"]["0.weight"], obj["state"]["0.weight"])
        assert not left(tmp_path)

    def test_every_byte_at_which_writing_fails(self, tmp_path: Path) -> None:
        """The old file stays whole; plain torch.save loses it nearly every time."""
        path, plain = tmp_path / "model.pt", tmp_path / "plain.pt"
        torchguard.save(OLD, path)
        whole, lost = path.read_bytes(), 0
        for limit in range(len(whole)):
            with file_size_limited(limit), pytest.raises((RuntimeError, OSError)):
                torchguard.save(NEW, path, fsync=False)
            assert path.read_bytes() == whole, limit
            assert not left(tmp_path), limit
        for limit in range(0, len(whole), 97):
            torch.save(OLD, plain)
            # 2.6 drops an error in the last bytes.
            with file_size_limited(limit), contextlib.suppress(RuntimeError):
                torch.save(NEW, plain)
            try:
                lost += not same(torch.load(plain), OLD)
            except Exception:  # noqa: BLE001
                lost += 1
        assert lost

    def test_a_large_file_that_does_not_fit(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        torchguard.save(OLD, path)
        large = {"weight": torch.rand(100_000), "step": 3}
        for limit in range(0, 400_000, 9_973):
            with file_size_limited(limit), pytest.raises((RuntimeError, OSError)):
                torchguard.save(large, path)
            assert same(torch.load(path), OLD)
        assert not left(tmp_path)

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
    def test_any_exception_leaves_the_old_file(self, tmp_path: Path, kind: type) -> None:
        class Refuses:
            def __reduce__(self) -> Any:
                raise kind("no")

        path = tmp_path / "model.pt"
        torchguard.save(OLD, path)
        with pytest.raises(kind):
            torchguard.save({"weight": torch.ones(3), "bad": Refuses()}, path)
        assert same(torch.load(path), OLD)
        assert names(tmp_path) == ["model.pt"]

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

    def test_a_disk_that_is_full(self, tmp_path: Path) -> None:
        """A file system of 96 kB with room for the old file and half of the new one."""
        disk = tmp_path / "disk"
        disk.mkdir()
        mount, umount = shutil.which("mount"), shutil.which("umount")
        options = ["-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)]
        if not mount or not umount or subprocess.run([mount, *options], check=False).returncode:
            pytest.skip("no tmpfs can be mounted here; the tests above limit the size of a file")
        try:
            torchguard.save(OLD, disk / "model.pt")
            with pytest.raises((RuntimeError, OSError)):
                torchguard.save({"weight": torch.ones(100_000), "step": 2}, disk / "model.pt")
            assert same(torch.load(disk / "model.pt"), OLD)
            assert names(disk) == ["model.pt"]
        finally:
            subprocess.run([umount, str(disk)], check=True)

    def test_what_a_living_process_writes_stays(self, tmp_path: Path) -> None:
        """Only what is nobody's any more is removed, and nothing that has another name."""
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

    def test_mode_link_and_umask(self, tmp_path: Path) -> None:
        real, link = tmp_path / "real.pt", tmp_path / "link.pt"
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
        link.symlink_to("real.pt")
        torchguard.save(OLD, link)
        assert link.is_symlink()
        assert same(torch.load(real), OLD)

    def test_a_link_to_another_file_system(self, tmp_path: Path) -> None:
        shared = Path("/dev/shm")  # noqa: S108
        if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("no second file system here")
        # /dev is not looked at by the path but by where it leads, so this is a file like others.
        real = shared / temporary_name("test")
        link = tmp_path / "model.pt"
        link.symlink_to(real)
        try:
            torchguard.save(OLD, link)
            with file_size_limited(100), pytest.raises((RuntimeError, OSError)):
                torchguard.save(NEW, link)
            assert same(torch.load(real), OLD)
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
        for wrong in (tmp_path / "nowhere" / "x.pt", tmp_path, 3):
            with pytest.raises(Exception) as plain:  # noqa: PT011
                torch.save(OLD, wrong)  # type: ignore[arg-type]
            with pytest.raises(type(plain.value)) as guarded:
                torchguard.save(OLD, wrong)
            assert str(guarded.value).split("\n")[0] == str(plain.value).split("\n")[0]
        assert not left(tmp_path)

    def test_a_folder_that_takes_no_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        torchguard.save(OLD, path)
        path.chmod(0o666)
        for folder in (tmp_path, *tmp_path.parents[:-2]):
            folder.chmod(folder.stat().st_mode | 0o055)
        tmp_path.chmod(0o555)

        def refused() -> bool:
            if os.geteuid() == 0:
                os.seteuid(65534)  # the root user may write everywhere
            try:
                torchguard.save(NEW, path)
            except torchguard.SaveError as error:
                return str(path) in str(error)
            return False

        try:
            assert status(start(refused)) == 0
        finally:
            tmp_path.chmod(0o755)
        assert same(torch.load(path), OLD)

    def test_memory_mapped_from_the_old_file(self, tmp_path: Path) -> None:
        """Saving a mapped checkpoint over itself reads what was mapped (torchtune 1018)."""
        path = tmp_path / "model.pt"
        torchguard.save(OLD, path)
        mapped = torch.load(path, mmap=True)
        torchguard.save({"weight": mapped["weight"], "step": 1}, path)
        assert same(mapped, OLD)
        assert same(torch.load(path), OLD)

    def test_two_processes_save_to_one_path(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        states = [{"weight": torch.full((5_000,), float(i)), "step": i} for i in range(2)]
        torchguard.save(states[0], path)

        def write(_: int, state: dict[str, Any]) -> None:
            torchguard.save(state, path, fsync=False)

        children = [start(repeat, 50, functools.partial(write, state=state)) for state in states]
        for _ in range(50):
            loaded = torch.load(path)
            assert any(same(loaded, state) for state in states)
        assert [status(child) for child in children] == [0, 0]
        assert not left(tmp_path)


class Steps:
    """Pickled after the tensors before it; writes to one of them, as another thread would."""

    def __init__(self, tensor: torch.Tensor, times: int = 1) -> None:
        self.tensor, self.times = tensor, times

    def __reduce__(self) -> Any:
        if self.times:
            self.times -= 1
            self.tensor.add_(1)
        return dict, ()


class TestTorn:
    def test_a_tensor_that_changes_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        torchguard.save(OLD, path)
        weight = torch.zeros(3)
        obj = {"model": [{"weight": weight}], "then": Steps(weight)}
        with pytest.raises(torchguard.TornSaveError, match=r"obj\['model'\]\[0\]\['weight'\]"):
            torchguard.save(obj, path)
        assert same(torch.load(path), OLD)
        assert not left(tmp_path)

    def test_a_tensor_inside_any_object_is_seen(self, tmp_path: Path) -> None:
        weight = torch.zeros(3)
        held = torch.nn.Linear(1, 1)
        vars(held)["extra"] = [weight]
        with pytest.raises(torchguard.TornSaveError, match="shape"):
            torchguard.save([held, Steps(weight)], tmp_path / "model.pt")

    def test_retry_saves_a_state_that_was_one(self, tmp_path: Path) -> None:
        path, weight = tmp_path / "model.pt", torch.zeros(3)
        torchguard.save([weight, Steps(weight, times=2)], path, on_torn="retry")
        loaded = torch.load(path, weights_only=False)
        assert torch.equal(loaded[0], torch.full((3,), 2.0))
        with pytest.raises(torchguard.TornSaveError):
            torchguard.save([weight, Steps(weight, times=100)], path, on_torn="retry")

    def test_ignore(self, tmp_path: Path) -> None:
        weight = torch.zeros(3)
        torchguard.save([weight, Steps(weight)], tmp_path / "model.pt", on_torn="ignore")

    def test_a_tensor_that_is_not_saved_may_change(self, tmp_path: Path) -> None:
        """Also a gradient, which torch does not pickle."""
        other, parameter = torch.zeros(3), torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.zeros(3)
        torchguard.save([parameter, Steps(other), Steps(parameter.grad)], tmp_path / "model.pt")

    def test_a_thread_that_trains(self, tmp_path: Path) -> None:
        """Every file that is written holds one state; some saves are refused."""
        model = torch.nn.ParameterList(torch.zeros(20_000) for _ in range(20))
        ends = threading.Event()

        def train() -> None:
            with torch.no_grad():
                while not ends.is_set():
                    for parameter in model:
                        parameter.add_(1)

        trainer = threading.Thread(target=train)
        trainer.start()
        torn = 0
        try:
            for _ in range(20):
                try:
                    torchguard.save(model.state_dict(), tmp_path / "model.pt", fsync=False)
                except torchguard.TornSaveError:
                    torn += 1
        finally:
            ends.set()
            trainer.join()
        assert torn

    def test_another_pickle_module(self, tmp_path: Path) -> None:
        """The pickler of the module that was given is the one that is used."""
        seen = []

        class Module:
            __name__ = "mine"
            dump, dumps, loads = pickle.dump, pickle.dumps, pickle.loads

            class Pickler(pickle.Pickler):
                def reducer_override(self, obj: Any) -> Any:
                    seen.append(type(obj))
                    return NotImplemented

        torchguard.save([torch.ones(3)], tmp_path / "model.pt", Module)
        assert torch.Tensor in seen

    def test_wrong_option(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="on_torn is 'never'"):
            torchguard.save(OLD, tmp_path / "x.pt", on_torn="never")  # type: ignore[arg-type]


class TestLoad:
    @pytest.mark.parametrize("options", [{}, {"mmap": True}, {"map_location": "cpu"}])
    def test_equals_torch_load(self, tmp_path: Path, options: dict[str, Any]) -> None:
        path = tmp_path / "model.pt"
        torch.save(OLD, path)
        assert same(torchguard.load(path, **options), OLD)

    def test_every_cut(self, tmp_path: Path) -> None:
        """A file that ends early is refused, and the error names it."""
        for zipped in (True, False):
            torch.save(OLD, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
            whole = (tmp_path / "model.pt").read_bytes()
            cut = tmp_path / "cut.pt"
            for size in [0, *range(5, len(whole) - 1, 97)]:
                cut.write_bytes(whole[:size])
                # In the older format a cut may look like a class that is not allowed.
                also = (torchguard.DamagedFileError, *(() if zipped else (pickle.UnpicklingError,)))
                with pytest.raises(also) as refused:
                    torchguard.load(cut)
                assert not zipped or "cut.pt" in str(refused.value)

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
        torchguard.load(path, mmap=True)  # asked for in order not to read it all
        with pytest.raises(torchguard.DamagedFileError, match="data/0"):
            torchguard.load(path, mmap=True, check=True)
        torchguard.load(path, check=False)

    def test_a_file_without_checksums(self, tmp_path: Path) -> None:
        if not hasattr(torch.serialization, "set_crc32_options"):
            pytest.skip("this torch always computes checksums")
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(OLD, tmp_path / "model.pt")
        finally:
            torch.serialization.set_crc32_options(True)
        assert same(torchguard.load(tmp_path / "model.pt"), OLD)

    def test_errors_that_are_no_damage_are_torchs(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        torch.save(OrderedDict(a=Path("x")), path)
        with pytest.raises(pickle.UnpicklingError):
            torchguard.load(path, weights_only=True)
        with pytest.raises(FileNotFoundError):
            torchguard.load(tmp_path / "nowhere.pt")


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
        found = names(tmp_path)
        assert found == ["checkpoint", "checkpoint.3", "checkpoint.4", "checkpoint.5"]

    def test_an_exception_leaves_the_old_one(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint"
        with torchguard.checkpoint_folder(path) as new:
            torch.save(1, new / "a.pt")
        with pytest.raises(KeyboardInterrupt), torchguard.checkpoint_folder(path) as new:
            torch.save(2, new / "a.pt")
            raise KeyboardInterrupt
        assert torch.load(path / "a.pt") == 1
        assert names(tmp_path) == ["checkpoint", "checkpoint.1"]

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
        if left(tmp_path):
            with pytest.warns(
                RuntimeWarning, match=r"a process was stopped.*Whole are: checkpoint"
            ):
                write(-1)
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
            if not taken and Path(path).name.startswith("checkpoint.torchguard-"):
                taken.append(path)
                Path(path).rmdir()
            return opened(path, *arguments, **options)

        monkeypatch.setattr(os, "open", open_)
        with torchguard.checkpoint_folder(tmp_path / "checkpoint") as new:
            torch.save(1, new / "a.pt")
        assert torch.load(tmp_path / "checkpoint" / "a.pt") == 1
        assert taken

    def test_refuses_what_it_has_not_made(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        with pytest.raises(torchguard.SaveError, match="has not made"):
            with torchguard.checkpoint_folder(tmp_path / "mine"):
                pass
        with pytest.raises(ValueError, match="keep is 0"):
            with torchguard.checkpoint_folder(tmp_path / "new", keep=0):
                pass


class TestSafetensors:
    def test_whole_or_not_at_all(self, tmp_path: Path) -> None:
        safetensors = pytest.importorskip("safetensors.torch")
        path = tmp_path / "model.safetensors"
        tensors = {"a": torch.arange(1000.0)}
        save_file(tensors, path, {"format": "pt"})
        safetensors.save_file(tensors, tmp_path / "plain", {"format": "pt"})
        assert path.read_bytes() == (tmp_path / "plain").read_bytes()
        for limit in range(0, 4000, 111):
            with file_size_limited(limit), pytest.raises(Exception):  # noqa: B017, PT011
                save_file({"a": torch.zeros(1000)}, path)
            assert torch.equal(safetensors.load_file(path)["a"], tensors["a"])
        assert not left(tmp_path)
