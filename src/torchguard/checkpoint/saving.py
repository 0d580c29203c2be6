"""``save()``: ``torch.save`` that never leaves half a file."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from typing import Any

import torch

from torchguard._events import record
from torchguard._files import is_replaceable, is_temporary, replace_file
from torchguard._public import public
from torchguard._torch import patch
from torchguard.errors import SaveError
from torchguard.state.process import refuse_inside_step
from torchguard.state.walk import tensors_in

# A zip archive begins with a record and ends with 22 bytes that say where its directory is.
_ZIP_BEGINS, _ZIP_ENDS, _ZIP_END_SIZE = b"PK\x03\x04", b"PK\x05\x06", 22


@public
def save(
    obj: Any,
    f: Any,
    pickle_module: Any = pickle,
    pickle_protocol: int = torch.serialization.DEFAULT_PROTOCOL,
    *,
    fsync: bool = True,
    **options: Any,
) -> None:
    """Save an object atomically: the path holds the old file or the new one, whole.

    Equals ``torch.save(obj, f, pickle_module, pickle_protocol, **options)``, byte for byte. If
    the save fails, the process is killed or the disk is full, the old file is unchanged, and the
    exception is PyTorch's. Memory mapped from the old file (``torch.load(mmap=True)``) stays valid.
    If another thread writes to the tensors meanwhile, the file can mix two states, as with
    ``torch.save``.

    Args:
        obj: what to save.
        f: a path. A symbolic link is followed to its file. A file object, a pipe or a device is
            handed to ``torch.save``.
        pickle_module: as for ``torch.save``.
        pickle_protocol: as for ``torch.save``.
        fsync: wait until the file is on the disk. Without it a killed process loses nothing, but
            after a loss of power neither file may be there.
        **options: further options of ``torch.save``.

    Raises:
        SaveError: the folder of ``f`` takes no new file, PyTorch's writer stopped before the end of
            the file, or this thread is inside of a block of :func:`transaction`: half a step. So is
            what another thread saves of the tensors that the block trains; copies are not.

    Upstream: https://github.com/pytorch/pytorch/issues/2883,
    https://github.com/pytorch/pytorch/issues/144657

    Cost:
        The free space of one more file, and with ``fsync`` the time of the disk.

    Example:
        >>> import tempfile, torch, torchguard
        >>> path = tempfile.mkdtemp() + "/model.pt"
        >>> torchguard.save({"weight": torch.ones(2)}, path)
        >>> torchguard.load(path)
        {'weight': tensor([1., 1.])}
    """
    if isinstance(f, (str, os.PathLike)):
        if os.path.isdir(f):
            raise IsADirectoryError(
                f"save: f is the folder {os.fspath(f)!r}, expected a file in it"
            )
    elif not hasattr(f, "write"):
        raise TypeError(
            f"save: f is of type {type(f).__name__}, expected a path or a file: save(state, path)"
        )
    refuse_inside_step("save", lambda: [tensor for _, tensor in tensors_in(obj, "", {})])
    save = guard_save(patch.original("torch.save"), fsync=fsync)
    save(obj, f, pickle_module, pickle_protocol, **options)


def guard_save(original: Callable[..., None], *, fsync: bool = True) -> Callable[..., None]:
    """Make ``torch.save`` what :func:`save` is."""

    def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
        path = _path_to_replace(f)
        if path is None:
            original(obj, f, *args, **options)
            return

        def write(temporary: str) -> None:
            original(obj, temporary, *args, **options)
            _check_end(temporary, path)

        _replace(path, write, fsync=fsync)

    return save


def guard_serialize_file(original: Callable[..., None]) -> Callable[..., None]:
    """Guard what safetensors' ``save_file`` and ``save_model`` write with.

    By then they have refused what they do not save, in their own words.
    """

    def serialize_file(flattened: Any, filename: Any, metadata: Any = None) -> None:
        path = _path_to_replace(filename)
        if path is None:
            original(flattened, filename, metadata=metadata)
        else:
            _replace(path, lambda new: original(flattened, new, metadata=metadata))

    return serialize_file


def guard_commit(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Guard the last step of fsspec's local files, which Lightning writes checkpoints through.

    They are written in the system's temporary folder and moved; where that is another file
    system, ``shutil.move`` copies onto the target.
    """

    def commit(self: Any) -> None:
        path = None if self.autocommit else _path_to_replace(self.path)
        if path is None:
            original(self)
            return
        if not self.f.closed:
            self.f.close()
        _replace(path, lambda temporary: shutil.move(self.temp, temporary))

    return commit


def _replace(path: str, write: Callable[[str], object], *, fsync: bool = True) -> None:
    """Replace a file whole, and count the event if that fails."""
    try:
        replace_file(path, write, fsync=fsync)
    except BaseException as error:
        record("file_kept", "save", f"{path} is not written after {type(error).__name__}")
        raise


def _check_end(temporary: str, path: str) -> None:
    """Raise if an archive has no end: up to 2.6 torch's writer drops an error in its last bytes."""
    with open(temporary, "rb") as file:
        if file.read(len(_ZIP_BEGINS)) != _ZIP_BEGINS:
            return
        file.seek(-_ZIP_END_SIZE, os.SEEK_END)
        ended = file.read(len(_ZIP_ENDS)) == _ZIP_ENDS
    if not ended:
        raise SaveError(
            f"save: torch has written {os.path.getsize(temporary):,} bytes, and not the end of the "
            f"file; the disk may be full. {path} is unchanged"
        )


def _path_to_replace(f: Any) -> str | None:
    """Return the path if it is to be replaced; None where the original writer is called with it."""
    path = os.fspath(f) if isinstance(f, (str, os.PathLike)) else None
    if not isinstance(path, str) or is_temporary(path) or not is_replaceable(path):
        return None
    # What may not be written to may not be replaced either; torch's own error says so.
    return None if os.path.exists(path) and not os.access(path, os.W_OK) else path
