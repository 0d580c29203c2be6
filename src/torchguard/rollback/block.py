"""Tensors that come back as they were when an operation, or a block of code, fails."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import torch

from torchguard._torch import (
    call_unrecorded,
    call_with_grad,
    has_own_dispatch,
    is_view,
    set_version,
    version_of,
    without_dispatch_modes,
    without_torch_function,
)
from torchguard.rollback.compressed import (
    COMPRESSED,
    Compressed,
    capture_compressed,
    restore_compressed,
    torchs_copy_,
    torchs_resize_as_sparse_,
)
from torchguard.rollback.interrupts import finish, persist
from torchguard.rollback.metadata import Metadata, bytes_needed, capture, restore

__all__ = ["Saved", "roll_back", "rollback_on_error", "save"]


class _Data(NamedTuple):
    """A copy of a tensor's elements, and how to reach them again."""

    copy: torch.Tensor | torch.UntypedStorage
    """A storage where torch can't clone the tensor: per channel with float zero points."""

    span: tuple[int, int] | None
    """First element and count, for a tensor whose elements overlap (``expand``)."""

    version: int | None

    put_back: list[Any]
    """Not empty once the copy is back, for an undo that is interrupted and begins again."""


class Saved(NamedTuple):
    """What it takes to undo whatever happens to one tensor."""

    tensor: torch.Tensor
    metadata: Metadata | None
    data: _Data | None
    compressed: Compressed | None = None
    """In place of metadata and data, for a sparse compressed tensor."""


def save(tensor: torch.Tensor, *, data: bool, elements: bool = True) -> Saved:
    """Read a tensor's metadata and, with ``data``, copy its elements.

    Not ``elements`` says that nothing writes them: where there is metadata, that is enough.
    """
    metadata = capture(tensor)
    data = data and (elements or metadata is None)
    compressed = None if data or metadata is not None else capture_compressed(tensor)
    return Saved(tensor, metadata, _copy(tensor) if data else None, compressed)


def roll_back(saved: Saved, *, wrote: bool) -> None:
    """Undo what happened to a tensor since :func:`save`.

    ``wrote`` says that elements may have been overwritten. Unless a copy of them
    is put back, the version counter then moves on, so that autograd refuses a
    backward over the spoiled values instead of computing a wrong gradient.
    """
    tensor, metadata, data, _ = saved
    with without_torch_function():
        version = version_of(tensor)
        wrote = wrote and not tensor.is_meta  # which has no elements
    if metadata is None:
        _roll_back_other_layout(saved, version, wrote=wrote)
        return
    if data is None and wrote and version is not None and metadata.version is not None:
        restore(tensor, metadata, version=max(version, metadata.version + 1))
        return
    restore(tensor, metadata, version=metadata.version)
    if data is not None:
        _put_back(tensor, data)
        restore(tensor, metadata, version=metadata.version)


def _roll_back_other_layout(saved: Saved, version: int | None, *, wrote: bool) -> None:
    """Do the same for a tensor without metadata: sparse, mkldnn, nested."""
    tensor, _, data, compressed = saved
    if compressed is not None:
        if wrote and version is not None and compressed.version is not None:
            compressed = compressed._replace(version=max(version, compressed.version + 1))
        restore_compressed(tensor, compressed)
    elif data is not None:
        _put_back(tensor, data)
        if data.version is not None:
            with without_torch_function():
                set_version(tensor, data.version)
    elif wrote and version is not None:
        torch.autograd.graph.increment_version(tensor)


def _copy(tensor: torch.Tensor) -> _Data | None:
    """Copy the elements of a tensor; None where it has no memory.

    A tensor with repeated elements refuses to be written to, so for that one the
    stretch of memory it lies in is copied instead.
    """
    with without_torch_function(), without_dispatch_modes(tensor):
        if tensor.is_meta:
            return None
        if tensor.layout is torch.strided and not tensor.is_nested:
            size, stride = tuple(tensor.shape), tensor.stride()
            if any(step == 0 and length > 1 for step, length in zip(stride, size, strict=True)):
                span = (int(tensor.storage_offset()), bytes_needed(size, stride, 0, 1))
                copy = call_with_grad(False, _stretch(tensor, span).clone)
                return _Data(copy, span, version_of(tensor), [])
        try:
            copy = call_with_grad(False, tensor.clone)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            copy = tensor.untyped_storage().clone()
        return _Data(copy, None, version_of(tensor), [])


def _put_back(tensor: torch.Tensor, data: _Data) -> None:
    if not data.put_back:
        failure = "torchguard could not put back the elements of a tensor after a failed operation"
        with without_torch_function(), without_dispatch_modes(tensor):
            persist(call_unrecorded, tensor, _copy_back, tensor, data, failure=failure)


def _copy_back(tensor: torch.Tensor, data: _Data) -> None:
    target = tensor if data.span is None else _stretch(tensor, data.span)
    copy_: Callable[[Any], Any] = functools.partial(torchs_copy_, target)
    if isinstance(data.copy, torch.UntypedStorage):
        copy_ = tensor.untyped_storage().copy_
    elif tensor.layout in COMPRESSED:  # copy_ wants as many elements as there are
        torchs_resize_as_sparse_(tensor, data.copy)
    # Copied and noted without a bytecode in between, so that an interrupt after
    # a copy of gigabytes does not begin another one.
    data.put_back.extend(map(copy_, (data.copy,)))


def _stretch(tensor: torch.Tensor, span: tuple[int, int]) -> torch.Tensor:
    offset, length = span
    return tensor.detach().as_strided((length,), (1,), offset)


class _Leave(partial[None]):
    """What a ``with`` statement calls at its end, and drops.

    An interrupt can come between that call and the first line of the function called. The
    statement then drops this object and with it a suspended generator, and what a generator
    does about that begins without running signal handlers. (The function must not see this
    object: the traceback of the interrupt keeps whatever the function sees.)
    """

    last_chance: Generator[None, None, None]


class _Exit:
    """``Rollback.__exit__``: a function of the class, and a :class:`_Leave` of an instance."""

    def __get__(self, block: Rollback | None, owner: object) -> Callable[..., None]:
        if block is None:
            return _leave  # contextlib.ExitStack asks the class
        last_chance = block.last_chance(len(block.saved))
        next(last_chance)
        leave = _Leave(block.leave, weakref.ref(last_chance))
        leave.last_chance = last_chance
        return leave


def _leave(block: Rollback, *raised: Any) -> None:
    block.leave(lambda: None, *raised)


class Rollback:
    """The context manager that :func:`rollback_on_error` returns."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], *, data: bool) -> None:
        self._tensors = tensors
        self._data = data
        self.saved: list[list[_Entry]] = []

    def __enter__(self) -> None:
        self.saved.append([_Entry(tensor, data=self._data) for tensor in self._tensors])

    __exit__ = _Exit()

    def leave(
        self,
        last_chance: Callable[[], Generator[None, None, None] | None],
        exception_type: type[BaseException] | None,
        *_: object,
    ) -> None:
        if exception_type is not None:
            finish(self._undo)
        self.saved.pop()
        not_needed = last_chance()
        if not_needed is not None:
            next(not_needed, None)

    def last_chance(self, depth: int) -> Generator[None, None, None]:
        """Undo the block if this is dropped before :meth:`leave` has gone through."""
        try:
            yield
        except GeneratorExit:
            if len(self.saved) > depth:
                finish(self._undo)
                self.saved.pop()

    def _undo(self) -> None:
        for entry in self.saved[-1]:
            persist(entry.roll_back, failure="torchguard could not undo a block of code")


class _Entry:
    """One tensor of a block: its metadata, its data and its place in the autograd graph."""

    def __init__(self, tensor: torch.Tensor, *, data: bool) -> None:
        self._data = data
        self._version: int | None = None
        with without_torch_function(), without_dispatch_modes(tensor):
            self._grad_fn = tensor.grad_fn
            self._requires_grad = tensor.requires_grad
            self._is_leaf = tensor.is_leaf
            # A second tensor over the same storage: keeps dtype, device, conj and neg
            # bit, which an assignment to x.data changes.
            plain = tensor.layout is torch.strided and not has_own_dispatch(tensor)
            self._alias = tensor.data if plain else None
            # Keeps the way back into the graph, for a tensor whose grad_fn the
            # block may replace: copying it in again leads to the old grad_fn.
            self._with_history = tensor.clone() if data and self._grad_fn is not None else None
        self._saved = save(tensor, data=data)

    def roll_back(self) -> None:
        tensor, metadata, _, compressed = self._saved
        with without_torch_function():
            if self._version is None:  # read once: what is done here moves it on
                self._version = version_of(tensor)
            if self._alias is not None and not _same_kind(tensor, self._alias):
                tensor.data = self._alias
        if metadata is not None and not self._data:
            # Whatever succeeded inside the block has moved the counter on.
            restore(tensor, metadata, version=self._version)
        elif compressed is not None:
            restore_compressed(tensor, compressed._replace(version=self._version))
        else:
            roll_back(self._saved, wrote=False)
        with without_torch_function():
            self._restore_history(tensor)
        if self._data:  # the version once more
            roll_back(self._saved, wrote=False)

    def _restore_history(self, tensor: torch.Tensor) -> None:
        if self._data and tensor.grad_fn is not self._grad_fn:
            if self._with_history is not None:
                call_with_grad(True, tensor.copy_, self._with_history)
            elif not is_view(tensor):
                tensor.detach_()
        if self._is_leaf and tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)


def _same_kind(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    return (
        tensor.dtype == alias.dtype
        and tensor.device == alias.device
        and tensor.is_conj() == alias.is_conj()
        and tensor.is_neg() == alias.is_neg()
    )


def rollback_on_error(
    *tensors: torch.Tensor, data: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Give tensors their old metadata back if the block raises.

    Equals plain code on success. When the block raises, whatever it raises, each
    tensor listed has its shape, stride, storage offset, storage and
    ``requires_grad`` back, and the exception goes on. With ``data=True`` its
    elements and its version counter too: they are copied on entry, which costs
    the tensors' memory once more for as long as the block runs.

    Without ``data=True`` the version counter goes on counting the writes that
    succeeded inside the block. A graph recorded inside a block that failed must
    not be used afterwards.

    Args:
        *tensors: tensors of any kind and shape.
        data: copy the elements on entry and put them back on failure.

    Raises:
        TypeError: one of ``tensors`` is no tensor.

    Upstream: https://github.com/pytorch/pytorch/issues/170298

    Example:
        >>> import torch, torchguard
        >>> table = torch.zeros(3)
        >>> try:
        ...     with torchguard.rollback_on_error(table, data=True):
        ...         table += 1
        ...         table[7] = 0
        ... except IndexError:
        ...     print(table)
        tensor([0., 0., 0.])
    """
    if torch.compiler.is_dynamo_compiling():
        return contextlib.nullcontext()
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"rollback_on_error: tensors[{position}] is a {type(tensor).__name__}, expected a "
                "torch.Tensor; for a module write rollback_on_error(*module.parameters())"
            )
    return Rollback(tensors, data=data)
