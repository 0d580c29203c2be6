"""Replace a file or a folder in one step: at every instant its path holds the old one or the new.

The new contents go to a temporary file in the same folder, are flushed to the disk and take
the target's place by ``os.replace``, which POSIX makes atomic. The old file is not truncated,
so memory that is mapped from it stays valid (https://github.com/meta-pytorch/torchtune/issues/1018).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from torchguard._public import public
from torchguard.errors import SaveError

try:
    import fcntl
except ImportError:  # Windows: what a killed process leaves stays there
    fcntl = None  # type: ignore[assignment]

_MARK = "torchguard-"
_TOKEN_BYTES = 6
_LONGEST_STEM = 200  # bytes; with the mark and the token it stays below the usual 255
# Some file systems can't sync a folder, and say so in one of these ways.
_CANT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM}

_open: set[str] = set()
"""The temporary files that this process is writing now."""


def is_temporary(path: str) -> bool:
    """Whether :func:`replace_file` has made this file and waits until it is written."""
    return path in _open


def is_replaceable(path: str) -> bool:
    """Whether there is a regular file, or nothing, where the path leads: no pipe, no device.

    ``/dev/stdout`` may lead to a regular file, but who opened that file keeps the old one.
    """
    if os.path.abspath(path).startswith(("/dev/", "/proc/")):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return os.path.isdir(os.path.dirname(os.path.realpath(path)))
    except OSError:
        return False


def replace_file(path: str, write: Callable[[str], object], *, fsync: bool = True) -> None:
    """Call ``write`` with the path of a temporary file, then put that file at ``path``.

    A symbolic link is followed to the file it means. Permissions and, where this process may
    set it, the owner are those of the file that is replaced. Whatever ``write`` raises, the
    temporary file is removed, ``path`` is untouched and the exception goes on. Temporary files
    of processes that were killed are removed.

    Args:
        path: where the file belongs; :func:`is_replaceable` has to hold for it.
        write: writes the file whose path it is given. The name has the stem of ``path``,
            because torch writes that into the file.
        fsync: wait until contents and name are on the disk.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    old = _stat_or_none(target)
    # Only this part of the name reaches the file: caffe2/serialize/inline_container.cc
    # calls the folder inside the archive by the file's name without its last extension.
    stem = os.path.basename(path).rpartition(".")[0] or os.path.basename(path)
    if len(os.fsencode(stem)) > _LONGEST_STEM:
        stem = "checkpoint"
    try:
        remove_abandoned(folder, stem)
        temporary, lock = _new_file(folder, stem, 0o666 if old is None else old.st_mode & 0o777)
    except OSError as error:
        raise SaveError(
            f"{path} can't be replaced in one step, because its folder takes no new file: {error}; "
            "choose a folder that this process may write to"
        ) from error
    _open.add(temporary)
    try:
        write(temporary)
        # Opened again: the writer may have put another file there.
        with _opened(temporary, os.O_RDWR) as descriptor:
            if old is not None:
                _set_owner_and_mode(descriptor, old)
            if fsync:
                os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        _open.discard(temporary)
        os.close(lock)
    if fsync:
        sync(folder)


def remove_abandoned(folder: str, stem: str) -> list[str]:
    """Remove the temporary files and folders of ``stem`` whose process is dead; return their names.

    A living writer holds a lock on its temporary file, which the kernel releases with the
    process: that holds across containers with process numbers of their own as well.
    """
    if fcntl is None:
        return []
    temporary = re.compile(rf"{re.escape(stem)}\.{_MARK}[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
    return [
        name
        for name in os.listdir(folder)
        if temporary.fullmatch(name) and _remove_if_unlocked(os.path.join(folder, name))
    ]


def sync(folder: str) -> None:
    """Wait until the names in a folder are on the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANT_SYNC:
            raise


def temporary_name(stem: str) -> str:
    """Return a new name that :func:`remove_abandoned` knows."""
    return f"{stem}.{_MARK}{secrets.token_hex(_TOKEN_BYTES)}"


def try_lock(descriptor: int) -> bool:
    """Take the lock that says that the writer is alive; False if another one holds it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: no process can take one, so none removes it
        return True
    return True


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Let one process at a time into the block, where the file system has locks."""
    if fcntl is None:
        yield
        return
    with _opened(folder, os.O_RDONLY) as descriptor:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _new_file(folder: str, stem: str, mode: int) -> tuple[str, int]:
    """Make an empty file that did not exist, and return it with the descriptor of its lock."""
    while True:
        path = os.path.join(folder, temporary_name(stem))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        # Between these two lines another process may take it for an abandoned one.
        if try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


def _remove_if_unlocked(path: str) -> bool:
    # A link has no lock of its own; it is made and renamed under that of the folder.
    is_link = os.path.islink(path)
    locked_by = os.path.dirname(path) if is_link else path
    try:
        with _opened(locked_by, os.O_RDONLY) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_link and stat.S_ISDIR(os.fstat(descriptor).st_mode):
                shutil.rmtree(path)
            else:
                os.unlink(path)
    except OSError:  # alive, of another user, or gone meanwhile
        return False
    return True


def _set_owner_and_mode(descriptor: int, old: os.stat_result) -> None:
    if not hasattr(os, "fchmod"):
        return
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    if new.st_mode != old.st_mode:
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _stat_or_none(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# ---- checkpoint_folder() ----


@public
@contextlib.contextmanager
def checkpoint_folder(
    path: str | os.PathLike[str], *, keep: int = 1, fsync: bool = True
) -> Iterator[Path]:
    """Write several files into a new folder and show all of them at ``path`` in one step.

    ``path`` is a symbolic link to the newest folder, whose names end in a number:
    ``checkpoint -> checkpoint.7``. Inside the block the new folder has a temporary name. When
    the block ends, its files are flushed to the disk, it is renamed and the link is replaced; who
    opens ``path/model.pt`` gets the file of the old checkpoint or of the new one, never a mix of
    a folder half written. When the block raises, the new folder is removed and ``path`` leads
    where it led.

    If a process was killed in the middle, the next call removes what it left, and warns with
    what is whole.

    Args:
        path: of the link; its folder has to exist.
        keep: how many of the newest folders stay, the new one included.
        fsync: wait until everything is on the disk, at the end of the block.

    Yields:
        The new folder, empty.

    Raises:
        SaveError: ``path`` is a file or a folder that :func:`checkpoint_folder` has not made.
        ValueError: ``keep`` is below 1.

    Example:
        >>> import tempfile, pathlib, torch, torchguard
        >>> path = pathlib.Path(tempfile.mkdtemp(), "checkpoint")
        >>> with torchguard.checkpoint_folder(path, keep=3) as new:
        ...     torch.save({"weight": torch.ones(2)}, new / "model.pt")
        ...     torch.save({"step": 1}, new / "trainer.pt")
        >>> torch.load(path / "trainer.pt")
        {'step': 1}
    """
    if keep < 1:
        raise ValueError(f"checkpoint_folder: keep is {keep}, expected 1 or more")
    link = Path(os.path.abspath(path))
    if os.path.lexists(link) and not link.is_symlink():
        raise SaveError(
            f"checkpoint_folder: {link} is a file or folder that checkpoint_folder has not made, "
            "expected its link or nothing; move it away or choose another path"
        )
    _warn_after_crash(link, remove_abandoned(str(link.parent), link.name))
    new, lock = _new_folder(link)
    try:
        yield new
        if fsync:
            _sync_all(new)
        with locked(str(link.parent)):  # a second writer would take the same number
            final = link.with_name(f"{link.name}.{max(_numbers(link), default=0) + 1}")
            new.rename(final)
            if fsync:
                sync(str(link.parent))
            _point_link_at(link, final)
            if fsync:
                sync(str(link.parent))
            for number in _numbers(link)[:-keep]:
                _remove(link, number)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _new_folder(link: Path) -> tuple[Path, int]:
    while True:
        folder = link.with_name(temporary_name(link.name))
        folder.mkdir()
        # Until it is locked, another process may take it for an abandoned one and remove it.
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if try_lock(lock) and folder.exists():
            return folder, lock
        os.close(lock)


def _numbers(link: Path) -> list[int]:
    """Return the numbers of the folders that are whole, the oldest first."""
    name = re.compile(rf"{re.escape(link.name)}\.([0-9]+)")
    found = (name.fullmatch(each.name) for each in link.parent.iterdir() if each.is_dir())
    return sorted(int(match[1]) for match in found if match)


def _point_link_at(link: Path, final: Path) -> None:
    """Let the link lead to the new folder: a new link takes the place of the old one."""
    new = link.with_name(temporary_name(link.name))
    new.symlink_to(final.name, target_is_directory=True)
    try:
        new.replace(link)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _remove(link: Path, number: int) -> None:
    """Rename an old folder, then remove it: while that goes on, it has a temporary name."""
    old = link.with_name(temporary_name(link.name))
    with contextlib.suppress(FileNotFoundError):  # another process was quicker
        link.with_name(f"{link.name}.{number}").rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _sync_all(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            with _opened(os.path.join(parent, name), os.O_RDONLY) as descriptor:
                os.fsync(descriptor)
        sync(parent)


def _warn_after_crash(link: Path, abandoned: list[str]) -> None:
    if not abandoned:
        return
    whole = ", ".join(f"{link.name}.{number}" for number in _numbers(link)) or "none"
    leads = f"{link} leads to {os.readlink(link)}" if link.is_symlink() else "there is no link"
    warnings.warn(
        f"checkpoint_folder: a process was stopped while it wrote {link}. Removed: "
        f"{', '.join(abandoned)}. Whole are: {whole}; {leads}",
        RuntimeWarning,
        stacklevel=4,
    )
