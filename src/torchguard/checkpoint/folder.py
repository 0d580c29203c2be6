"""checkpoint_folder(): several files of one checkpoint, shown in one step."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from itertools import chain
from numbers import Integral
from pathlib import Path
from string import digits
from typing import Any, NoReturn

import torch.distributed as dist

from torchguard._events import warn_user
from torchguard._files import (
    is_temporary_name,
    locked,
    locked_file,
    opened,
    sync,
    temporary_name,
    try_lock,
    write_text,
)
from torchguard._public import called, public
from torchguard.errors import SaveError, add_note
from torchguard.state.process import refuse_inside_step

MARK = ".torchguard-checkpoint.json"
"""In each folder that is made here; one without it is never removed, counted or replaced."""


@called("path")
@public
def checkpoint_folder(
    path: str | os.PathLike[str], *, keep: int | None = None, fsync: bool = True, group: Any = None
) -> contextlib.AbstractContextManager[Path]:
    """Write several files into a new folder and show all of them at ``path`` in one step.

    ``path`` is a symbolic link to the newest folder: ``checkpoint -> checkpoint.7``. When the block
    ends, its files are flushed to the disk, the folder gets its name and the link is replaced. If
    the block raises, the new folder is removed and ``path`` leads where it led. If a process was
    killed in the middle, the next call removes a folder that it left, and warns.

    Each folder has a file ``.torchguard-checkpoint.json`` with its own name. A folder without it, a
    copy or a renamed folder is never removed and does not count for ``keep``.

    Args:
        path: of the link; its folder has to exist.
        keep: how many of the newest folders stay, the new one included; by default 1. It counts the
            folders to which ``path`` has led: with another path for each save, such as ``step-10``
            and ``step-20``, all stay, and a warning says so.
        fsync: wait until everything is on the disk, at the end of the block.
        group: a process group, True for the default one. All its ranks enter and get the same
            folder, on a file system that all of them see: ``dcp.save(state, checkpoint_id=new)``.
            If a rank raises, none commits and all raise. The file in the folder lists size and
            sha256 of each file. A name that ends in a digit and is free, such as ``step-10``,
            becomes the folder itself; it is written once, and ``keep`` does not count it.

    Yields:
        The new folder, empty except for that file.

    Raises:
        SaveError: at ``path`` is something that :func:`checkpoint_folder` has not made; or the
            block wrote no file, or ended before ``dcp.async_save`` did; or ``path`` is in the
            folder of another block; or this thread is inside of a block of :func:`transaction`.
            With ``group``: another rank has raised or does not see the folder, or ``path`` is such
            a folder (``step-10``) already.
        ValueError: ``keep`` is not an integer from 1 on.

    Cost:
        The free space of one more checkpoint. With ``group``, one rank reads each file once for its
        hash.

    Example:
        >>> import tempfile, pathlib, torch, torchguard
        >>> path = pathlib.Path(tempfile.mkdtemp(), "checkpoint")
        >>> with torchguard.checkpoint_folder(path, keep=3) as new:
        ...     torch.save({"weight": torch.ones(2)}, new / "model.pt")
        ...     torch.save({"step": 1}, new / "trainer.pt")
        >>> torch.load(path / "trainer.pt")
        {'step': 1}
    """
    return _Block(_block(path, keep, fsync=fsync, group=group))


class _Block(contextlib.AbstractContextManager[Path]):
    """What :func:`checkpoint_folder` returns, which is not yet the folder."""

    def __init__(self, block: contextlib.AbstractContextManager[Path]) -> None:
        self._block = block

    def __enter__(self) -> Path:
        return self._block.__enter__()

    def __exit__(self, *error: object) -> bool | None:
        return self._block.__exit__(*error)  # type: ignore[arg-type]

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "checkpoint_folder: expected a block, `with torchguard.checkpoint_folder(path) as "
            'new:`, which writes into the folder new, as in torch.save(state, new / "model.pt")'
        )

    # Up to 2.8 torch.save() makes a file of what str() returns.
    __truediv__ = __fspath__ = __str__ = __call__ = _refuse


@contextlib.contextmanager
def _block(
    path: str | os.PathLike[str], keep: int | None, *, fsync: bool, group: Any
) -> Iterator[Path]:
    refuse_inside_step("checkpoint_folder")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"checkpoint_folder: path is of type {type(path).__name__}, expected the path of a "
            "folder"
        )
    if keep is not None and not (isinstance(keep, Integral) and keep >= 1):
        raise ValueError(f"checkpoint_folder: keep is {keep!r}, expected an integer of 1 or more")
    link = Path(os.path.abspath(path))
    group = dist.group.WORLD if group is True else group
    rank = 0 if group is None else dist.get_rank(group)
    if rank < 0:
        raise ValueError("checkpoint_folder: this rank is not in group, expected one of its ranks")
    new: Path | None = None
    lock = -1
    try:
        with _on_all_ranks(group, link):
            if not rank:
                _refuse_inside(link)
                _require_parent(link)
                _refuse_foreign(link)
                _warn_after_crash(link, _remove_abandoned_folders(link))
                _warn_of_other_names(link, keep)
                new, lock = _new_folder(link)
        new = link.with_name(gathered(new, group)[0].name)
        with _on_all_ranks(group, link):
            _require_visible(new)
        with _on_all_ranks(group, link):
            yield new
        with _on_all_ranks(group, link):  # from here on no rank writes
            if not rank:
                _refuse_unfinished(new, link)
            part = _manifest_part(new, fsync=fsync, group=group)
        files = None if group is None else dict(chain(*gathered(part, group)))
        with _on_all_ranks(group, link):
            if not rank:
                _commit(new, link, keep=int(keep or 1), fsync=fsync, files=files)
    except BaseException as error:
        if not rank and new is not None:
            shutil.rmtree(new, ignore_errors=True)
        _explain(error, link)
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def _explain(error: BaseException, link: Path) -> None:
    """Add a note to an error of a block that wrote to the link when it was not there."""
    said = str(link) in str(error) and not isinstance(error, SaveError)
    if said and not os.path.lexists(link):
        add_note(
            error,
            f"checkpoint_folder: {link} is not there before the block ends. Write into the folder "
            'that is yielded: torch.save(state, new / "model.pt")',
        )


def _refuse_inside(link: Path) -> None:
    """Raise if the folder of ``link`` is that of another block, which holds its lock to the end."""
    if is_temporary_name(link.parent.resolve().name) and (link.parent / MARK).exists():
        raise SaveError(
            f"checkpoint_folder: {link} is inside of the folder that another block of "
            "checkpoint_folder writes, and appears with it: write into that folder, as in "
            f'torch.save(state, new / "{link.name}.pt"), without a second block'
        )


def _warn_of_other_names(link: Path, keep: int | None) -> None:
    """Say that ``keep`` does not count checkpoints that have a number in their own path."""
    if keep is None or os.path.lexists(link):
        return
    pattern = re.sub(r"\d+", r"\\d+", re.escape(link.name))
    others = [n for n in os.listdir(link.parent) if re.fullmatch(pattern, n) and n != link.name]
    once = [name for name in others if _is_written_once(link.with_name(name))]
    if len(once) >= keep:
        name = link.with_name(re.sub(r"\d+", "", link.name).strip("-_.=") or "checkpoint")
        warn_user(
            "keep-counts-one-path",
            f"checkpoint_folder: keep={keep} counts the folders of one path, and {len(once)} with "
            f"other numbers than {link.name} stay, such as {min(once)}. Save to one path, as in "
            f"checkpoint_folder({str(name)!r}, keep={keep}): it leads to the newest",
        )


def _is_written_once(link: Path) -> bool:
    """Whether a checkpoint with this path was saved, and saved one time."""
    if link.is_symlink():
        return len(numbers(link)) == 1
    return marked(link).get("for") == link.name and is_ours(link)


def _require_parent(link: Path) -> None:
    if link.parent.is_dir():
        return
    there = link.parent.exists()
    raise (NotADirectoryError if there else FileNotFoundError)(
        errno.ENOTDIR if there else errno.ENOENT,
        f"checkpoint_folder: path is {str(link)!r}, expected it in a folder that exists: "
        f"os.makedirs({str(link.parent)!r})",
    )


def _refuse_foreign(link: Path) -> None:
    """Raise if something is at ``link`` other than a link to a folder with our mark."""
    if not os.path.lexists(link):
        return
    if is_ours(link):
        raise SaveError(
            f"checkpoint_folder: {link} is a checkpoint already, and a name that ends in a digit "
            "is written once; remove that folder first, or choose another name"
        )
    if not link.is_symlink():
        kind = "a folder" if link.is_dir() else "a file"
        raise SaveError(
            f"checkpoint_folder: {link} is {kind} that checkpoint_folder has not made, expected "
            "its link or nothing; move it away or choose another path"
        )
    leads = os.readlink(link)
    if re.fullmatch(_numbered(link), leads) is None or not is_ours(link.with_name(leads)):
        if os.readlink(link) != leads:  # another process has shown a newer one meanwhile
            _refuse_foreign(link)
            return
        raise SaveError(
            f"checkpoint_folder: {link} is a link to {leads}, which checkpoint_folder has not made "
            f"(it has no file {MARK}); remove the link, or choose another path"
        )


def _new_folder(link: Path) -> tuple[Path, int]:
    """Make a marked folder with a temporary name; return it and the descriptor of its lock.

    The name does not begin with that of ``link``: programs look for ``step-10`` and the like.
    """
    while True:
        folder = link.with_name(temporary_name())
        folder.mkdir()
        lock = -1
        try:
            # Until it is locked, another process may take it for an abandoned one and remove it.
            lock = os.open(folder, os.O_RDONLY)
            if try_lock(lock) and folder.exists():
                (folder / MARK).write_text(_mark(link, folder), encoding="utf-8")
                return folder, lock
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if lock >= 0:
                os.close(lock)
            if isinstance(error, FileNotFoundError):
                continue
            raise
        os.close(lock)


def is_ours(folder: Path) -> bool:
    """Whether :func:`checkpoint_folder` has given a folder its name: a copy's name is another."""
    return not folder.is_symlink() and marked(folder).get("folder") == folder.name


def _mark(link: Path, folder: Path, files: Mapping[str, Any] | None = None) -> str:
    mark = {"made by": "torchguard", "for": link.name, "folder": folder.name}
    return json.dumps(mark if files is None else {**mark, "files": files}) + "\n"


def marked(folder: Path) -> dict[str, Any]:
    """Return what the mark says, with a group's manifest; nothing where it is not whole."""
    try:
        return dict(json.loads((folder / MARK).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _commit(
    new: Path, link: Path, *, keep: int, fsync: bool, files: Mapping[str, Any] | None
) -> None:
    """Give a folder its number, let the link lead to it, and remove older ones.

    The mark holds ``files``, the manifest of a group. The folder of a group takes the place of the
    link itself if its name ends in a digit.
    """
    with locked(str(link.parent)):  # a second writer would take the same number
        _refuse_foreign(link)
        alone = files is not None and link.name[-1].isdigit() and not os.path.lexists(link)
        number = max(numbers(link), default=0) + 1
        while os.path.lexists(link.with_name(f"{link.name}.{number}")):  # somebody else's
            number += 1
        final = link if alone else link.with_name(f"{link.name}.{number}")
        pointer = link.with_name(f".torchguard-link-{link.name}")
        pointer.unlink(missing_ok=True)  # of a process that was killed
        write_text(new / MARK, _mark(link, final, files), fsync=fsync)
        new.rename(final)
        if fsync:
            sync(str(link.parent))
        if alone:
            return
        try:
            pointer.symlink_to(final.name, target_is_directory=True)
            pointer.replace(link)
        except BaseException:
            final.rename(new)
            pointer.unlink(missing_ok=True)
            raise
        if fsync:
            sync(str(link.parent))
        for older in numbers(link)[:-keep]:
            with contextlib.suppress(OSError):  # another process was quicker, or: the next save
                _remove(link.with_name(f"{link.name}.{older}"))


def _refuse_unfinished(new: Path, link: Path) -> None:
    """Raise if nothing is there yet, or shards of DCP without the metadata that it writes last."""
    files = [each for each in new.rglob("*") if each.is_file() and each.name != MARK]
    ended = {each.parent for each in files if each.name.endswith(".metadata")}
    if files and not {each.parent for each in files if each.suffix == ".distcp"} - ended:
        return
    begun = (new / MARK).stat().st_mtime_ns
    there = (each for each in link.glob("*") if each.name != MARK)
    instead = [each.name for each in there if each.stat().st_mtime_ns >= begun]
    what = "what was to be saved is not there when the block ends"
    if not files and instead:
        what = f"the block wrote {', '.join(sorted(instead))} into {link}, the checkpoint before"
    raise SaveError(
        f"checkpoint_folder: {what}. Write into the folder that is yielded, torch.save(state, "
        'new / "model.pt"), and wait inside the block for what writes in another thread or '
        "process, as dcp.async_save does"
    )


def _numbered(link: Path) -> str:
    return rf"{re.escape(link.name)}\.([0-9]+)"


def numbers(link: Path) -> list[int]:
    """Return the numbers of the marked folders, which are whole, the oldest first."""
    found = (re.fullmatch(_numbered(link), name) for name in os.listdir(link.parent))
    return sorted(int(match[1]) for match in found if match and is_ours(link.parent / match[0]))


def _remove(folder: Path) -> None:
    """Rename an old folder, then remove it: meanwhile it has a temporary name."""
    if os.access(folder, os.W_OK):  # one that is write-protected stays whole
        with opened(str(folder), os.O_RDONLY) as lock:
            try_lock(lock)  # the process is alive; if another one holds it, that is too
            _remove_marked(folder.rename(folder.with_name(temporary_name())))


def _remove_marked(folder: Path) -> None:
    """Remove a folder, its mark last: half removed, it can still be told from somebody else's."""
    for each in list(folder.iterdir()):
        if each.name != MARK:
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink(missing_ok=True)
    shutil.rmtree(folder)


def _remove_abandoned_folders(link: Path) -> list[str]:
    """Remove the temporary folders of processes that are dead; return their names."""
    removed = []
    for name in filter(is_temporary_name, os.listdir(link.parent)):
        path = link.with_name(name)
        if path.is_symlink():  # it may lead to a folder that is whole
            continue
        # Alive, of another user, gone meanwhile, or a file system without locks.
        with contextlib.suppress(OSError), locked_file(str(path)):
            written_for = marked(path).get("for")
            if written_for is None:  # stopped before it wrote, or about to make a new one
                if os.listdir(path) == [MARK] and not (path / MARK).stat().st_size:
                    (path / MARK).unlink()
                path.rmdir()
            # That of step-10, when step-20 is saved: the run goes on from another step.
            elif written_for.rstrip(digits) == link.name.rstrip(digits):
                _remove_marked(path)
                removed.append(name)
    return removed


def _sync_all(folder: Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for parent, _, names in os.walk(folder):
        for path in (os.path.join(parent, name) for name in names):
            if stat.S_ISREG(os.lstat(path).st_mode):  # to open a pipe waits for its other end
                with opened(path, os.O_RDONLY) as descriptor:
                    os.fsync(descriptor)
        sync(parent)


def _warn_after_crash(link: Path, abandoned: list[str]) -> None:
    """Say what a process that was stopped has left, if it has."""
    if not abandoned:
        return
    whole = ", ".join(f"{link.name}.{number}" for number in numbers(link)) or "none"
    leads = f"{link} leads to {os.readlink(link)}" if link.is_symlink() else "there is no link"
    warn_user(
        "stopped-while-writing",
        f"checkpoint_folder: a process was stopped while it wrote {link}. Removed: "
        f"{', '.join(abandoned)}. Whole are: {whole}; {leads}",
    )


# ---- with a group: one folder, made by rank 0, shown if no rank raises ----


@contextlib.contextmanager
def _on_all_ranks(group: Any, link: Path) -> Iterator[None]:
    """If the block raises on one rank, raise on all."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception):  # that of this rank goes on
            gathered(f"{type(error).__name__}: {error}", group)
        raise
    failures = [(rank, text) for rank, text in enumerate(gathered(None, group)) if text is not None]
    if failures:
        what = "; ".join(f"rank {rank}: {text}" for rank, text in failures)
        raise SaveError(f"checkpoint_folder: no rank has saved, {link} is unchanged. {what}")


def gathered(value: Any, group: Any) -> list[Any]:
    """Return the values of all ranks; that of this one without a group."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _require_visible(new: Path) -> None:
    """Raise where the folder of rank 0 is not to be seen."""
    if marked(new).get("folder") != new.name:
        raise SaveError(
            f"checkpoint_folder: this rank does not see {new}, which rank 0 has made; with group= "
            "the path has to be on a file system that all ranks share"
        )


def _manifest_part(new: Path, *, fsync: bool, group: Any) -> list[tuple[str, dict[str, Any]]]:
    """Flush all files and hash those of this rank: every file of a group is hashed by one."""
    if fsync:
        _sync_all(new)
    found: list[tuple[str, dict[str, Any]]] = []
    if group is None:
        return found
    size, own = dist.get_world_size(group), dist.get_rank(group)
    files = sorted(each for each in new.rglob("*") if each.is_file() and each.name != MARK)
    for place, file in enumerate(files):
        # DCP names a file by the rank that wrote it, and that rank has it in its page cache.
        of_dcp = re.match(r"__(\d+)_", file.name)
        if (int(of_dcp[1]) if of_dcp else place) % size == own:
            entry = {"size": file.stat().st_size, "sha256": sha256_of(file)}
            found.append((file.relative_to(new).as_posix(), entry))
    return found


def seal(folder: Path) -> None:
    """Flush a folder that other code has filled, and list size and sha256 of each file in it."""
    _sync_all(folder)
    files = {
        file.relative_to(folder).as_posix(): {
            "size": file.stat().st_size,
            "sha256": sha256_of(file),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MARK
    }
    write_text(folder / MARK, _mark(folder, folder, files), fsync=True)


def sha256_of(path: Path) -> str:
    """Return the hash of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
