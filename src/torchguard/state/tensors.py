"""Tensors: their metadata, their elements, their place in autograd.

:func:`capture` takes a snapshot of one tensor; nothing else reads a tensor's layout in order to
restore it. A strided tensor is its metadata: size, strides, storage offset, the storage and how
many bytes that holds. A traceable wrapper subclass (DTensor, jagged) is made of other tensors, so
its snapshot is one of each part. Of other layouts (sparse, mkldnn, nested, the wrappers of
``torch.func``) only the elements can be copied.

:class:`Elements`, :class:`Metadata` and :class:`Gradients` are snapshots of many tensors at once.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from torchguard._events import warn_user
from torchguard._torch import (
    base_of,
    call_unrecorded,
    call_with_grad,
    has_own_dispatch,
    inner_tensors,
    set_version,
    version_of,
    without_dispatch_modes,
    without_torch_dispatch,
    without_torch_function,
)
from torchguard._torch.eager import (
    LISTED,
    call_unseen,
    concatenated,
    is_wrapped,
    layouts_of,
    same_tensors,
    versions_of,
    write_back,
)
from torchguard.state.process import wait_for

# PyTorch's, also while install() or guarded() has replaced them: the replacements read the tensor
# first, and a tensor that is restored here may be unfit to be read.
original_set_ = torch.Tensor.set_
original_copy_ = torch.Tensor.copy_
original_resize_as_sparse_ = torch.Tensor.resize_as_sparse_

_COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}

_new = tuple.__new__
_NO_COPIES = (None, None, None)  # elements, span, autograd


class Snapshot(NamedTuple):
    """A tensor when :func:`capture` read it."""

    tensor: torch.Tensor
    version: int | None
    """The version counter, which views share; None for an inference tensor, which has none."""

    size: torch.Size = torch.Size()
    stride: tuple[int, ...] = ()
    storage_offset: int = 0
    storage: torch.UntypedStorage | None = None
    """None unless the tensor is strided. Holding it keeps the memory, so ``set_`` can be undone."""

    nbytes: int = 0
    parts: tuple[tuple[str, Snapshot], ...] = ()
    """The tensors that a wrapper subclass is made of, by their names."""

    elements: torch.Tensor | None = None
    span: tuple[int, int] | None = None
    """First element and count of what was copied, if elements overlap (``expand``)."""

    autograd: _Autograd | None = None

    def restore(self, version: int | None = None) -> None:
        """Restore everything that was captured; the version counter becomes ``version``.

        Without ``version`` the counter is restored too. If elements were written that were not
        captured, pass a larger number, so that autograd refuses a backward over them.

        Raises nothing, because it runs while another exception propagates: what PyTorch refuses
        becomes a ``TorchGuardWarning``. May be called again.
        """
        tensor, elements, autograd = self.tensor, self.elements, self.autograd
        version = self.version if version is None else version
        failure = f"could not restore a tensor of shape {tuple(self.size)}"
        attempt = partial(warn_if_refused, failure=failure)
        with without_torch_function():
            if autograd is not None:
                if autograd.cannot_grow and _nbytes(self.storage) < self.nbytes:
                    note_refused(failure, RuntimeError(_LOST))
                    return  # nothing can be read or written there any more
                attempt(_restore_kind, tensor, autograd)
            attempt(_restore_layout, self, version)
            if elements is not None:
                attempt(call_unrecorded, tensor, _restore_elements, tensor, elements, self.span)
            if autograd is not None:
                attempt(_restore_history, tensor, autograd)
            if version is not None and version_of(tensor) != version:
                attempt(set_version, tensor, version)

    def version_after_write(self) -> int | None:
        """Return the version to restore if elements that were not copied may have been written."""
        with without_torch_function():
            now = version_of(self.tensor)
            if now is None or self.version is None or self.tensor.is_meta:
                return self.version
        return max(now, self.version + 1)


class _Autograd(NamedTuple):
    """The part of a tensor that a block of code can change, and a single operation can't."""

    requires_grad: bool
    is_leaf: bool
    grad_fn: Any
    alias: torch.Tensor | None
    """A second tensor over the storage. It keeps dtype, device, conj and neg bit."""

    with_history: torch.Tensor | None
    """A clone that leads to ``grad_fn``: copying it in again leads there too."""

    data: bool
    cannot_grow: bool
    """Whether its storage lacks an allocator: one that was made smaller no longer says so."""


def capture(tensor: torch.Tensor, data: bool = False, *, autograd: bool = False) -> Snapshot:
    """Take a snapshot of a tensor, unseen by subclasses and modes.

    Without ``data`` it costs about a microsecond and no memory; with it the elements are copied.
    ``autograd`` keeps ``requires_grad``, dtype and device too, which ``x.data = y`` can change, and
    with ``data`` the place in the autograd graph. Nothing is kept of ``.grad`` and hooks.

    Raises:
        torch.OutOfMemoryError: the copy does not fit into memory; nothing has changed.
    """
    if has_torch_function_unary(tensor):
        with without_torch_function():
            return _capture(tensor, data, autograd)
    return _capture(tensor, data, autograd)


def _capture(tensor: torch.Tensor, data: bool, autograd: bool) -> Snapshot:
    held = () if type(tensor) is torch.Tensor else inner_tensors(tensor)
    parts = tuple((name, _capture(part, False, False)) for name, part in held)
    try:
        storage = tensor.untyped_storage()
        version, size, stride = version_of(tensor), tensor.shape, tensor.stride()
        offset, nbytes = tensor.storage_offset(), storage.nbytes()
        fields = (tensor, version, size, stride, offset, storage, nbytes, parts, *_NO_COPIES)
        saved = _new(Snapshot, fields)  # Snapshot(...) would call a __new__ written in Python
    except RuntimeError:  # NotImplementedError included: no storage, or no strides
        saved = Snapshot(tensor, version_of(tensor), parts=parts)
    if data and not tensor.is_meta:
        elements, span = _copy_elements(tensor)
        saved = saved._replace(elements=elements, span=span)
    return saved._replace(autograd=_capture_autograd(tensor, data)) if autograd else saved


def _copy_elements(tensor: torch.Tensor) -> tuple[Tensor, tuple[int, int] | None]:
    """Copy the elements of a tensor, or the span that it lies in if it can't be written to."""
    with without_torch_function(), without_dispatch_modes(tensor):
        if tensor.layout is torch.strided and not tensor.is_nested:
            size, stride = tuple(tensor.shape), tensor.stride()
            if any(step == 0 and length > 1 for step, length in zip(stride, size, strict=True)):
                span = (int(tensor.storage_offset()), extent(size, stride))
                return call_with_grad(False, _stretch(tensor, span).clone), span
        return call_with_grad(False, tensor.clone), None


def _stretch(tensor: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    """Return the memory from the first to the last element as a tensor of one dimension."""
    offset, length = span
    return tensor.detach().as_strided((length,), (1,), offset)


def _capture_autograd(tensor: torch.Tensor, data: bool) -> _Autograd:
    with without_torch_function(), without_dispatch_modes(tensor):
        plain = tensor.layout is torch.strided and not has_own_dispatch(tensor)
        return _Autograd(
            tensor.requires_grad,
            tensor.is_leaf,
            tensor.grad_fn,
            tensor.data if plain else None,
            tensor.clone() if data and tensor.grad_fn is not None else None,
            data,
            plain and lacks_allocator(tensor.untyped_storage()),
        )


# ---- restore one tensor ----


def lacks_allocator(storage: torch.UntypedStorage) -> bool:
    """Whether growing this storage would call through a null pointer: it lies in shared memory.

    PyTorch thinks that it can grow, and ``resizable()`` says so, but there is no allocator:
    ``torch.ones(4).share_memory_().resize_(1000)`` ends the process.
    """
    # CUDA storage always claims to be shared. A shared file mapping says itself that it can't grow.
    return storage.is_shared() and storage.resizable() and storage.device.type == "cpu"


_LOST = "its storage lay in shared memory, was made smaller, and can't grow again"


def _nbytes(storage: torch.UntypedStorage | None) -> int:
    return 0 if storage is None else storage.nbytes()


def _restore_kind(tensor: torch.Tensor, saved: _Autograd) -> None:
    """Undo ``tensor.data = other`` with another dtype or device, which ``set_`` can't."""
    alias = saved.alias
    if alias is not None and _kind_of(tensor) != _kind_of(alias):
        tensor.data = alias


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what ``set_`` can't change, and ``x.data = y`` can."""
    return tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


def _restore_layout(saved: Snapshot, version: int | None) -> None:
    """Restore size, strides and storage, or the parts that the tensor is made of."""
    tensor = saved.tensor
    for _, part in saved.parts:
        part.restore(None if version == saved.version else version_of(part.tensor))
    if saved.parts:
        # A wrapper is what its parts are; its own set_ would reach one of them. An operator of
        # the subclass may have given it others.
        for name, part in saved.parts:
            if getattr(tensor, name, None) is not part.tensor:
                with contextlib.suppress(AttributeError):  # computed, and not to be set
                    setattr(tensor, name, part.tensor)
    elif saved.storage is not None and not _is_as_saved(tensor, saved):
        call_unrecorded(tensor, _set_metadata, tensor, saved)


def _set_metadata(tensor: torch.Tensor, saved: Snapshot) -> None:
    """Let a strided tensor have its storage again, of the same number of bytes."""
    assert saved.storage is not None
    with without_dispatch_modes(tensor):
        # resize_ grows the storage before it looks at the memory format.
        if saved.storage.nbytes() != saved.nbytes:
            saved.storage.resize_(saved.nbytes)
            if _is_as_saved(tensor, saved):
                return
        original_set_(tensor, saved.storage, saved.storage_offset, saved.size, saved.stride)


def _is_as_saved(tensor: torch.Tensor, saved: Snapshot) -> bool:
    """Whether size, strides, offset and storage are those that were captured."""
    try:
        if tensor.shape != saved.size:
            return False
        storage = tensor.untyped_storage()
        return (
            read_stride_and_offset(tensor) == (saved.stride, saved.storage_offset)
            and storage is saved.storage
            and storage.nbytes() == saved.nbytes
        )
    except RuntimeError:  # NotImplementedError included: no storage, or no strides
        return False


def _restore_elements(tensor: Tensor, elements: Tensor, span: tuple[int, int] | None) -> None:
    with without_dispatch_modes(tensor):
        if tensor.layout in _COMPRESSED:
            original_resize_as_sparse_(tensor, elements)
        original_copy_(tensor if span is None else _stretch(tensor, span), elements)


def _restore_history(tensor: torch.Tensor, saved: _Autograd) -> None:
    """Restore the place in the autograd graph, and ``requires_grad`` of a leaf."""
    if saved.data and tensor.grad_fn is not saved.grad_fn:
        if saved.with_history is not None:
            call_with_grad(True, tensor.copy_, saved.with_history)
        elif base_of(tensor) is None:  # a view can't be detached in place
            tensor.detach_()
    if saved.is_leaf and tensor.is_leaf and tensor.requires_grad != saved.requires_grad:
        tensor.requires_grad_(saved.requires_grad)


# ---- a restoration that is refused ----


_failures: ContextVar[list[str] | None] = ContextVar("torchguard.state.failures", default=None)


@contextlib.contextmanager
def failures_in(found: list[str]) -> Iterator[None]:
    """Let :func:`note_refused` append what it would warn of, in this thread or task."""
    token = _failures.set(found)
    try:
        yield
    finally:
        _failures.reset(token)


def note_refused(failure: str, error: Exception) -> None:
    """Say which step of a rollback has failed: the program's own exception is the one to raise."""
    found = _failures.get()
    if found is None:
        warn_user("not-restored", f"{failure}: {error}")
    else:
        found.append(f"{failure}: {error}")


def warn_if_refused(step: Callable[..., None], *args: Any, failure: str) -> None:
    """Call ``step(*args)``, and note its exception: the other steps are taken all the same."""
    try:
        step(*args)
    except Exception as error:  # noqa: BLE001  see above
        note_refused(failure, error)


# ---- numbers of a tensor that may be inconsistent ----


def read_stride_and_offset(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """``tensor.stride(), tensor.storage_offset()`` of a tensor that may be inconsistent."""
    # A resize_ that fails with "Stride calculation overflowed" leaves negative strides. The methods
    # take some for the address of a symbolic number, which ends the process; operators do not.
    if has_own_dispatch(tensor):
        return tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]  # symbolic
    with without_dispatch_modes(tensor):
        stride = tuple(torch.ops.aten.stride.default(tensor))
        # Without autograd's keys, as in inference mode, the operator resolves a lazy conjugation
        # or negation first, and gives the offset of that copy.
        # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/ConjugateFallback.cpp
        lazy = tensor.is_conj() or tensor.is_neg()
        read: Any = torch.Tensor.storage_offset if lazy else torch.ops.aten.storage_offset.default
        return stride, read(tensor)


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last of a strided tensor, both counted."""
    if 0 in size:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def bytes_needed(
    size: Sequence[int], stride: Sequence[int], storage_offset: int, itemsize: int
) -> int:
    """Return the bytes a storage must hold for a strided tensor; 0 without elements."""
    return 0 if 0 in size else itemsize * (storage_offset + extent(size, stride))


# ---- many tensors at once ----

# In C, as map() is: half of a loop's time.
_data_ptr = Tensor.data_ptr
_is_cpu, _is_leaf, _grad = map(operator.attrgetter, ("is_cpu", "is_leaf", "grad"))


class Bulk:
    """The memory of many tensors, copied by one call for each device and dtype.

    The tensors are those of :func:`fills_its_memory`. What leads to their memory is made once, and
    is good as long as :meth:`is_current`.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self._have_layouts = layouts_of(self.tensors)
        flats = [call_unseen(_flat, each) for each in self.tensors]
        pairs = list(zip(self.tensors, flats, strict=True))
        # A tensor that is flat goes with its own memory; of the others there are views.
        self._viewed = [tensor for tensor, flat in pairs if flat is not tensor]
        self._aliases = [call_unseen(Tensor.detach, each) for each in self._viewed]
        self._pointers = list(map(_data_ptr, self._viewed))
        self._owners, self._flats = _packed([(t, flat) for t, flat in pairs if flat.numel()])

    def is_current(self) -> bool:
        """Whether the tensors have the same layouts, and those of views the same memory."""
        return self._have_layouts() and list(map(_data_ptr, self._viewed)) == self._pointers

    def copy(self, memory: list[Tensor] | None = None) -> list[Tensor]:
        """Copy the tensors, into the memory of earlier copies if there are any."""
        try:
            copies = concatenated(self._flats, memory)
        # On a device that holds the parameters, their gradients and two moments, there may be no
        # room.
        except torch.OutOfMemoryError:
            copies = concatenated(self._flats, list(map(_on_the_host, self._flats)))
        pairs = zip(self._flats, copies, strict=True)
        if any(copied.is_cpu and not flats[0].is_cpu for flats, copied in pairs):
            wait_for(self.tensors)
        return copies

    def restore(self, copies: list[Tensor]) -> None:
        """Write copies into the same tensors, which have their memory and their layouts again."""
        if not self.is_current():  # x.data = y, in a step that is rolled back
            for tensor, alias in zip(self._viewed, self._aliases, strict=True):
                tensor.data = alias
        for flat in (each for flats in self._flats for each in flats):
            end = flat.storage_offset() + flat.numel()
            if flat.untyped_storage().nbytes() < flat.itemsize * end:
                raise RuntimeError("a storage was made smaller than the tensor in it")
        write_back(self._flats, copies)

    def differing(self, copies: list[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors whose elements are not those of the copies."""
        for owners, flats, copied in zip(self._owners, self._flats, copies, strict=True):
            parts = copied.to(flats[0].device).split(list(map(Tensor.numel, flats)))
            for owner, flat, part in zip(owners, flats, parts, strict=True):
                if not call_unseen(torch.equal, flat, part):
                    yield owner


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether a plain tensor is all that lies between its first and its last element."""
    return (
        is_plain(tensor)
        and not is_wrapped(tensor)
        and extent(tensor.shape, tensor.stride()) == tensor.numel()
    )


def _flat(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor in one dimension: the tensor itself if it has no other."""
    if tensor.dim() == 1 and tensor.stride() == (1,) and tensor.dtype in LISTED:
        return tensor
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat if flat.dtype in LISTED else flat.view(torch.uint8)


# A CPU concatenates tensors at the price of one, in one thread, below what it splits among threads.
# https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/TensorShape.cpp
_MOST_ON_A_CPU = 32768
_MOST_ON_A_DEVICE = 2**28  # so that memory in pieces is enough, and 32 bits are for an index


def _packed(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Put tensors and their flat views into lists of one device and dtype: large ones alone."""
    owners: list[list[Tensor]] = []
    lists: list[list[Tensor]] = []
    last: dict[Any, tuple[int, int]] = {}  # where the last list is, and how much more it takes
    for owner, flat in pairs:
        kind, size = (flat.device, flat.dtype), flat.numel()
        most = _MOST_ON_A_CPU if flat.is_cpu else _MOST_ON_A_DEVICE
        index, room = last.get(kind, (0, 0))
        is_small = size < most // 4
        if not is_small or size >= room:
            index, room = len(lists), most
            owners.append([])
            lists.append([])
        owners[index].append(owner)
        lists[index].append(flat)
        if is_small:
            last[kind] = index, room - size
    return owners, lists


def _on_the_host(flats: list[Tensor]) -> Tensor:
    size, dtype = sum(map(Tensor.numel, flats)), flats[0].dtype
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=not flats[0].is_cpu)


class Elements:
    """A snapshot of the elements of many tensors, copied in bulk, on their device.

    Fresh memory of a CPU is slow to write, so the copies of an earlier snapshot can be written
    again. If the memory of a device is full, the copies are on the host, and stay there.

    Args:
        tensors: which tensors; each is copied once.
        reuse: an earlier snapshot of the same tensors, which is not needed any more.
        counted: those whose version counters are restored, too; by default all.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        reuse: Elements | None = None,
        *,
        counted: list[Tensor] | None = None,
    ) -> None:
        self._given = list(tensors)
        self._bulk: Bulk
        self._others: list[Tensor]
        memory: list[Tensor] | None = None
        if reuse is not None and reuse._is_of(self._given):
            self._bulk, self._others, memory = reuse._bulk, reuse._others, reuse._copies
        else:
            plain, self._others = parted(self._given, fills_its_memory)
            self._bulk = Bulk(plain)
        self._saved = [capture(each, data=True) for each in self._others]
        self._counted = self._bulk.tensors if counted is None else counted
        self._versions = versions_of(self._counted)
        self._copies: list[Tensor] | None = self._bulk.copy(memory)

    def _is_of(self, tensors: list[Tensor]) -> bool:
        """Whether this is of the same tensors in the same memory: to part them takes longer."""
        return same_tensors(tensors, self._given) and self._bulk.is_current()

    def restore(self) -> None:
        """Write the elements into the same tensors, and restore their version counters."""
        if self._copies is not None:
            self._bulk.restore(self._copies)
        restore_versions(self._counted, self._versions)
        for saved in self._saved:
            saved.restore()

    def differing(self) -> set[int]:
        """Return the ids of the tensors whose elements are others now."""
        return set(map(id, self._bulk.differing(self._copies or [])))

    def for_reuse(self) -> Elements:
        """Let go of copies on a device, whose allocator gives the same memory again."""
        self._saved = []
        if not all(map(_is_cpu, self._copies or [])):
            self._copies = None
        return self


class Metadata:
    """A snapshot of the metadata of many tensors; it is kept as long as it is current."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._snapshots = [capture(each, autograd=True) for each in self.tensors]
        # x.data = y, which model.to() does, leaves the tensor the same object and does not move
        # its version counter, so the addresses are compared.
        # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
        self._pointers = list(map(_data_ptr, self.tensors))
        # The same memory may be seen in another way: x.data = x.data.t().
        self._have_layouts = layouts_of(self.tensors)

    def is_current(self) -> bool:
        """Whether the tensors have the same memory and layout as when this was made."""
        return list(map(_data_ptr, self.tensors)) == self._pointers and self._have_layouts()

    def restore(self, versions: Iterable[int | None]) -> None:
        """Restore layouts, storages and flags; the version counters become ``versions``."""
        for snapshot, version in zip(self._snapshots, versions, strict=True):
            snapshot.restore(version)


class Gradients:
    """A snapshot of which gradient each leaf has, and with ``data`` of its elements."""

    def __init__(
        self, tensors: Iterable[Tensor], *, data: bool = False, are_leaves: bool = False
    ) -> None:
        self._leaves = list(tensors if are_leaves else filter(_is_leaf, tensors))
        self._gradients = list(map(_grad, self._leaves))
        self.present = [each for each in self._gradients if each is not None]
        self._elements = Elements(self.present) if data and self.present else None

    def restore(self) -> None:
        """Give each leaf its gradient again."""
        for tensor, gradient in zip(self._leaves, self._gradients, strict=True):
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient
        if self._elements is not None:
            self._elements.restore()


def parted(
    tensors: Iterable[Tensor], condition: Callable[[Tensor], bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that fulfil a condition, and the others; each tensor once."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for tensor in {id(each): each for each in tensors}.values():
        parts[0 if condition(tensor) else 1].append(tensor)
    return parts


def is_plain(tensor: Tensor) -> bool:
    """Whether ``empty_like`` and ``copy_`` keep every bit of it, and it may be written in place."""
    return (
        tensor.layout is torch.strided
        and not has_own_dispatch(tensor)
        and not tensor.is_inference()
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        # An expanded tensor refuses to be written: several of its elements are one.
        and not any(
            step == 0 < size - 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )


def refuse_sparse(function: str, found: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if there is a sparse tensor among those that are to be restored, each with its name."""
    for name, tensor in found:
        if tensor.layout is torch.sparse_coo or tensor.layout in _COMPRESSED:
            raise TypeError(
                f"{function}: {name} is a sparse tensor ({tensor.layout}), and those are not "
                "restored: make it dense (to_dense()), or, if nothing writes to it, hold it in a "
                "plain attribute that is no buffer, or outside of what you give here"
            )


def restore_versions(tensors: Sequence[Tensor], versions: Sequence[int | None]) -> None:
    """Restore version counters, so that autograd does not see writes that were rolled back."""
    for tensor, before, now in zip(tensors, versions, versions_of(list(tensors)), strict=True):
        if before is not None and before != now:
            set_version(tensor, before)


# ---- can this torch do it? ----


def _what_is_not_restored() -> str | None:
    """Write to a tensor and restore it; say what this release does not restore, or None."""
    with torch.inference_mode(False), without_torch_function(), without_torch_dispatch():
        tensor = torch.zeros(2, device="cpu", dtype=torch.float64)
        try:
            saved = capture(tensor, data=True)
            tensor.fill_(1.0).resize_(4)
            saved.restore()
            if tuple(tensor.shape) != (2,) or tensor.any():
                return "its shape and elements"
            if saved.version is None or version_of(tensor) != saved.version:
                return "its version counter"
        except Exception as error:  # noqa: BLE001  a name that is gone may raise anything
            return f"it ({type(error).__name__}: {error})"
        return None


if (_reason := _what_is_not_restored()) is not None:
    warn_user(
        "tensors-are-not-protected",
        f"on torch {torch.__version__} a tensor can't be restored after a failure: "
        f"{_reason}. What restores tensors (safe_resize_, rollback_on_error, transaction and "
        "others) does not protect them",
    )
