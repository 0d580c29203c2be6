"""What ``install("save")`` and ``install("load")`` patch, and how they are found to be needed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from torchguard._torch import patch
from torchguard.checkpoint.loading import guard_load, guard_module_load, guard_optimizer_load
from torchguard.checkpoint.saving import (
    guard_commit,
    guard_save,
    guard_save_file,
    guard_serialize_file,
)

__all__ = [
    "SAVE_IN_PACKAGES",
    "load_not_needed",
    "load_replacements",
    "save_not_needed",
    "save_replacements",
]

SAVE_IN_PACKAGES: Mapping[str, Mapping[str, patch.Make]] = {
    "safetensors.torch": {
        "safetensors.torch.save_file": guard_save_file,  # save_model calls it
        "safetensors.torch.serialize_file": guard_serialize_file,
    },
    # Lightning writes its checkpoints through fsspec.
    "fsspec.implementations.local": {
        "fsspec.implementations.local.LocalFileOpener.commit": guard_commit,
    },
}


def save_replacements() -> Mapping[str, patch.Make]:
    """Return what to patch in torch for ``"save"``."""
    return {"torch.save": guard_save}


def save_not_needed() -> str | None:
    """Save twice: a file that is replaced is another file afterwards."""
    save = patch.original("torch.save")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.pt")
        save(0, path)
        before = path.stat().st_ino
        with path.open("rb"):  # so that its number is not used again
            save(0, path)
            if path.stat().st_ino == before:
                return None
    return "torch.save replaces a file whole on this torch"


def load_replacements() -> Mapping[str, patch.Make]:
    """Return what to patch in torch for ``"load"``."""
    return {
        "torch.load": guard_load,
        "torch.nn.Module.load_state_dict": guard_module_load,
        "torch.optim.Optimizer.load_state_dict": guard_optimizer_load,
    }


def load_not_needed() -> str | None:
    """Load a state whose last tensor does not fit."""
    module = torch.nn.Linear(1, 1, device="cpu")
    load_state_dict = patch.original("torch.nn.Module.load_state_dict")
    state = {"weight": torch.full((1, 1), 77.0), "bias": torch.ones(9)}
    try:
        load_state_dict(module, state)
    except RuntimeError:
        if module.weight.item() == 77.0:  # noqa: PLR2004
            return None
    return "a load_state_dict that fails leaves the module as it was on this torch"
