"""The folder of ``checkpoint_folder(group=)``: made by rank 0, shown if no rank raises."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from torchguard.checkpoint.folder import (
    MARK,
    commit,
    is_ours,
    marked,
    new_folder,
    refuse_foreign,
    remove_abandoned_folders,
    sync_all,
    warn_after_crash,
)
from torchguard.checkpoint.verify import sha256_of
from torchguard.errors import SaveError

_T = TypeVar("_T")


@contextlib.contextmanager
def folder_of_all_ranks(link: Path, *, keep: int, fsync: bool, group: Any) -> Iterator[Path]:
    """Give all ranks one new folder; show it at ``link`` when every rank has left the block."""
    group = None if group is True else group
    rank, lock, new = _rank_in(group), -1, None
    alone = link.name[-1].isdigit() and not link.is_symlink()

    def begin() -> str | None:
        nonlocal lock, new
        if rank:
            return None
        _refuse_again(link)
        refuse_foreign(link)
        warn_after_crash(link, remove_abandoned_folders(link))
        new, lock = new_folder(link)
        return new.name

    try:
        name = _of_all(group, begin, link)[0]
        new = link.with_name(str(name))
        _of_all(group, lambda: _require_visible(link.with_name(str(name))), link)
        try:
            yield new
        except BaseException as error:
            with contextlib.suppress(Exception):  # that of this rank goes on
                _of_all(group, partial(_raise, error), link)
            raise
        _of_all(group, lambda: None, link)  # from here on no rank writes
        files: dict[str, Any] = {}
        for part in _of_all(group, lambda: _manifest_part(new, fsync, group), link):
            files.update(part)

        def show() -> None:
            if not rank:
                commit(new, link, keep=keep, fsync=fsync, files=files, alone=alone)

        _of_all(group, show, link)
    except BaseException:
        if not rank and new is not None:
            shutil.rmtree(new, ignore_errors=True)
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def _rank_in(group: Any) -> int:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("checkpoint_folder: this rank is not in group, expected one of its ranks")
    return rank


def _of_all(group: Any, call: Callable[[], _T], link: Path) -> list[_T]:
    """Call on every rank and return what each returned; if one raises, all raise."""
    result, failure, own = None, None, None
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  raised below, after the others know
        own, failure = error, f"{type(error).__name__}: {error}"
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (result, failure), group=group)
    if own is not None:
        raise own
    failures = [(rank, text) for rank, (_, text) in enumerate(gathered) if text is not None]
    if failures:
        what = "; ".join(f"rank {rank}: {text}" for rank, text in failures)
        raise SaveError(f"checkpoint_folder: no rank has saved, {link} is as it was. {what}")
    return [each for each, _ in gathered]


def _refuse_again(link: Path) -> None:
    if not link.is_symlink() and is_ours(link):
        raise SaveError(
            f"checkpoint_folder: {link} is a checkpoint already, and a name that ends in a digit "
            "is written once; remove that folder first, or choose another name"
        )


def _raise(error: BaseException) -> None:
    raise error


def _require_visible(new: Path) -> None:
    if marked(new).get("folder") != new.name:
        raise SaveError(
            f"checkpoint_folder: this rank does not see {new}, which rank 0 has made; with group= "
            "the path has to be on a file system that all ranks share"
        )


def _manifest_part(new: Path, fsync: bool, group: Any) -> dict[str, Any]:
    """Flush all files and hash those of this rank: every one is hashed once."""
    if fsync:
        sync_all(new)
    files = sorted(each for each in new.rglob("*") if each.is_file() and each.name != MARK)
    # DCP names a file by the rank that wrote it, and that rank has it in its page cache.
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = [
        each
        for place, each in enumerate(files)
        if (int(match[1]) if (match := re.match(r"__(\d+)_", each.name)) else place) % size == rank
    ]
    return {
        each.relative_to(new).as_posix(): {"size": each.stat().st_size, "sha256": sha256_of(each)}
        for each in mine
    }
