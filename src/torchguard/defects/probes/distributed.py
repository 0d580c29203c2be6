"""Sharded checkpoints that are lost, or load as something else than was saved."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch

from torchguard.defects.catalog import NotRunHere
from torchguard.defects.probes import issues, memory_defect

_SIZE = 64


def _dcp() -> Any:
    if not torch.distributed.is_available():
        raise NotRunHere("this build of torch has no torch.distributed")
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415  seconds, for these rows alone

    return dcp


def _state(fill: float) -> dict[str, Any]:
    return {"first": torch.full((_SIZE,), fill), "second": torch.full((_SIZE,), fill)}


def _attempt(dcp: Any, state: dict[str, Any], path: Path) -> BaseException | None:
    """Load; return what was raised: CheckpointException is no Exception."""
    try:
        dcp.load(state, checkpoint_id=path)
    except BaseException as error:  # noqa: BLE001
        return error
    return None


class _Unpicklable:
    def __reduce__(self) -> str:
        raise ValueError("an object that can't be pickled")


@memory_defect(
    "dcp.save over a checkpoint that fails or is killed leaves none that loads, or a mix",
    title="a killed dcp.save loses the old checkpoint too",
    guards=("save",),
    advice="Save each checkpoint to a new folder and remove the old one after it.",
    limits="Only the writer of the file system is guarded.",
)
def dcp_overwrite() -> str | None:
    """Save, then save an object that can't be pickled to the same place; load what is there.

    The shards are opened for writing in place before anything is pickled.
    https://github.com/pytorch/pytorch/blob/main/torch/distributed/checkpoint/filesystem.py
    """
    dcp = _dcp()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint")
        dcp.save({**_state(1.0), "other": 1}, checkpoint_id=path)
        with contextlib.suppress(BaseException):  # it has to fail
            dcp.save({**_state(2.0), "other": _Unpicklable()}, checkpoint_id=path)
        loaded = _state(0.0)
        error = _attempt(dcp, loaded, path)
    if error is not None:
        return f"a save failed, and the checkpoint before it is lost: {type(error).__name__}"
    held = {number for name in ("first", "second") for number in loaded[name].tolist()}
    return None if held == {1.0} else f"a save failed, and tensors hold values of {sorted(held)}"


@memory_defect(
    "dcp.load loads a shard in which a bit has changed",
    title="dcp.load loads a corrupt shard",
    guards=("load",),
    advice="Write a checksum of each file when you save, and compare it before dcp.load.",
)
def dcp_bits() -> str | None:
    """Change one bit of a tensor in a shard: the CRC that torch.save has written is not read."""
    dcp = _dcp()
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(_state(1.0), checkpoint_id=folder)
        (shard,) = Path(folder).glob("*.distcp")
        data = bytearray(shard.read_bytes())
        data[data.find(torch.ones(_SIZE).numpy().tobytes()) + 2] ^= 1
        shard.write_bytes(data)
        loaded = _state(0.0)
        if _attempt(dcp, loaded, Path(folder)) is not None:
            return None
    wrong = sum(int((loaded[name] != 1).sum()) for name in loaded)
    return f"{wrong} number was loaded that nobody has saved" if wrong else None


@memory_defect(
    "dcp.load converts what was saved to the dtype that is asked for",
    title="dcp.load silently converts the dtype",
    upstream=issues(187138),
    guards=("load",),
    advice="Load into tensors of the dtype that was saved, and convert them after.",
)
def dcp_dtype() -> str | None:
    """Save float32 and load into bfloat16: a third becomes another number."""
    dcp = _dcp()
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"a": torch.full((2,), 1 / 3)}, checkpoint_id=folder)
        loaded = {"a": torch.zeros(2, dtype=torch.bfloat16)}
        error = _attempt(dcp, loaded, Path(folder))
    return None if error else f"1/3 was saved as float32 and is {loaded['a'][0].item():.4f} now"


@memory_defect(
    "dcp.load that can't read one file has overwritten the tensors of the others",
    title="a failed dcp.load leaves two checkpoints mixed",
    guards=("load",),
    advice="Load into copies, or restart from the checkpoint before: tensors hold two states.",
)
def dcp_half_load() -> str | None:
    """Write a file for each tensor and remove one of them: the load raises after the other."""
    dcp = _dcp()
    for removed in range(2):
        with tempfile.TemporaryDirectory() as folder:
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
            dcp.save(_state(1.0), storage_writer=writer)
            sorted(Path(folder).glob("*.distcp"))[removed].unlink()
            loaded = _state(0.0)
            error = _attempt(dcp, loaded, Path(folder))
        if error is not None and any(loaded[name].any() for name in loaded):
            return f"{type(error).__name__}, and one of two tensors was overwritten"
    return None
