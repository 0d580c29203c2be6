"""What a failed operation may have changed about a tensor: read before it, put back after it.

This is the only module that asks for a tensor's layout in order to undo something. A strided
tensor is its metadata: size, strides, storage offset, the storage and how many bytes that holds.
A sparse tensor and a traceable wrapper subclass (DTensor, jagged) are made of other tensors, so
their snapshot is one of each part. An opaque layout (mkldnn, nested, the wrappers of
``torch.func``) has nothing that can be read; only its elements can be copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import has_torch_function_unary

from torchguard._torch import (
    base_of,
    call_unrecorded,
    call_with_grad,
    coo_parts,
    has_own_dispatch,
    inner_tensors,
    set_version,
    version_of,
    without_dispatch_modes,
    without_torch_function,
)
from torchguard.rollback.interrupts import retry_or_warn

# As torch has them, also while install() or guarded() has replaced them: the replacements read the
# tensor first, and what is put back here may be unfit to be read.
original_set_ = torch.Tensor.set_
original_copy_ = torch.Tensor.copy_
original_resize_as_sparse_ = torch.Tensor.resize_as_sparse_

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_POINTERS = (".crow_indices()", ".ccol_indices()")


_new = tuple.__new__


class Snapshot(NamedTuple):
    """A tensor as it was when :func:`capture` read it."""

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
    """What a sparse tensor or a wrapper subclass is made of, by how Python reaches it."""

    assemble: Callable[..., torch.Tensor] | None = None
    """Makes a sparse tensor of its parts."""

    elements: _Elements | None = None
    autograd: _Autograd | None = None

    def restore(self, version: int | None = None) -> None:
        """Put back everything that was captured; the version counter becomes ``version``.

        Without ``version`` the counter is what it was. Where elements were written that were not
        captured, pass a larger number, so that autograd refuses a backward over them.

        Raises nothing of its own, because it runs while another exception propagates: what torch
        refuses becomes a ``RuntimeWarning``. May be called again, also after an interrupt.
        """
        tensor, elements, autograd = self.tensor, self.elements, self.autograd
        version = self.version if version is None else version
        failure = f"torchguard could not put back a tensor of shape {tuple(self.size)}"
        with without_torch_function():
            if autograd is not None:
                retry_or_warn(_restore_kind, tensor, autograd, failure=failure)
            retry_or_warn(_restore_layout, self, version, failure=failure)
            if elements is not None:
                if len(elements.done) > 1 and (version is None or version_of(tensor) != version):
                    elements.done.clear()  # written to since they were put back
                if not elements.done:
                    retry_or_warn(
                        call_unrecorded, tensor, _copy_back, tensor, elements, failure=failure
                    )
            if autograd is not None:
                retry_or_warn(_restore_history, tensor, autograd, failure=failure)
            if version is not None and version_of(tensor) != version:
                retry_or_warn(set_version, tensor, version, failure=failure)
            if elements is not None and len(elements.done) == 1:
                elements.done.append(None)

    def version_after_write(self) -> int | None:
        """Return the version to restore where elements may have been written since."""
        copied = self.elements is not None or (
            self.assemble is not None and all(part.elements is not None for _, part in self.parts)
        )
        with without_torch_function():
            now = version_of(self.tensor)
            if copied or now is None or self.version is None or self.tensor.is_meta:
                return self.version
        return max(now, self.version + 1)


class _Elements(NamedTuple):
    """A copy of a tensor's elements, and how to reach them again."""

    copy: torch.Tensor | torch.UntypedStorage
    """A storage where torch can't clone the tensor: per channel with float zero points."""

    span: tuple[int, int] | None
    """First element and count, for a tensor whose elements overlap (``expand``)."""

    done: list[Any]
    """What has been done to put it back, for an undo that is interrupted and begins again."""


class _Autograd(NamedTuple):
    """What a block of code can change about a tensor, and a single operation can't."""

    requires_grad: bool
    is_leaf: bool
    grad_fn: Any
    alias: torch.Tensor | None
    """A second tensor over the storage. It keeps dtype, device, conj and neg bit."""

    with_history: torch.Tensor | None
    """A clone that leads to ``grad_fn``: copying it in again leads there too."""

    data: bool


def capture(tensor: torch.Tensor, data: bool = False, *, autograd: bool = False) -> Snapshot:
    """Read a tensor, unseen by subclasses and modes, so that it can be restored.

    Without ``data`` it costs about a microsecond and no memory; with it the elements are copied.
    ``autograd`` keeps ``requires_grad``, dtype and device too, which ``x.data = y`` can change, and
    with ``data`` the place in the autograd graph. Nothing is kept of ``.grad`` and hooks.

    Raises:
        torch.OutOfMemoryError: there is no room for the copy; nothing has changed.
    """
    if has_torch_function_unary(tensor):
        with without_torch_function():
            return _capture(tensor, data, autograd)
    return _capture(tensor, data, autograd)


def _capture(tensor: torch.Tensor, data: bool, autograd: bool) -> Snapshot:
    parts = () if type(tensor) is torch.Tensor else _capture_parts(inner_tensors(tensor))
    try:
        storage = tensor.untyped_storage()
        version, size, stride = version_of(tensor), tensor.shape, tensor.stride()
        offset, nbytes = tensor.storage_offset(), storage.nbytes()
        fields = (tensor, version, size, stride, offset, storage, nbytes, parts, None, None, None)
        saved = _new(Snapshot, fields)  # Snapshot(...) would call a __new__ written in Python
    except RuntimeError:  # NotImplementedError included: no storage, or no strides
        saved = Snapshot(tensor, version_of(tensor), parts=parts)
        if not (parts or tensor.is_meta or has_own_dispatch(tensor)):
            with without_dispatch_modes(tensor):
                saved = call_with_grad(False, _capture_sparse, saved, data)
    if data and saved.assemble is None and not tensor.is_meta:
        saved = saved._replace(elements=_copy_elements(tensor))
    return saved._replace(autograd=_capture_autograd(tensor, data)) if autograd else saved


def _capture_parts(
    parts: Iterable[tuple[str, torch.Tensor]], copied: Container[str] = ()
) -> tuple[tuple[str, Snapshot], ...]:
    return tuple((name, _capture(part, name in copied, False)) for name, part in parts)


def _capture_sparse(saved: Snapshot, data: bool) -> Snapshot:
    """Add what a sparse tensor is made of; an opaque one is made of nothing that can be read."""
    # Methods return aliases of the parts, whose sizes a resize of the tensor does not change.
    tensor = saved.tensor
    parts = [(name, part.detach()) for name, part in parts_of(tensor)]
    if not parts:
        return saved
    options: dict[str, Any] = {"size": tensor.shape, "check_invariants": False}
    if tensor.layout is torch.sparse_coo:
        make: Any = partial(torch.sparse_coo_tensor, is_coalesced=tensor.is_coalesced(), **options)
    else:
        make = partial(torch.sparse_compressed_tensor, layout=tensor.layout, **options)
    # torch writes the pointers to rows before it looks at the rest, so they are always copied:
    # one number for each row.
    copied = {name for name, _ in parts if data or name in _POINTERS}
    return saved._replace(size=tensor.shape, parts=_capture_parts(parts, copied), assemble=make)


def parts_of(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that another tensor is made of, each with how Python reaches it."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [(f".{name}", part) for name, part in inner_tensors(tensor)]
    if tensor.layout is torch.sparse_coo:
        indices, values = coo_parts(tensor)
        return [("._indices()", indices), ("._values()", values)]
    names = _COMPRESSED.get(tensor.layout, ())
    return [(f".{name}()", getattr(tensor, name)()) for name in names]


def _copy_elements(tensor: torch.Tensor) -> _Elements:
    """Copy the elements of a tensor, or the memory it lies in where it can't be written to."""
    with without_torch_function(), without_dispatch_modes(tensor):
        if tensor.layout is torch.strided and not tensor.is_nested:
            size, stride = tuple(tensor.shape), tensor.stride()
            if any(step == 0 and length > 1 for step, length in zip(stride, size, strict=True)):
                span = (int(tensor.storage_offset()), bytes_needed(size, stride, 0, 1))
                return _Elements(call_with_grad(False, _stretch(tensor, span).clone), span, [])
        try:
            return _Elements(call_with_grad(False, tensor.clone), None, [])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return _Elements(tensor.untyped_storage().clone(), None, [])


def _stretch(tensor: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
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
        )


# ---- putting it back: each step may be called again after an interrupt ----


def _restore_kind(tensor: torch.Tensor, saved: _Autograd) -> None:
    """Undo ``tensor.data = other`` with another dtype or device, which ``set_`` can't."""
    alias = saved.alias
    if alias is not None and _kind_of(tensor) != _kind_of(alias):
        tensor.data = alias


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


def _restore_layout(saved: Snapshot, version: int | None) -> None:
    tensor = saved.tensor
    for _, part in saved.parts:
        part.restore(None if version == saved.version else version_of(part.tensor))
    if saved.assemble is not None:
        call_unrecorded(tensor, _restore_sparse, tensor, saved)
    elif saved.parts:
        # A wrapper is what its parts are; its own set_ would reach one of them. An operator of
        # the subclass may have given it others.
        for name, part in saved.parts:
            if getattr(tensor, name, None) is not part.tensor:
                with contextlib.suppress(AttributeError):  # computed, and not to be set
                    setattr(tensor, name, part.tensor)
    elif saved.storage is not None and not _is_as_saved(tensor, saved):
        call_unrecorded(tensor, _set_metadata, tensor, saved)


def _restore_sparse(tensor: torch.Tensor, saved: Snapshot) -> None:
    assert saved.assemble is not None
    if tensor.layout is torch.sparse_coo:
        # In detached form, so that this snapshot does not share their sizes with the tensor.
        tensor.data = saved.assemble(*[part.tensor.detach() for _, part in saved.parts])
        return
    # An assignment to .data leaves a compressed tensor's parts as they are: its shallow_copy_from
    # is that of a tensor without parts.
    # https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/SparseCsrTensorImpl.h
    before = saved.assemble(
        *(part.tensor if part.elements is None else part.elements.copy for _, part in saved.parts)
    )
    original_resize_as_sparse_(tensor, before)
    original_copy_(tensor, before)


def _set_metadata(tensor: torch.Tensor, saved: Snapshot) -> None:
    assert saved.storage is not None
    with without_dispatch_modes(tensor):
        # resize_ grows the storage before it looks at the memory format.
        if saved.storage.nbytes() != saved.nbytes:
            saved.storage.resize_(saved.nbytes)
            if _is_as_saved(tensor, saved):
                return
        original_set_(tensor, saved.storage, saved.storage_offset, saved.size, saved.stride)


def _is_as_saved(tensor: torch.Tensor, saved: Snapshot) -> bool:
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


def _copy_back(tensor: torch.Tensor, saved: _Elements) -> None:
    with without_dispatch_modes(tensor):
        target = tensor if saved.span is None else _stretch(tensor, saved.span)
        copy_: Callable[[Any], Any] = partial(original_copy_, target)
        if isinstance(saved.copy, torch.UntypedStorage):
            copy_ = tensor.untyped_storage().copy_
        # Copied and noted without a bytecode in between, so that an interrupt after
        # a copy of gigabytes does not begin another one.
        saved.done.extend(map(copy_, (saved.copy,)))


def _restore_history(tensor: torch.Tensor, saved: _Autograd) -> None:
    if saved.data and tensor.grad_fn is not saved.grad_fn:
        if saved.with_history is not None:
            call_with_grad(True, tensor.copy_, saved.with_history)
        elif base_of(tensor) is None:  # a view can't be detached in place
            tensor.detach_()
    if saved.is_leaf and tensor.is_leaf and tensor.requires_grad != saved.requires_grad:
        tensor.requires_grad_(saved.requires_grad)


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


def bytes_needed(
    size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int, itemsize: int
) -> int:
    """Return the bytes a storage must hold for a strided tensor; 0 without elements."""
    if 0 in size:
        return 0
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return itemsize * (storage_offset + last + 1)
