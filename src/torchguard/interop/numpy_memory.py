"""Memory that torch shares with numpy's arrays, with buffers and with other processes.

torch has no read-only tensors, so ``from_numpy`` and the others drop the flag with a warning
(https://github.com/pytorch/pytorch/issues/46741, https://github.com/pytorch/pytorch/issues/5442).
``frombuffer`` does not keep the buffer open. ``share_memory_`` frees the memory that an array
made by ``t.numpy()`` points at (https://github.com/pytorch/pytorch/issues/51849).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from torchguard._events import record, warn_user
from torchguard._torch import patch, storage_key, without_torch_function
from torchguard.errors import ReadOnlyMemoryError, SharedViewError
from torchguard.state.tensors import extent

# ---- from memory of others to a tensor ----


def _copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy an array, and of a view with more elements than memory the memory alone."""
    record("copied_on_write", "numpy", "a read-only array was copied")
    if not array.flags.forc:  # contiguous
        strides, size = array.strides, array.itemsize
        span = 1 + (extent(array.shape, strides) - 1) // size
        # torch takes no other strides.
        if span < array.size and all(stride >= 0 and stride % size == 0 for stride in strides):
            memory = as_strided(array, (span,), (size,)).copy()
            return as_strided(memory, array.shape, strides)
    return array.copy(order="K")


def _guard_array(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard a function whose first argument may be an array: from_numpy, as_tensor, from_dlpack."""
    array_type = np.ndarray
    keyword = "ext_tensor" if original.__name__ == "from_dlpack" else "data"

    def guarded(*args: Any, **options: Any) -> Any:
        data = args[0] if args else options.get(keyword)
        if isinstance(data, array_type) and not data.flags.writeable:
            copied = _copy(data)
            if args:
                args = (copied, *args[1:])
            else:
                options[keyword] = copied
        return original(*args, **options)

    return guarded


def _guard_asarray(original: Callable[..., Any]) -> Callable[..., Any]:
    array_type = np.ndarray
    copied_by_torch = (torch.Tensor, np.generic)  # a scalar of numpy is a read-only buffer as well

    def asarray(obj: Any, **options: Any) -> Any:
        if isinstance(obj, copied_by_torch):
            return original(obj, **options)
        is_array = isinstance(obj, array_type)
        if obj.flags.writeable if is_array else not _is_read_only_buffer(obj):
            return original(obj, **options)
        if options.get("copy") is False:
            raise ReadOnlyMemoryError(
                "asarray: the memory is read-only, and a tensor can always be written to; leave "
                "copy=False out, or pass a copy"
            )
        if is_array:
            return original(_copy(obj), **options)
        if hasattr(obj, "__dlpack__"):  # torch asks for it first, and does not warn
            return original(obj, **{**options, "copy": True})
        return original(_writable_copy(obj), **options)

    return asarray


def _is_read_only_buffer(obj: Any) -> bool:
    try:
        with memoryview(obj) as view:
            return view.readonly
    except (TypeError, BufferError, ValueError):  # a number, a list, memory of a GPU, closed
        return False


def _guard_frombuffer(original: Callable[..., Any]) -> Callable[..., Any]:
    def frombuffer(buffer: Any, **options: Any) -> Any:
        try:
            # torch releases the buffer at once and keeps the object: this one holds an export.
            view = memoryview(buffer)
        except (TypeError, ValueError):
            if not isinstance(buffer, np.ndarray):
                return original(buffer, **options)  # which says so
            view = np.asarray(buffer).view(f"V{buffer.itemsize}").data  # datetime64 has no format
        if not view.readonly:
            return original(view, **options)
        count, offset = options.get("count", -1), options.get("offset", 0)
        try:
            # Of a large file that is mapped, only the bytes that the tensor has.
            part = np.frombuffer(view, f"V{options['dtype'].itemsize}", count, offset)
        except (LookupError, AttributeError, TypeError, ValueError, OverflowError, BufferError):
            part = np.empty(0)  # torch says so, or takes what numpy does not
        if part.size:
            return original(_writable_copy(part), **{**options, "offset": 0})
        return original(_writable_copy(view), **options)

    return frombuffer


def _writable_copy(buffer: Any) -> Any:
    """Return a copy that torch may look at: of a read-only buffer it warns, copied or not."""
    record("copied_on_write", "numpy", "a read-only buffer was copied")
    with memoryview(buffer) as view:
        # torch refuses another order of the elements, and says so.
        return bytearray(view) if view.c_contiguous else buffer


_CONVERSIONS: dict[str, Callable[..., Callable[..., Any]]] = {
    "torch.from_numpy": _guard_array,
    "torch.as_tensor": _guard_array,
    "torch.from_dlpack": _guard_array,
    "torch.utils.dlpack.from_dlpack": _guard_array,
    "torch.asarray": _guard_asarray,
    "torch.frombuffer": _guard_frombuffer,
}


# ---- arrays that view a tensor's memory ----

# By storage: the arrays that t.numpy() has made, and copies that were sent to other processes
# in the storage's place, kept as long as an array lives.
_viewed: dict[int, tuple[dict[int, weakref.ref[Any]], list[torch.Tensor]]] = {}


def _guard_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    array_type = np.ndarray

    def numpy(self: torch.Tensor, **options: Any) -> Any:
        array = original(self, **options)
        owner = getattr(array, "base", None)  # a copy has another one than the tensor
        while isinstance(owner, array_type):  # a subclass of Tensor may return a part
            owner = owner.base
        if isinstance(owner, torch.Tensor) and array.nbytes:
            with without_torch_function():
                key = storage_key(owner.untyped_storage())
            _note(key, array)
        return array

    return numpy


def _note(key: int, array: np.ndarray[Any, Any]) -> None:
    def forget(reference: weakref.ref[Any]) -> None:
        arrays.pop(id(reference))
        if not arrays and _viewed.get(key, (None,))[0] is arrays:
            del _viewed[key]

    arrays, _ = _viewed.setdefault(key, ({}, []))
    reference = weakref.ref(array, forget)
    arrays[id(reference)] = reference


def _guard_share_memory_(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard ``torch.UntypedStorage.share_memory_``, which every other way in ends at."""

    def share_memory_(self: Any, *args: Any, **options: Any) -> Any:
        if storage_key(self) in _viewed and not self.is_shared():
            raise SharedViewError(
                "share_memory_: a numpy array is a view of this memory, which would be freed; "
                "call share_memory_() before numpy(), or keep numpy().copy()"
            )
        return original(self, *args, **options)

    return share_memory_


def _guard_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Guard what pickles a tensor for a queue or a spawned process, which moves its memory."""

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        viewed = None
        if _viewed and tensor.layout is torch.strided and not tensor.is_shared():
            viewed = _viewed.get(storage_key(tensor.untyped_storage()))
        if viewed is None or (tensor.requires_grad and not tensor.is_leaf):  # that one raises
            return original(tensor)
        what = "a tensor that numpy looks at was sent as a copy"
        record("copied_on_write", "numpy", what, is_said=True)
        warn_user(
            "copied-on-write",
            "a tensor was sent to another process as a copy, because a numpy array is a view of "
            "its memory: neither process sees what the other one writes. Call share_memory_() "
            "before numpy() to share it",
        )
        copy = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
        viewed[1].append(copy)  # a spawned process takes it up later
        return original(copy.requires_grad_(tensor.requires_grad))

    return reduce_tensor


def replacements() -> dict[str, patch.Make]:
    """Return what ``install("numpy")`` patches."""
    return {
        **_CONVERSIONS,
        "torch.Tensor.numpy": _guard_numpy,
        "torch.UntypedStorage.share_memory_": _guard_share_memory_,
        "torch.multiprocessing.reductions.reduce_tensor": _guard_reduce,
    }


def changed() -> None:
    """Let multiprocessing, which has its own table, pickle tensors with what torch has now.

    https://github.com/python/cpython/blob/main/Lib/multiprocessing/reduction.py
    """
    now = getattr(torch.multiprocessing.reductions, "reduce_tensor", None)
    if now is None:
        return
    for kind, reduce in list(ForkingPickler._extra_reducers.items()):  # type: ignore[attr-defined]
        if reduce is not now and reduce == now:  # one of them replaces the other
            ForkingPickler.register(kind, now)
