"""``checkpoint_folder()``: several files that are shown by one rename, and the ones before them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from torchguard._public import public
from torchguard.checkpoint.whole_file import (
    locked,
    remove_abandoned,
    sync,
    temporary_name,
    try_lock,
)
from torchguard.errors import SaveError

__all__ = ["checkpoint_folder"]


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
        SaveError: ``path`` is a file or a folder of somebody else.
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
    _tell_what_is_whole(link, remove_abandoned(str(link.parent), link.name))
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
            _lead(link, final)
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


def _lead(link: Path, final: Path) -> None:
    """Let the link lead to the new folder: a new link takes the place of the old one."""
    new = link.with_name(temporary_name(link.name))
    new.symlink_to(final.name, target_is_directory=True)
    try:
        new.replace(link)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _remove(link: Path, number: int) -> None:
    """Remove an old folder, under a temporary name first: a half of it never looks whole."""
    old = link.with_name(temporary_name(link.name))
    with contextlib.suppress(FileNotFoundError):  # another process was quicker
        link.with_name(f"{link.name}.{number}").rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _sync_all(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync(parent)


def _tell_what_is_whole(link: Path, abandoned: list[str]) -> None:
    """Warn after a crash."""
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
