"""``load()``: ``torch.load`` of a file that is known to be whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchguard._public import public
from torchguard._torch import patch
from torchguard.errors import DamagedFileError

if TYPE_CHECKING:
    from zipfile import ZipFile, ZipInfo

__all__ = ["guard_load", "load"]

_ZIP_BEGINS = b"PK\x03\x04"
_CHUNK = 1 << 20


@public
def load(f: Any, *args: Any, check: bool | None = None, **options: Any) -> Any:
    """Load what was saved, from a file that is whole.

    Equals ``torch.load(f, *args, **options)`` on success. torch compares no checksum: a file in
    which a bit has changed loads without a word. This compares those that ``torch.save`` has
    written, which reads the file once more.

    Args:
        f: a path, or a file object, which goes to ``torch.load`` as it is.
        *args: as for ``torch.load``.
        check: compare checksums. By default they are, except with ``mmap=True``, which is asked
            for in order not to read the whole file; its directory and sizes are checked all the
            same. Files saved after ``torch.serialization.set_crc32_options(False)`` have none.
        **options: as for ``torch.load``.

    Raises:
        DamagedFileError: a ``RuntimeError``: the file is empty, cut off, or holds other bytes
            than were written; says which file and what is wrong with it.

    Upstream: https://github.com/pytorch/pytorch/issues/31620
    """
    return _load(patch.original("torch.load"), f, args, options, check)


def guard_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``torch.load`` what :func:`load` is."""

    def load(f: Any, *args: Any, **options: Any) -> Any:
        return _load(original, f, args, options, None)

    return load


def _load(
    torchs: Callable[..., Any],
    f: Any,
    args: tuple[Any, ...],
    options: dict[str, Any],
    check: bool | None,
) -> Any:
    path = os.fspath(f) if isinstance(f, (str, os.PathLike)) else None
    if not isinstance(path, str) or not os.path.isfile(path):
        return torchs(f, *args, **options)
    with open(path, "rb") as file:
        begins = file.read(len(_ZIP_BEGINS))
    size = os.path.getsize(path)
    if not size:
        raise DamagedFileError(f"{path} is empty: it was created and never written")
    if begins == _ZIP_BEGINS:
        _check_zip(path, size, checksums=not options.get("mmap") if check is None else check)
        return torchs(f, *args, **options)
    try:
        return torchs(f, *args, **options)
    except (EOFError, RuntimeError) as error:
        # torch's older format has neither checksums nor a directory.
        if isinstance(error, EOFError) or "unexpected EOF" in str(error):
            raise _cut_off(path, size) from error
        raise


def _check_zip(path: str, size: int, *, checksums: bool) -> None:
    """Compare what is in a zip archive with its directory and, with ``checksums``, its contents."""
    import zipfile  # noqa: PLC0415  with the first load

    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            # torch writes zeros where it was told to compute none.
            checksums = checksums and any(record.CRC for record in records)
            for record in records:
                _check_record(archive, record, path, checksums=checksums)
    except zipfile.BadZipFile as error:  # the directory is at the end of the file
        raise _cut_off(path, size) from error


def _check_record(archive: ZipFile, record: ZipInfo, path: str, *, checksums: bool) -> None:
    try:
        with archive.open(record) as contents:  # compares the header
            while checksums and contents.read(_CHUNK):  # compares the checksum with the last one
                pass
    except Exception as error:  # zipfile raises four kinds, depending on which byte it was
        raise DamagedFileError(
            f"{path} is damaged: {record.filename} ({record.file_size:,} bytes) does not hold what "
            f"was written ({error or type(error).__name__}); use another copy of the file"
        ) from error


def _cut_off(path: str, size: int) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is not whole: it ends after {size:,} bytes, before its last part. The process "
        "that wrote it was stopped, or is still writing; torchguard.save() leaves no such files"
    )
