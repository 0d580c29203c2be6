"""load_sharded(): ``dcp.load`` that compares everything on all ranks before the first copy."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from torchguard._public import public
from torchguard._torch import patch
from torchguard.checkpoint.folder import checkpoint_folder, gathered, is_ours, numbers
from torchguard.checkpoint.whole import (
    METADATA,
    item_faults,
    manifest_fault,
    manifest_of,
    metadata_files,
    with_tensors,
)
from torchguard.errors import SaveError, ShardedCheckpointError

_LOAD = "torch.distributed.checkpoint.state_dict_loader.load"
_SHOWN = 20


@public
def load_sharded(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    extra: bool = False,
    cast: bool = False,
    partial: bool = False,
    group: Any = None,
) -> None:
    """Load a checkpoint of ``torch.distributed.checkpoint``, on all ranks or on none.

    Equals ``dcp.load(state, checkpoint_id=path, process_group=group)`` on success, on another
    number of ranks than saved too, and in one process without a group. Before the first copy into a
    tensor of ``state`` every rank compares names, shapes, dtypes, which elements were saved, and
    the bytes of the files that it will read: with the manifest of ``checkpoint_folder(group=)``,
    else with the CRC of each item. Then the ranks vote.

    Args:
        state: what ``dcp.load`` takes.
        path: a folder, or the link of :func:`checkpoint_folder`.
        extra: the checkpoint may have names that a rank does not ask for.
        cast: a tensor may have another dtype than was saved.
        partial: names that the checkpoint does not have stay as they are.
        group: the process group; None or True for the default one.

    Raises:
        ShardedCheckpointError: a ``RuntimeError``, the same on all ranks; lists up to 20
            differences by name and rank. No tensor has changed, but where it says so.

    Upstream: https://github.com/pytorch/pytorch/issues/187138,
    https://github.com/pytorch/pytorch/issues/126881

    Cost:
        Each file is read twice. Host memory holds one item more, at most the largest file.

    Example:
        >>> import tempfile, torch, torchguard
        >>> import torch.distributed.checkpoint as dcp
        >>> folder = tempfile.mkdtemp()
        >>> _ = dcp.save({"weight": torch.ones(2)}, checkpoint_id=folder)  # on one rank or many
        >>> state = {"weight": torch.zeros(2)}
        >>> torchguard.load_sharded(state, folder)
        >>> state
        {'weight': tensor([1., 1.])}
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"load_sharded: path is of type {type(path).__name__}, expected the checkpoint's "
            "folder: load_sharded(state, folder)"
        )
    options = {"process_group": None if group is True else group}
    allowed = {"extra": extra, "cast": cast, "partial": partial}
    _load(patch.original(_LOAD), state, os.fspath(path), options, allowed)


def _load(
    original: Callable[..., None],
    state: dict[str, Any],
    path: str,
    options: Mapping[str, Any],
    allowed: Mapping[str, bool],
) -> None:
    group = _group_of(options)
    path = _followed(path, group)
    without = gathered(not metadata_files(Path(path)), group)
    loaded: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        for name in sorted(state):
            each = state[name]
            loaded[name] = each.state_dict() if isinstance(each, Stateful) else each
    except Exception as error:  # noqa: BLE001  the other ranks must not wait for this one
        failure = error
    planner = _ComparingPlanner(path, failure, **allowed)
    own = options.get("planner")
    if own is not None:
        planner.flatten_state_dict = own.flatten_state_dict
        planner.flatten_sharded_tensors = own.flatten_sharded_tensors
    try:
        original(loaded, **{**options, "checkpoint_id": path, "planner": planner})
    except CheckpointException as error:
        raise ShardedCheckpointError(_describe(path, error, without, planner.agreed)) from error
    for name, value in loaded.items():
        if not isinstance(state[name], Stateful):
            state[name] = value
    _load_objects(path, state, loaded, group)


def _group_of(options: Mapping[str, Any]) -> Any:
    """Return the ranks for which DCP is called with these options; None for one process."""
    if not dist.is_initialized() or options.get("no_dist"):
        return None
    return options.get("process_group") or dist.group.WORLD


def _followed(path: str, group: Any) -> str:
    """Follow a link once and for all ranks: another program may save meanwhile."""
    parent, name = os.path.split(os.path.abspath(path))
    leads = os.path.relpath(os.path.realpath(path), os.path.realpath(parent))
    # Ranks may see the same folder below other ones.
    first_name, first_leads = gathered((name, leads), group)[0]
    return os.path.normpath(os.path.join(parent, first_leads if name == first_name else leads))


def _load_objects(path: str, state: dict[str, Any], loaded: dict[str, Any], group: Any) -> None:
    failure = None
    try:
        for name, value in loaded.items():
            if isinstance(state[name], Stateful):
                state[name].load_state_dict(value)
    except Exception as error:  # noqa: BLE001  raised below, on all ranks
        failure = error
    texts = gathered(None if failure is None else _said(failure), group)
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(texts) if each is not None]
    if failed:
        raise ShardedCheckpointError(
            f"load_sharded: {path} was read, and load_state_dict of an object raised; objects and "
            f"tensors may hold parts of it. {'; '.join(failed[:_SHOWN])}"
        ) from failure


def _said(error: BaseException) -> str:
    """Return what can travel to other ranks: an exception may be one that pickle can't copy."""
    return f"{type(error).__name__}: {error}"


class _DifferencesError(Exception):
    """What one rank has found, the first of it, and how much; travels to the others."""


class _ComparingPlanner(DefaultLoadPlanner):
    """Raises in the step before the vote that DCP takes on the plans of all ranks."""

    def __init__(
        self, path: str, failure: Exception | None, *, extra: bool, cast: bool, partial: bool
    ) -> None:
        super().__init__(allow_partial_load=True)
        self._folder = Path(path)
        self._extra, self._cast, self._partial = extra, cast, partial
        self._failure = failure
        self.agreed = False

    def create_local_plan(self) -> Any:
        if self._failure is not None:
            raise _DifferencesError([_said(self._failure)], 1)
        try:
            plan = super().create_local_plan()
        except Exception as error:  # noqa: BLE001  the first of the shapes that differ
            found = self._compare_names() or [_said(error)]
        else:
            found = self._compare_names() + self._compare_coverage(plan)
            found = found or self._compare_bytes(plan)  # last: it takes long
        if found:
            raise _DifferencesError(found[:_SHOWN], len(found))
        return plan

    def finish_plan(self, new_plan: Any) -> Any:
        self.agreed = True  # DCP calls this after the vote
        return super().finish_plan(new_plan)

    def _compare_names(self) -> list[str]:
        saved: Mapping[str, Any] = self.metadata.state_dict_metadata  # type: ignore[union-attr]
        found = []
        for name, value in self.state_dict.items():
            if name not in saved:
                if not self._partial:
                    found.append(f"{name} is not in the checkpoint (partial=True leaves it as is)")
                continue
            entry, is_tensor = saved[name], isinstance(value, torch.Tensor)
            if isinstance(entry, BytesStorageMetadata):
                if is_tensor:
                    found.append(f"{name} is a tensor here and was saved as another object")
            elif not is_tensor and not hasattr(value, "local_shards"):
                found.append(f"{name} is of type {type(value).__name__}, saved was a tensor")
            else:
                if tuple(entry.size) != tuple(value.size()):
                    found.append(
                        f"{name} has shape {tuple(value.size())}, saved was {tuple(entry.size)}"
                    )
                if entry.properties.dtype != value.dtype and not self._cast:
                    found.append(
                        f"{name} is {value.dtype}, saved was {entry.properties.dtype} (cast=True "
                        "converts it)"
                    )
        if not self._extra:
            found += [
                f"{name} is only in the checkpoint ({_hint_for(name)})"
                for name in sorted(set(saved) - set(self.state_dict))
            ]
        return found

    def _compare_coverage(self, plan: Any) -> list[str]:
        """Compare what is read into each local tensor with its size: DCP leaves gaps as they are.

        Saved chunks do not overlap (DCP compares that when it saves), so sizes are enough.
        """
        read: dict[str, int] = {}
        found, places = [], self.metadata.storage_data  # type: ignore[union-attr]
        for item in plan.items:
            if item.storage_index not in places:
                found.append(f"{item.storage_index.fqn} has no place in {METADATA}")
            key = item.dest_index.fqn
            read[key] = read.get(key, 0) + math.prod(item.lengths)
        saved = self.metadata.state_dict_metadata  # type: ignore[union-attr]
        for name, value in self.state_dict.items():
            if name in saved and isinstance(value, torch.Tensor):
                elements, here = read.get(name, 0), _elements_here(value)
                if elements < here:
                    found.append(f"{name} has {here:,} elements here, saved are {elements:,}")
        return found

    def _compare_bytes(self, plan: Any) -> list[str]:
        places = self.metadata.storage_data  # type: ignore[union-attr]
        # An index in the metadata and one in a plan are equal by name and offset.
        items = {item.storage_index: places[item.storage_index] for item in plan.items}
        manifest = manifest_of(self._folder)
        if manifest is None:
            return [fault for fault, _ in item_faults(self._folder, items.items())]
        found = []
        names = {path.name for path in metadata_files(self._folder)}
        for name in sorted(names | {place.relative_path for place in items.values()}):
            fault = manifest_fault(self._folder, name, manifest)
            if fault is not None:
                found.append(with_tensors(self._folder, name, fault, items.items()))
        return found


def _elements_here(value: Any) -> int:
    """Count what this rank has of a tensor: of a ShardedTensor of FSDP1 or a DTensor, its part."""
    if hasattr(value, "local_shards"):
        return sum(each.tensor.numel() for each in value.local_shards())
    return int((value.to_local() if hasattr(value, "to_local") else value).numel())


def _describe(path: str, error: CheckpointException, without: list[bool], agreed: bool) -> str:
    lines, count = [], 0
    for rank, (failure, _) in sorted(error.failures.items()):
        found, number = [_said(failure)], 1
        if without[rank]:
            found = [f"there is no {METADATA}, so it is no checkpoint of DCP"]
        elif isinstance(failure, _DifferencesError):
            found, number = failure.args
        lines += [f"rank {rank}: {each}" for each in found]
        count += number
    unchanged = (
        "a rank failed after all had agreed to load, so tensors may hold parts of the checkpoint"
        if agreed
        else "no tensor has changed on any rank"
    )
    more = f"\n  and {count - _SHOWN} more" if count > _SHOWN else ""
    listed = "\n  ".join(lines[:_SHOWN])
    return f"load_sharded: {path} can't be loaded; {unchanged}.\n  {listed}{more}"


# ---- install("save", "load") ----


def guard_dcp_load(original: Callable[..., None]) -> Callable[..., None]:
    """Compare before ``dcp.load`` copies, as :func:`load_sharded` does, with ``extra=True``.

    To load a part of a checkpoint is what ``dcp.load`` is for, so extra names are no fault.
    """

    def load(state_dict: dict[str, Any], *older: Any, **options: Any) -> None:
        path, planner = _local_path(options, "storage_reader", older), options.get("planner")
        if path is None or (planner is not None and type(planner) is not DefaultLoadPlanner):
            original(state_dict, *older, **options)
        else:
            partial = bool(getattr(planner, "allow_partial_load", False))
            # DCP sets the path of a reader or a writer: that of the caller still follows a link.
            options["storage_reader"] = copy.copy(options.get("storage_reader"))
            allowed = {"extra": True, "cast": False, "partial": partial}
            _load(original, state_dict, path, options, allowed)

    return load


def guard_dcp_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``dcp.save`` replace a checkpoint whole, or say what to type."""

    def save(state_dict: dict[str, Any], *older: Any, **options: Any) -> Any:
        path = _local_path(options, "storage_writer", older)
        if path is None or not _is_written(path, options):
            return original(state_dict, *older, **options)
        link = os.path.abspath(path)
        _require_our_link(path)
        # As many stay as there are, of which dcp.save() would have written over one.
        kept = len(numbers(Path(link))) or None
        with checkpoint_folder(link, keep=kept, group=_group_of(options)) as new:
            writer = copy.copy(options.get("storage_writer"))
            return original(
                state_dict, **{**options, "storage_writer": writer, "checkpoint_id": new}
            )

    return save


def guard_dcp_async_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse at once what the guarded ``dcp.save`` would refuse when nobody looks.

    It runs in another thread, or in another process, in which nothing is guarded.
    """

    def async_save(state_dict: Any, *older: Any, **options: Any) -> Any:
        path = _local_path(options, "storage_writer", older)
        if path is not None and _is_written(path, options):
            kind = getattr(options.get("async_checkpointer_type"), "value", "")
            _require_our_link(path, replaced=kind != "process")
        return original(state_dict, *older, **options)

    return async_save


def _require_our_link(path: str, *, replaced: bool = True) -> None:
    """Raise unless a save to a path makes a new folder, to which a link of ours then leads."""
    is_link = os.path.islink(os.path.abspath(path)) and is_ours(Path(os.path.realpath(path)))
    if not (replaced and is_link):
        raise SaveError(
            f"dcp.save would write over the checkpoint in {path} file by file; a process that is "
            "stopped meanwhile leaves none that can be loaded. Save to a new folder, or type: with "
            "torchguard.checkpoint_folder(link, group=True) as new: "
            "dcp.save(state, checkpoint_id=new)"
        )


def _is_written(path: str, options: Mapping[str, Any]) -> bool:
    """Whether a folder has metadata that this rank would replace.

    With ``use_collectives=False`` each rank has its own, and another one may be ready with it.
    """
    group = _group_of(options)
    rank = 0 if group is None else dist.get_rank(group)
    return any(
        os.path.exists(os.path.join(path, name)) for name in (METADATA, f"__{rank}{METADATA}")
    )


def _local_path(options: Mapping[str, Any], role: str, older: tuple[Any, ...]) -> str | None:
    """Return the folder, if the file system's own writer or reader is used, given by name."""
    storage, path = options.get(role), options.get("checkpoint_id")
    foreign = storage is not None and type(storage) not in {FileSystemReader, FileSystemWriter}
    if foreign or older:
        return None
    path = getattr(storage, "path", None) if path is None else path
    if not isinstance(path, (str, os.PathLike)) or "://" in str(path):
        return None
    return os.fspath(path)


def _hint_for(name: str) -> str:
    """Say what to do about a tensor that the state has no place for."""
    # To leave out the moments of an optimizer that has not stepped yet is no way to resume.
    if re.match(r"optimizers\.\d+\.state\.", name):
        return (
            "an optimizer makes it in its first step: convert the checkpoint by dcp_to_torch_save "
            "of torch.distributed.checkpoint.format_utils, and load that file"
        )
    return "extra=True allows it"
