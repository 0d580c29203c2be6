"""Replace a file in one step: at every instant its path holds the old one or the new.

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
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from torchguard.errors import SaveError

try:
    import fcntl
except ImportError:  # Windows: what a killed process leaves stays there
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = r"\.torchguard-[0-9a-f]{12}"
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
    ``/dev/shm`` is a folder of files.
    """
    if re.match("/dev/(?!shm/)|/proc/", os.path.abspath(path)):
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
    set it, the owner are those of the file that is replaced. Whatever ``write`` raises, ``path``
    is untouched. Temporary files of processes that were killed are removed.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    old: os.stat_result | None = None
    with contextlib.suppress(FileNotFoundError):
        old = os.stat(target)
    # Only this part of the name reaches the file: caffe2/serialize/inline_container.cc
    # calls the folder inside the archive by the file's name without its last extension.
    stem = os.path.basename(path).rpartition(".")[0] or os.path.basename(path)
    if len(os.fsencode(stem)) > _LONGEST_STEM:
        stem = "checkpoint"
    with contextlib.ExitStack() as stack:
        try:
            remove_abandoned(folder, stem)
            new_file = _new_file(folder, stem, 0o666 if old is None else old.st_mode & 0o777)
            temporary = stack.enter_context(new_file)
        except OSError as error:
            raise SaveError(
                f"{path} can't be replaced in one step, because its folder takes no new file: "
                f"{error}; choose a folder that this process may write to"
            ) from error
        write(temporary)
        # Opened and locked again: the writer may have put another file there.
        with opened(temporary, os.O_RDWR) as descriptor:
            try_lock(descriptor)
            if old is not None:
                _set_owner_and_mode(descriptor, old)
            if fsync:
                os.fsync(descriptor)
        try:
            os.replace(temporary, target)
        except PermissionError as error:  # another user's file in a folder with the sticky bit
            raise SaveError(f"{path} can't be replaced: {error}; choose another path") from error
    if fsync:
        sync(folder)


def write_text(path: str | os.PathLike[str], text: str, *, fsync: bool = True) -> None:
    """Put a text in the place of a file in one step; a pipe or a device is written to."""

    def write(new: str) -> None:
        Path(new).write_text(text, encoding="utf-8")

    if is_replaceable(os.fspath(path)):
        replace_file(os.fspath(path), write, fsync=fsync)
    else:
        write(os.fspath(path))


def remove_abandoned(folder: str, stem: str) -> None:
    """Remove the temporary files of ``stem`` whose process is dead."""
    # A living writer holds a lock on its file, which the kernel releases with the process. What
    # merely has such a name, a folder or a link, stays.
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if is_temporary_name(name, stem):
            # Alive, of another user, or gone meanwhile.
            with contextlib.suppress(OSError):
                if stat.S_ISREG(os.lstat(path).st_mode):
                    with locked_file(path):
                        os.unlink(path)


@contextlib.contextmanager
def locked_file(path: str) -> Iterator[None]:
    """Hold the lock on a temporary file or folder; raise an OSError if its writer is alive."""
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "no locks of this kind", path)
    with opened(path, os.O_RDONLY) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def sync(folder: str) -> None:
    """Wait until the names in a folder are on the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANT_SYNC:
            raise


def temporary_name(stem: str = "") -> str:
    """Return a new name that :func:`is_temporary_name` knows."""
    return f"{stem}.torchguard-{secrets.token_hex(6)}"


def is_temporary_name(name: str, stem: str = "") -> bool:
    """Whether this is a name that :func:`temporary_name` makes of ``stem``."""
    return re.fullmatch(re.escape(stem) + _TEMPORARY, name) is not None


def try_lock(descriptor: int) -> bool:
    """Take the lock that says that the writer is alive; False if another one holds it."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: no process can take one, so none removes it
        pass
    return True


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Let one process at a time into the block, where the file system has locks."""
    if fcntl is None:
        yield
        return
    with opened(folder, os.O_RDONLY) as descriptor:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _new_file(folder: str, stem: str, mode: int) -> Iterator[str]:
    """Make an empty file that did not exist, locked until the block ends; remove it if that raises.

    A generator ends by its ``finally``, also if Ctrl-C comes before the block is entered.
    """
    is_locked = False
    while not is_locked:
        path, descriptor = os.path.join(folder, temporary_name(stem)), -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            # Between these two lines another process may take it for an abandoned one.
            is_locked = try_lock(descriptor) and bool(os.fstat(descriptor).st_nlink)
            if is_locked:
                _open.add(path)
                yield path
        except BaseException as error:
            if descriptor >= 0 or not isinstance(error, FileExistsError):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise
        finally:
            _open.discard(path)
            if descriptor >= 0:
                os.close(descriptor)


def _set_owner_and_mode(descriptor: int, old: os.stat_result) -> None:
    if not hasattr(os, "fchmod"):
        return
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    if new.st_mode != old.st_mode:
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


@contextlib.contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """Open a file or a folder by ``os.open``, and close it."""
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    try:
        yield descriptor
    finally:
        os.close(descriptor)
