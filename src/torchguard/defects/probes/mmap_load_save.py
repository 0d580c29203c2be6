"""Saving a memory-mapped checkpoint over itself kills the process and the checkpoint.

``torch.load(path, mmap=True)`` leaves the tensors in the file. ``torch.save`` to
the same path truncates the file before it reads them: the read is past the end
of the file, which is a bus error, and the old checkpoint is gone.

https://github.com/meta-pytorch/torchtune/issues/1018
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import warnings
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from torchguard.defects.catalog import Defect, NotRunHere


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


def probe() -> str | None:
    """Load and save one checkpoint in a child process and see what is left of both."""
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


DEFECT = Defect(
    id="mmap-load-save",
    summary="torch.load(mmap=True), then torch.save to the same path: crash, checkpoint lost",
    upstream=("https://github.com/meta-pytorch/torchtune/issues/1018",),
    family="memory",
    probe=probe,
    guards=("save",),
    advice="Save to a temporary file in the same folder, then os.replace() it over the old one.",
)
