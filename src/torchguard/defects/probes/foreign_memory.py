"""Memory shared with numpy, with a buffer or with a file, used past its end or its rights."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import tempfile
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from torchguard.defects.catalog import Defect, NotRunHere

# --- numpy-readonly


def _numpy_readonly() -> str | None:
    """Write through a tensor into a bytes object, then into a read-only mapping.

    A tensor made from read-only memory can be written to.

    torch has no read-only tensors: ``from_numpy``, ``as_tensor`` and ``frombuffer``
    warn once and drop the flag. A write then changes an immutable ``bytes`` object,
    or kills the process where the memory is mapped without the right to write, as
    ``np.load(..., mmap_mode="r")`` does.
    """
    immutable = bytes(bytearray(b"immutable"))  # an object of its own, no interned constant
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning is about exactly this
        with suppress(RuntimeError, ValueError, TypeError):
            torch.from_numpy(np.frombuffer(immutable, dtype=np.uint8)).fill_(ord("x"))
        if immutable != b"immutable":
            return f"fill_ changed an immutable bytes object to {immutable!r}"

        # What np.load(..., mmap_mode="r") gives, without a file.
        mapping = mmap.mmap(-1, mmap.PAGESIZE, access=mmap.ACCESS_READ)
        mapped = np.frombuffer(mapping, dtype=np.uint8)
        with suppress(RuntimeError, ValueError, TypeError):
            torch.from_numpy(mapped).fill_(1)  # dies of SIGSEGV where the flag is dropped
        return None if not mapped.any() else "fill_ wrote to an array mapped read-only"


NUMPY_READONLY = Defect(
    id="numpy-readonly",
    summary="a tensor made from a read-only array writes to immutable memory or crashes",
    upstream=(
        "https://github.com/pytorch/pytorch/issues/46741",
        "https://github.com/pytorch/pytorch/issues/5442",
    ),
    family="memory",
    probe=_numpy_readonly,
    guards=("numpy",),
    advice="Copy what is read-only: torch.from_numpy(a if a.flags.writeable else a.copy()).",
)


# --- numpy-view-share


def _numpy_view_share() -> str | None:
    """Share a tensor and see whether the memory under its array is still owned by anybody.

    ``t.numpy()`` points at freed memory once ``t`` moves to shared memory.

    The array keeps the tensor alive, not the storage. ``share_memory_``, which a
    queue or a spawned DataLoader worker calls on every tensor that it sends, swaps
    the storage of the tensor for one in shared memory and frees the old one, with
    the array still pointing there.
    """
    # Memory of numpy's, because its end of life can be watched.
    owner = np.ones(1000, dtype=np.float32)
    address = owner.ctypes.data
    owner_is_alive = weakref.ref(owner)
    t = torch.from_numpy(owner)
    view = t.numpy()
    del owner
    try:
        torch.ones(1).share_memory_()
    except RuntimeError as error:
        raise NotRunHere("no shared memory on this machine") from error
    try:
        t.share_memory_()
    except RuntimeError:
        return None  # refused: the memory stays where the array looks
    if view.ctypes.data != address or owner_is_alive() is not None:
        return None
    return "share_memory_() freed the memory that t.numpy() still points at"


NUMPY_VIEW_SHARE = Defect(
    id="numpy-view-share",
    summary="t.numpy() dangles after share_memory_(), a queue put or a spawned DataLoader",
    upstream=("https://github.com/pytorch/pytorch/issues/51849",),
    family="memory",
    probe=_numpy_view_share,
    guards=("numpy",),
    advice="Call t.share_memory_() before t.numpy(), or keep t.numpy().copy().",
)


# --- frombuffer-lifetime

_MAPPING_SIZE = 16 * mmap.PAGESIZE


def _frombuffer_lifetime() -> str | None:
    """Close a mapping under a tensor, map other memory, and read the tensor.

    A tensor made by ``torch.frombuffer`` does not keep its memory alive.

    ``torch.frombuffer`` takes the address of the buffer, releases the buffer at once
    and keeps only a reference to the object. ``mmap.close()``,
    ``SharedMemory.close()`` and ``bytearray.clear()`` believe nobody uses the memory
    and free it under the tensor.

    Not reported for torch; the same hazard elsewhere:
    https://github.com/numpy/numpy/issues/9537
    https://github.com/python/cpython/issues/102349
    """
    mapping = mmap.mmap(-1, _MAPPING_SIZE)
    mapping[:] = b"\x01" * _MAPPING_SIZE
    t = torch.frombuffer(mapping, dtype=torch.uint8)
    try:
        mapping.close()
    except BufferError:  # what a live memoryview brings about
        return None
    # The kernel puts a mapping of the same size where the closed one was; where it
    # does not, reading the tensor faults.
    other = mmap.mmap(-1, _MAPPING_SIZE)
    other[:] = b"\x02" * _MAPPING_SIZE
    seen = int(t[-1])
    return None if seen == 1 else "after mmap.close() the tensor reads another mapping's memory"


FROMBUFFER_LIFETIME = Defect(
    id="frombuffer-lifetime",
    summary="torch.frombuffer lets go of the buffer: close() or clear() frees a live tensor",
    upstream=(),
    family="memory",
    probe=_frombuffer_lifetime,
    guards=("numpy",),
    advice="Write torch.frombuffer(memoryview(buffer), ...): then close() raises BufferError.",
)


# --- mmap-load-save


def _load_and_save(path: Path) -> NoReturn:
    """Run in the child: end it without running anything of the parent's clean-up."""
    try:
        torch.save(torch.load(path, mmap=True, weights_only=True), path)
    finally:
        os._exit(0)


def _is_intact(path: Path, saved: Tensor) -> bool:
    try:
        return torch.equal(torch.load(path, weights_only=True), saved)
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        return False


def _mmap_load_save() -> str | None:
    """Load and save one checkpoint in a child process and see what is left of both.

    Saving a memory-mapped checkpoint over itself kills the process and the checkpoint.

    ``torch.load(path, mmap=True)`` leaves the tensors in the file. ``torch.save`` to
    the same path truncates the file before it reads them: the read is past the end
    of the file, which is a bus error, and the old checkpoint is gone.
    """
    if not hasattr(os, "fork"):
        raise NotRunHere("no fork on this system")
    saved = torch.ones(2**18)  # 1 MiB: many pages
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, that torch has threads when it forks
        path = Path(folder, "checkpoint.pt")
        torch.save(saved, path)
        child = os.fork()
        if child == 0:
            _load_and_save(path)
        _, status = os.waitpid(child, 0)
        if _is_intact(path, saved):
            return None
        left = path.stat().st_size
    end = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an exception"
    return f"torch.save ended in {end}; {left} bytes are left of the checkpoint"


MMAP_LOAD_SAVE = Defect(
    id="mmap-load-save",
    summary="torch.load(mmap=True), then torch.save to the same path: crash, checkpoint lost",
    upstream=("https://github.com/meta-pytorch/torchtune/issues/1018",),
    family="memory",
    probe=_mmap_load_save,
    guards=("save",),
    advice="Save to a temporary file in the same folder, then os.replace() it over the old one.",
)
