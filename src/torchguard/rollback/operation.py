"""One call that writes to tensors: what to remember before it, what to undo if it fails."""

from __future__ import annotations

from typing import Any

import torch

from torchguard._torch import (
    call_unrecorded,
    refuses_writes,
    version_of,
    without_torch_function,
)
from torchguard.errors import NonResizableStorageError
from torchguard.rollback.block import Saved, roll_back, save
from torchguard.rollback.interrupts import finish
from torchguard.rollback.metadata import (
    Metadata,
    bytes_needed,
    capture,
    read_stride_and_offset,
    restore,
)
from torchguard.rollback.mutation import Writes, out_tensors, written_tensors
from torchguard.rollback.shared_memory import (
    can_stand_in_for,
    cannot_grow,
    lacks_allocator,
    locked_storage,
    stand_in_for,
)

__all__ = ["Attempt", "undo_in_place", "undo_out"]


class Attempt:
    """What one call writes to.

    Use: call torch with ``*attempt.args, **attempt.kwargs``; on success return
    ``attempt.finish(result)``. On an exception (also one that ``finish`` raises) call
    ``attempt.undo(error)``, twice as interrupts.py says, and then ``attempt.explain(error)``.
    """

    __slots__ = (
        "_calls_back",
        "_in_place",
        "_moved",
        "_out",
        "_stand_ins",
        "_too_small",
        "args",
        "kwargs",
    )

    def __init__(
        self,
        writes: Writes | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        data: bool,
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self._in_place: list[tuple[Saved, bool]] = []
        self._calls_back = writes is not None and writes.calls_back and any(map(callable, args))
        self._out = [save(tensor, data=data) for tensor in out_tensors(writes, kwargs)]
        self._stand_ins: list[tuple[torch.Tensor, Saved]] = []
        self._moved: dict[int, tuple[torch.Tensor, Metadata]] = {}
        self._too_small: NonResizableStorageError | None = None
        if writes is not None:
            for tensor, in_list in written_tensors(writes, args, kwargs):
                # A list is written element by element (_foreach_add_): no shape
                # changes, and reading all of an optimizer's would be slow.
                saved = Saved(tensor, None, None)
                if data or not in_list:
                    saved = save(tensor, data=data, elements=writes.elements)
                self._in_place.append((saved, writes.elements))
        done: list[torch.UntypedStorage] = []
        for _, metadata, *_ in self._out:
            if metadata is None or any(metadata.storage is storage for storage in done):
                continue
            if lacks_allocator(metadata.storage) and not metadata.parts:
                done.append(metadata.storage)
                try:
                    self._begin_shared(metadata)
                except BaseException:
                    self._move_back()
                    raise

    def _begin_shared(self, metadata: Metadata) -> None:
        storage = locked_storage(metadata.storage)
        # Inputs in the same storage move along: torch has to see that they overlap.
        stand_ins: dict[int, torch.Tensor] = {}
        given = self.args, self.kwargs
        self.args, self.kwargs = _move(given, metadata.storage, storage, stand_ins, self._moved)
        for each in self._out:
            if id(each.tensor) in stand_ins:
                self._stand_ins.append((stand_ins[id(each.tensor)], each))
        # Autograd, subclasses and inference mode have to see these tensors themselves, so
        # they view the storage that can't grow for as long as the call takes.
        for tensor, before in self._moved.values():
            if before.storage is metadata.storage:
                restore(tensor, before._replace(storage=storage), version=before.version)

    def finish(self, result: Any) -> Any:
        """Turn the result of a call with stand-ins into that of a call without."""
        if self._moved:
            finish(self._move_back)
        if not self._stand_ins:
            return result
        for stand_in, (tensor, metadata, *_) in self._stand_ins:
            assert metadata is not None
            with without_torch_function():
                if stand_in.shape != metadata.size or stand_in.stride() != metadata.stride:
                    view = stand_in.storage_offset(), stand_in.shape, stand_in.stride()
                    call_unrecorded(tensor, tensor.set_, metadata.storage, *view)
                else:
                    torch.autograd.graph.increment_version(tensor)
        real = {id(stand_in): saved.tensor for stand_in, saved in self._stand_ins}
        if isinstance(result, torch.Tensor):
            return real.get(id(result), result)
        if isinstance(result, (tuple, list)):
            # A named tuple of torch (torch.return_types.max) takes one sequence.
            return type(result)([real.get(id(item), item) for item in result])
        return result

    def _move_back(self) -> None:
        """Let each tensor view its own storage again, with the shape that it has now."""
        for tensor, before in self._moved.values():
            with without_torch_function():
                stride, offset = read_stride_and_offset(tensor)
                now = before._replace(size=tensor.shape, stride=stride, storage_offset=offset)
                version = version_of(tensor)
            restore(tensor, now, version=version)

    def undo(self, error: BaseException) -> None:
        """Put everything back; what may be half-written and has no copy gets a new version."""
        finish(self._undo, self._calls_back or _ran(error))

    def _undo(self, ran: bool) -> None:
        self._note_what_is_too_small()
        for tensor, before in self._moved.values():
            with without_torch_function():
                version = version_of(tensor)
            restore(tensor, before, version=version)
        for saved in reversed(self._out):
            _undo_out(saved, ran)
        for saved, elements in reversed(self._in_place):
            _undo_in_place(saved, ran and elements)

    def _note_what_is_too_small(self) -> None:
        """Make the error for :meth:`explain`, while outputs still have the shape they got."""
        moved = [(tensor, before) for tensor, before in self._moved.values()]
        stand_ins = [(stand_in, saved.metadata) for stand_in, saved in self._stand_ins]
        for tensor, before in (*stand_ins, *moved):
            assert before is not None
            with without_torch_function():
                size, (stride, _) = tensor.shape, read_stride_and_offset(tensor)
                needed = bytes_needed(size, stride, before.storage_offset, tensor.itemsize)
            if needed > before.nbytes and self._too_small is None:
                self._too_small = cannot_grow("out=", before.size, before.storage, needed)

    def explain(self, error: BaseException) -> None:
        """Raise what is to be raised instead of ``error``, if anything."""
        if self._too_small is not None and isinstance(error, Exception):
            raise self._too_small from error


def undo_out(saved: Saved, error: BaseException) -> None:
    """Undo what a call that failed with ``error`` did to its output."""
    finish(_undo_out, saved, _ran(error))


def _undo_out(saved: Saved, ran: bool) -> None:
    tensor, metadata, *_ = saved
    with without_torch_function():
        refused = torch.is_grad_enabled() and tensor.requires_grad
    empty = metadata is not None and 0 in metadata.size
    roll_back(saved, wrote=ran and not empty and not refused)


def undo_in_place(saved: Saved, error: BaseException, *, elements: bool) -> None:
    """Undo what a call that failed with ``error`` did to a tensor it writes in place.

    ``elements`` says whether the operation writes elements at all.
    """
    finish(_undo_in_place, saved, elements and _ran(error))


def _undo_in_place(saved: Saved, wrote: bool) -> None:
    with without_torch_function():
        refused = refuses_writes(saved.tensor)
    roll_back(saved, wrote=wrote and not refused)


def _ran(error: BaseException) -> bool:
    """Whether the operation can have begun.

    torch raises TypeError while it reads the arguments. One that comes from
    Python code below our frame is somebody else's: a callback of ``apply_``.
    (A callback without a frame, ``{}.get``, is why ``Writes`` has ``calls_back``.)
    """
    below = error.__traceback__ and error.__traceback__.tb_next
    return not isinstance(error, TypeError) or below is not None


def _move(
    value: Any,
    storage: torch.UntypedStorage,
    target: torch.UntypedStorage,
    stand_ins: dict[int, torch.Tensor],
    moved: dict[int, tuple[torch.Tensor, Metadata]],
) -> Any:
    """Replace each plain tensor over ``storage`` by the same view of ``target``.

    ``stand_ins`` collects the replacements by the id of what they replace, and ``moved``
    the tensors that nothing can replace.
    """
    if isinstance(value, torch.Tensor):
        metadata = capture(value)
        if metadata is None or metadata.parts or metadata.storage is not storage:
            return value
        if not can_stand_in_for(value):
            moved[id(value)] = value, metadata
            return value
        if id(value) not in stand_ins:
            stand_ins[id(value)] = stand_in_for(value, metadata, target)
        return stand_ins[id(value)]
    if isinstance(value, dict):
        return {
            name: _move(item, storage, target, stand_ins, moved) for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        # A named tuple of torch takes a sequence; as an argument a tuple does as well.
        items = [_move(item, storage, target, stand_ins, moved) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
