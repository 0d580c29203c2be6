"""resize_, resize_as_ and set_ that are rolled back if they fail.

torch writes the new shape first and looks for the memory afterwards
(https://github.com/pytorch/pytorch/issues/170298). Here the metadata is read before the call and
restored if it raises.

``guard_*`` make the replacements that ``install()`` puts in place, ``safe_*`` are the helpers. The
call to torch is in the guard itself, so that a traceback gains one line, and two in a helper.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import (
    handle_torch_function,
    has_torch_function,
    has_torch_function_unary,
)

from torchguard._absent import ABSENT
from torchguard._events import record
from torchguard._public import public
from torchguard._torch import overriding, patch, untyped_storage_of, without_torch_function
from torchguard.rollback.out import cannot_grow
from torchguard.state.process import roll_back
from torchguard.state.tensors import Snapshot, bytes_needed, capture, lacks_allocator

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

SWITCH = patch.Switch()
"""Whether the guard "resize" is on."""

_ALWAYS = patch.Switch(1)


# ---- what to read before a call; what would kill the process raises here ----


def _begin_resize_as_(
    args: tuple[Any, ...], kwargs: dict[str, Any], operation: str = "resize_as_"
) -> Snapshot | None:
    """Begin a call of ``resize_as_``; ``torch.resize_as_`` takes both arguments by name."""
    tensor: Any = args[0] if args else kwargs.get("input")
    template = args[1] if len(args) > 1 else kwargs.get("the_template")
    if tensor is None and operation == "resize_as_":
        return None  # torch says what is missing
    return _begin(tensor, operation, (_numel(template),))


def _begin_set_(
    args: tuple[Any, ...], kwargs: dict[str, Any], operation: str = "set_"
) -> Snapshot | None:
    """Begin a call of ``set_``; the storage is the one that the tensor gets."""
    if not args:
        return None
    tensor = args[0]
    _require_tensor(tensor, operation)
    saved = capture(tensor)
    # A whole storage or tensor fits itself.
    if saved.storage is None or len(args) + len(kwargs) <= 2:  # noqa: PLR2004
        return saved
    names = ("source", "storage_offset", "size", "stride")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    storage, size, stride = given.get("source"), given.get("size"), given.get("stride")
    if isinstance(storage, torch.TypedStorage):
        storage = untyped_storage_of(storage)
    elif isinstance(storage, torch.Tensor):
        storage = capture(storage).storage
    if not isinstance(storage, torch.UntypedStorage) or not isinstance(size, Sequence):
        return saved
    sizes = _integers(size)
    if sizes is not None:
        if stride is None:  # contiguous
            stride = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
        strides = _integers(stride)
        offset = _integers((given.get("storage_offset", 0),))
        if strides is not None and offset and len(sizes) == len(strides):
            needed = bytes_needed(sizes, strides, offset[0], _itemsize(tensor))
            _refuse_to_grow_shared(operation, saved.size, storage, needed)
    return saved


def _begin_other(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Snapshot | None:
    tensor = args[0] if args else kwargs.get("input")
    return capture(tensor) if isinstance(tensor, torch.Tensor) else None


def _begin(tensor: torch.Tensor, operation: str, sizes: tuple[Any, ...]) -> Snapshot:
    """Begin a call after which the tensor has these sizes, as they were given."""
    _require_tensor(tensor, operation)
    saved = capture(tensor)
    count = _elements(sizes)
    if count and saved.storage is not None and type(saved.nbytes) is int:
        needed = (saved.storage_offset + count) * _itemsize(tensor)
        _refuse_to_grow_shared(operation, saved.size, saved.storage, needed)
    return saved


def _itemsize(tensor: torch.Tensor) -> int:
    if has_torch_function_unary(tensor):
        with without_torch_function():
            return tensor.itemsize
    return tensor.itemsize


def _require_tensor(tensor: object, operation: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{operation}: tensor is of type {type(tensor).__name__}, expected a torch.Tensor"
        )


def _elements(sizes: tuple[Any, ...]) -> int | None:
    """Multiply sizes; None where torch will complain or a compiler is at work."""
    if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)):
        sizes = tuple(sizes[0])
    integers = _integers(sizes)
    if not integers:
        return None if integers is None else 1  # resize_(()) makes a tensor without dimensions
    return math.prod(integers) if min(integers) >= 0 else None


def _integers(values: Sequence[Any]) -> tuple[int, ...] | None:
    """Read sizes as numbers; None if one is symbolic, traced, or no number at all."""
    for value in values:
        if type(value) is not int:
            break
    else:
        return tuple(values)  # nearly always, and asking a tracer takes longer than that
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return None  # reading a traced size as a number makes the tracer warn
    try:
        if any(isinstance(value, torch.SymInt) for value in values):
            return None
        return tuple(operator.index(value) for value in values)
    except TypeError:
        return None


def _numel(template: object) -> int | None:
    if not isinstance(template, torch.Tensor):
        return None
    with without_torch_function():
        count = template.numel()
    return count if type(count) is int else None


def _refuse_to_grow_shared(
    operation: str, size: torch.Size, storage: torch.UntypedStorage, needed: int
) -> None:
    """Raise where torch would call through the missing allocator of shared memory."""
    # In this order: whether memory is shared is asked for tensors that grow only.
    # What overflows a number of bytes, torch refuses by itself.
    if storage.nbytes() < needed <= sys.maxsize and lacks_allocator(storage):
        raise cannot_grow(operation, size, storage, needed)


# ---- guards ----


def guard_resize_(  # noqa: C901  in one frame: a traceback gains one line
    original: Callable[..., Any], *, helper: bool = False
) -> Callable[..., Any]:
    """Make ``original``, a ``Tensor.resize_``, exception-safe; a helper asks the tensor's class."""
    tensor_type = torch.Tensor
    operation = "safe_resize_" if helper else "resize_"
    switch = _ALWAYS if helper else SWITCH

    # Named parameters instead of *size, and a comparison instead of a snapshot:
    # together they halve what a call pays that does not grow.
    def resize_(  # noqa: C901  in one frame
        self: torch.Tensor,
        size: Any = ABSENT,
        second: Any = ABSENT,
        /,
        *rest: Any,
        **options: Any,
    ) -> torch.Tensor:
        if (
            switch.on
            and type(self) is tensor_type
            and type(size) is int
            and size >= 0
            and not (rest or options)
            and not has_torch_function_unary(self)
            and not self.is_inference()
        ):
            # Inside its storage nothing is allocated, so nothing can fail. (An inference
            # tensor can: torch refuses it after the resize, outside inference mode.) A
            # contiguous tensor that gets no more elements than it has stays there. A
            # number that is no int belongs to a compiler: comparing it would be a guard.
            try:
                count = size
                if second is not ABSENT:
                    count = size * second if type(second) is int and second >= 0 else sys.maxsize
                held = self.numel()
                fits = type(held) is int and (
                    (count <= held and self.is_contiguous())
                    or (self.storage_offset() + count) * self.itemsize
                    <= self.untyped_storage().nbytes()
                )
            except RuntimeError:  # a layout without strides
                fits = False
            if fits:
                if second is ABSENT:
                    return original(self, size)  # type: ignore[no-any-return]
                return original(self, size, second)  # type: ignore[no-any-return]

        sizes = tuple([each for each in (size, second, *rest) if each is not ABSENT])
        saved = _begin(self, operation, sizes or (options.get("size"),)) if switch.on else None
        try:
            if helper:
                return type(self).resize_(self, *sizes, **options)
            if has_torch_function_unary(self):
                seen_by = overriding((self,))
                return handle_torch_function(original, seen_by, self, *sizes, **options)  # type: ignore[no-any-return]
            return original(self, *sizes, **options)  # type: ignore[no-any-return]
        except BaseException:
            if saved is not None:
                try:
                    _fail(saved, operation, once=helper)
                except BaseException:  # a signal came during the call
                    _fail(saved, operation, once=helper)
                    raise
            raise

    return resize_


def _guarded(
    original: Callable[..., Any],
    begin: Callable[[tuple[Any, ...], dict[str, Any]], Snapshot | None],
    operation: str,
    *,
    is_shown: bool = True,
    switch: patch.Switch = SWITCH,
) -> Callable[..., Any]:
    """Restore what ``begin`` read if ``original`` raises.

    Not all calls are shown to subclasses and modes: torch does not show them ``set_`` either.
    """

    def guarded(*args: Any, **kwargs: Any) -> Any:
        saved = begin(args, kwargs) if switch.on else None
        try:
            values = (*args, *kwargs.values()) if kwargs else args
            if is_shown and has_torch_function(values):
                return handle_torch_function(original, overriding(values), *args, **kwargs)
            return original(*args, **kwargs)
        except BaseException:
            if saved is not None:
                try:
                    _fail(saved, operation, once=switch is not SWITCH)
                except BaseException:  # a signal came during the call
                    _fail(saved, operation, once=switch is not SWITCH)
                    raise
            raise

    return guarded


guard_resize_as_ = functools.partial(_guarded, begin=_begin_resize_as_, operation="resize_as_")
guard_set_ = functools.partial(_guarded, begin=_begin_set_, operation="set_", is_shown=False)
_safe_resize_as_ = _guarded(
    lambda tensor, template, **given: tensor.resize_as_(template, **given),
    functools.partial(_begin_resize_as_, operation="safe_resize_as_"),
    "safe_resize_as_",
    is_shown=False,
    switch=_ALWAYS,
)
_safe_set_ = _guarded(
    lambda tensor, **given: tensor.set_(**given),
    functools.partial(_begin_set_, operation="safe_set_"),
    "safe_set_",
    is_shown=False,
    switch=_ALWAYS,
)


def guard_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make another function that changes the shape of its first argument exception-safe."""
    return _guarded(original, _begin_other, getattr(original, "__name__", "an operator"))


def _fail(saved: Snapshot, operation: str, *, once: bool = False) -> None:
    """Roll back a call that raised. With ``once`` the guard, if it is on, has counted it."""
    roll_back(saved.restore)
    if not (once and SWITCH.on):
        record("rolled_back", "resize", f"{operation} failed")


_safe_resize_ = guard_resize_(torch.Tensor.resize_, helper=True)


@public
def safe_resize_(
    tensor: _Tensor,
    /,
    *sizes: int | Sequence[int],
    size: Sequence[int] | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> _Tensor:
    """Resize a tensor in place; if that fails, nothing about it has changed.

    Equals ``tensor.resize_(*sizes, memory_format=...)`` on success, and returns ``tensor``. On
    failure the exception is PyTorch's, and shape, stride, storage offset, storage, version counter
    and every other alias of the storage are restored.

    Args:
        tensor: any tensor; a sparse or nested one is passed on to PyTorch, and is not restored.
        *sizes: the new size, as integers or as one sequence of integers.
        size: the same by name.
        memory_format: as for ``Tensor.resize_``.

    Raises:
        NonResizableStorageError: the tensor lives in shared memory and would
            have to grow; PyTorch kills the process.
        RuntimeError, TypeError, torch.OutOfMemoryError: the errors of PyTorch.

    Upstream: https://github.com/pytorch/pytorch/issues/170298

    Cost:
        Microseconds for each call, to remember the metadata.

    Example:
        >>> import numpy as np, torch, torchguard
        >>> t = torch.from_numpy(np.arange(4))  # numpy's memory can't grow
        >>> try:
        ...     torchguard.safe_resize_(t, 100)
        ... except RuntimeError:
        ...     print(t)
        tensor([0, 1, 2, 3])
    """
    options: dict[str, Any] = {} if size is None else {"size": size}
    if memory_format is not torch.contiguous_format:  # torch's kernels for some dtypes take none
        options["memory_format"] = memory_format
    return _safe_resize_(tensor, *sizes, **options)  # type: ignore[no-any-return]


@public
def safe_resize_as_(
    tensor: _Tensor,
    template: torch.Tensor,
    *,
    memory_format: torch.memory_format | None = None,
) -> _Tensor:
    """Resize a tensor in place to another's size; if that fails, nothing has changed.

    Equals ``tensor.resize_as_(template, memory_format=memory_format)`` on success, and returns
    ``tensor``. On failure as :func:`safe_resize_`.

    Args:
        tensor: the tensor to resize, of any shape.
        template: the tensor whose size it gets; dtype and device don't matter.
        memory_format: as for ``Tensor.resize_as_``.

    Raises:
        NonResizableStorageError: as :func:`safe_resize_`.
        RuntimeError, TypeError, torch.OutOfMemoryError: the errors of PyTorch.

    Upstream: https://github.com/pytorch/pytorch/issues/170298

    Cost:
        As :func:`safe_resize_`.

    Example:
        >>> import torch, torchguard
        >>> torchguard.safe_resize_as_(torch.zeros(4), torch.ones(2, 2)).shape
        torch.Size([2, 2])
    """
    return _safe_resize_as_(tensor, template, memory_format=memory_format)  # type: ignore[no-any-return]


@public
def safe_set_(
    tensor: _Tensor,
    source: torch.Tensor | torch.UntypedStorage | torch.TypedStorage | None = None,
    storage_offset: int = ABSENT,
    size: Sequence[int] = ABSENT,
    stride: Sequence[int] = ABSENT,
) -> _Tensor:
    """Let a tensor view another storage; if that fails, it keeps its old one.

    Equals ``tensor.set_(source, storage_offset, size, stride)`` on success, and returns ``tensor``.
    What is left out is left out of the call to torch too. On failure PyTorch has swapped the
    storage already. Here the same storage object is restored, with shape, stride, storage offset
    and version counter.

    Args:
        tensor: the tensor to change, of any shape.
        source: a storage or a tensor of the same dtype and device.
        storage_offset: where the view begins, in elements.
        size: size of the view.
        stride: stride of the view, in elements; contiguous when left out.

    Raises:
        NonResizableStorageError: ``source`` lives in shared memory and is too
            small; PyTorch would try to grow it and kill the process.
        RuntimeError, TypeError: the errors of PyTorch.

    Upstream: https://github.com/pytorch/pytorch/issues/170298

    Cost:
        As :func:`safe_resize_`.

    Example:
        >>> import torch, torchguard
        >>> storage = torch.arange(6.0).untyped_storage()
        >>> torchguard.safe_set_(torch.zeros(2), storage, 0, (2, 3), (3, 1))
        tensor([[0., 1., 2.],
                [3., 4., 5.]])
    """
    given = {"storage_offset": storage_offset, "size": size, "stride": stride}
    arguments: dict[str, Any] = {} if source is None else {"source": source}
    arguments |= {name: value for name, value in given.items() if value is not ABSENT}
    return _safe_set_(tensor, **arguments)  # type: ignore[no-any-return]
