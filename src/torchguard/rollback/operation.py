"""One operation that writes to tensors: what to read before it, what to undo if it raises.

An ``out=`` operator resizes its output first and computes afterwards, so on storage that can't
grow, and whenever the computation itself fails, ``out`` keeps a shape that is not its own
(https://github.com/pytorch/pytorch/issues/170298). An operator that writes in place may raise
when it has written part of the elements, and then it does not bump their version counter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchguard._torch import (
    call_unrecorded,
    refuses_writes,
    storage_key,
    version_of,
    without_torch_function,
)
from torchguard._torch.mutation import Writes, out_tensors, writes_statistics, written_tensors
from torchguard.errors import NonResizableStorageError
from torchguard.state.interrupts import roll_back
from torchguard.state.tensors import Snapshot, bytes_needed, capture, read_stride_and_offset

_LOCKED: set[int] = set()
"""The keys of storages that stand in for shared ones in the calls that run now."""


class Operation:
    """What one call writes to.

    Use: call torch with ``*operation.args, **operation.kwargs``; on success return
    ``operation.finish(result)``. On an exception (also one that ``finish`` raises) call
    ``operation.undo(error)``, and then ``operation.explain(error)``.
    """

    __slots__ = ("_calls_back", "_in_place", "_locked", "_moved", "_out", "_stand_ins",
                 "_too_small", "args", "kwargs")  # fmt: skip

    def __init__(
        self, writes: Writes | None, args: tuple[Any, ...], kwargs: dict[str, Any], *, data: bool
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self._in_place: list[tuple[torch.Tensor, Snapshot | None, bool]] = []
        self._calls_back = writes is not None and writes.calls_back and any(map(callable, args))
        self._out = [capture(tensor, data) for tensor in out_tensors(writes, kwargs)]
        self._stand_ins: list[tuple[torch.Tensor, Snapshot]] = []
        self._moved: dict[int, Snapshot] = {}
        self._locked: list[torch.UntypedStorage] = []
        self._too_small: NonResizableStorageError | None = None
        if writes is not None:
            for tensor, in_list in written_tensors(writes, args, kwargs):
                # A list is written element by element (_foreach_add_): no shape
                # changes, and reading all of an optimizer's would be slow.
                read = data or not in_list
                saved = capture(tensor, data and writes.elements) if read else None
                self._in_place.append((tensor, saved, writes.elements))
        done: list[torch.UntypedStorage] = []
        for saved in self._out:
            shared = saved.storage
            if shared is None or saved.parts or any(shared is storage for storage in done):
                continue
            if lacks_allocator(shared):
                done.append(shared)
                try:
                    self._begin_shared(shared)
                except BaseException:
                    self._unlock()
                    self._move_back()
                    raise

    def _begin_shared(self, shared: torch.UntypedStorage) -> None:
        storage = _locked_storage(shared)
        self._locked.append(storage)
        _LOCKED.add(storage_key(storage))
        # Inputs in the same storage move along: torch has to see that they overlap.
        stand_ins: dict[int, torch.Tensor] = {}
        given = self.args, self.kwargs
        self.args, self.kwargs = _move(given, shared, storage, stand_ins, self._moved)
        for each in self._out:
            if id(each.tensor) in stand_ins:
                self._stand_ins.append((stand_ins[id(each.tensor)], each))
        # Autograd, subclasses and inference mode have to see these tensors themselves, so
        # they view the storage that can't grow for as long as the call takes.
        for before in self._moved.values():
            if before.storage is shared:
                before._replace(storage=storage).restore()

    def finish(self, result: Any) -> Any:
        """Turn the result of a call with stand-ins into that of a call without."""
        self._unlock()
        if self._moved:
            roll_back(self._move_back)
        if not self._stand_ins:
            return result
        for stand_in, saved in self._stand_ins:
            with without_torch_function():
                if stand_in.shape != saved.size or stand_in.stride() != saved.stride:
                    view = stand_in.storage_offset(), stand_in.shape, stand_in.stride()
                    call_unrecorded(saved.tensor, saved.tensor.set_, saved.storage, *view)
                else:
                    torch.autograd.graph.increment_version(saved.tensor)
        real = {id(stand_in): saved.tensor for stand_in, saved in self._stand_ins}
        if isinstance(result, torch.Tensor):
            return real.get(id(result), result)
        if isinstance(result, (tuple, list)):
            # A named tuple of torch (torch.return_types.max) takes one sequence.
            return type(result)([real.get(id(item), item) for item in result])
        return result

    def _unlock(self) -> None:
        for storage in self._locked:
            _LOCKED.discard(storage_key(storage))

    def _move_back(self) -> None:
        """Let each tensor view its own storage again, with the shape that it has now."""
        for before in self._moved.values():
            tensor = before.tensor
            with without_torch_function():
                stride, offset = read_stride_and_offset(tensor)
                now = before._replace(size=tensor.shape, stride=stride, storage_offset=offset)
                version = version_of(tensor)
            now.restore(version)

    def undo(self, error: BaseException) -> None:
        """Put everything back; what may be half-written and has no copy gets a new version."""
        roll_back(self._undo, self._calls_back or _ran(error))

    def _undo(self, ran: bool) -> None:
        self._note_what_is_too_small()
        self._unlock()
        for before in self._moved.values():
            with without_torch_function():
                version = version_of(before.tensor)
            before.restore(version)
        for saved in reversed(self._out):
            _undo_out(saved, ran)
        for tensor, read, elements in reversed(self._in_place):
            _undo_write(tensor, read, ran and elements)

    def _note_what_is_too_small(self) -> None:
        """Make the error for :meth:`explain`, while outputs still have the shape they got."""
        moved = [(before.tensor, before) for before in self._moved.values()]
        for tensor, before in (*self._stand_ins, *moved):
            assert before.storage is not None
            with without_torch_function():
                size, (stride, _) = tensor.shape, read_stride_and_offset(tensor)
                needed = bytes_needed(size, stride, before.storage_offset, tensor.itemsize)
            if needed > before.nbytes and self._too_small is None:
                self._too_small = cannot_grow("out=", before.size, before.storage, needed)

    def explain(self, error: BaseException) -> None:
        """Raise what is to be raised instead of ``error``, if anything."""
        if self._too_small is not None and isinstance(error, Exception):
            raise self._too_small from error


def guard_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``original``, a builtin with ``out=``, exception-safe where it has an ``out``."""
    tensor_type = torch.Tensor
    # What other code has put around a builtin (a mock, a partial) may have no name.
    statistics = writes_statistics(getattr(original, "__name__", ""))

    def guarded(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return original(*args, **kwargs)
        if type(out) is tensor_type:  # the common case, without the general machinery
            saved = capture(out)
            if saved.storage is not None and not lacks_allocator(saved.storage):
                try:
                    return original(*args, out=out, **kwargs)
                except BaseException as error:
                    undo_out(saved, error)
                    raise
        operation = Operation(statistics, args, {**kwargs, "out": out}, data=False)
        try:
            return operation.finish(original(*operation.args, **operation.kwargs))
        except BaseException as error:
            operation.undo(error)
            operation.explain(error)
            raise

    return guarded


def undo_out(saved: Snapshot, error: BaseException) -> None:
    """Undo what a call that failed with ``error`` did to its output."""
    roll_back(_undo_out, saved, _ran(error))


def _undo_out(saved: Snapshot, ran: bool) -> None:
    if _LOCKED and saved.storage is not None and storage_key(saved.storage) in _LOCKED:
        return  # the guard of install(), inside of a scope's, which undoes the call
    with without_torch_function():
        refused = torch.is_grad_enabled() and saved.tensor.requires_grad
    empty = saved.storage is not None and 0 in saved.size
    wrote = ran and not empty and not refused
    saved.restore(saved.version_after_write() if wrote else None)


def undo_write(
    tensor: torch.Tensor, saved: Snapshot | None, error: BaseException, *, elements: bool = True
) -> None:
    """Undo what a call that failed with ``error`` did to a tensor that it writes in place.

    ``saved`` is None where the call can't change anything but the elements.
    """
    roll_back(_undo_write, tensor, saved, elements and _ran(error))


def _undo_write(tensor: torch.Tensor, saved: Snapshot | None, wrote: bool) -> None:
    with without_torch_function():
        wrote = wrote and not tensor.is_meta and not refuses_writes(tensor)
        if saved is None and wrote and version_of(tensor) is not None:
            torch.autograd.graph.increment_version(tensor)
    if saved is not None:
        saved.restore(saved.version_after_write() if wrote else None)


def _ran(error: BaseException) -> bool:
    """Whether the operation can have begun: torch raises TypeError while it reads the arguments."""
    # One from Python code below our frame comes from a callback of the user's, of apply_. (One
    # without a frame, {}.get, is why Writes has calls_back.)
    below = error.__traceback__ and error.__traceback__.tb_next
    return not isinstance(error, TypeError) or below is not None


def _move(
    value: Any,
    storage: torch.UntypedStorage,
    target: torch.UntypedStorage,
    stand_ins: dict[int, torch.Tensor],
    moved: dict[int, Snapshot],
) -> Any:
    """Replace each plain tensor over ``storage`` by the same view of ``target``.

    ``stand_ins`` collects the replacements by id, and ``moved`` what nothing can replace.
    """
    if isinstance(value, torch.Tensor):
        saved = capture(value)
        if saved.parts or saved.storage is not storage:
            return value
        if not _can_be_replaced(value):
            moved[id(value)] = saved
            return value
        if id(value) not in stand_ins:
            with without_torch_function():
                view = torch.empty(0, dtype=value.dtype, device="cpu")
                view.set_(target, saved.storage_offset, saved.size, saved.stride)
            stand_ins[id(value)] = view
        return stand_ins[id(value)]
    if not isinstance(value, (dict, list, tuple)):
        return value
    inside = value.values() if isinstance(value, dict) else value
    items = [_move(item, storage, target, stand_ins, moved) for item in inside]
    if isinstance(value, dict):
        return dict(zip(value, items, strict=True))
    # A named tuple of torch takes a sequence; as an argument a tuple does as well.
    return items if isinstance(value, list) else tuple(items)


# ---- storage in shared memory ----
#
# torch thinks that it can grow, untyped_storage().resizable() says True, and there is no allocator
# to do it with: torch.ones(4).share_memory_().resize_(1000) calls through a null pointer, and so
# does an out= that has to grow.


def lacks_allocator(storage: torch.UntypedStorage) -> bool:
    """Whether growing this storage would call through a null pointer."""
    # CUDA storage always claims to be shared. A shared file mapping says itself that it can't grow.
    return storage.is_shared() and storage.resizable() and storage.device.type == "cpu"


def cannot_grow(
    operation: str, size: torch.Size, storage: torch.UntypedStorage, needed: int
) -> NonResizableStorageError:
    """Make the error to raise where torch would kill the process."""
    return NonResizableStorageError(
        f"{operation}: the tensor of shape {tuple(size)} would need {needed} bytes, but its "
        f"storage lies in shared memory, holds {storage.nbytes()} bytes and can't grow (torch "
        "would kill the process); for a larger one write "
        "torch.empty(new_size, dtype=tensor.dtype).share_memory_()"
    )


def _can_be_replaced(tensor: torch.Tensor) -> bool:
    """Whether torch does the same with a plain tensor over the same bytes."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    # Autograd and inference mode refuse these; they have to see the tensor itself.
    frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return not (
        tensor.requires_grad or frozen or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    )


def _locked_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage over the same bytes that says it can't grow, so that torch raises."""
    if not storage.nbytes():
        return torch.from_numpy(np.empty(0, dtype=np.uint8)).untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
