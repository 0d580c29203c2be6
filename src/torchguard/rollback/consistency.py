"""Whether a tensor's shape fits the memory its storage really has, without reading an element."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchguard._public import public
from torchguard._torch import without_torch_function
from torchguard.errors import InconsistentTensorError
from torchguard.rollback.snapshot import (
    bytes_needed,
    original_set_,
    parts_of,
    read_stride_and_offset,
)

# Quantized dtypes that keep several elements in one byte.
_ELEMENTS_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}


def is_consistent(tensor: torch.Tensor) -> bool:
    """Whether every element of ``tensor`` lies inside its storage.

    A sparse tensor and a wrapper subclass are consistent when what they are made of is. Layouts
    without a storage (opaque, ``torch.func`` wrappers) count as consistent.
    """
    with without_torch_function():
        return _fault(tensor) is None


@public
def check_consistent(obj: object) -> None:
    """Raise if any tensor in ``obj`` has a shape its storage can't back.

    ``obj`` is a tensor, a module (parameters, buffers and their gradients), an
    optimizer (parameters and state), or dicts, lists, tuples and data classes of
    these, nested as you like. Reads metadata only, never data.

    Raises:
        InconsistentTensorError: names the first such tensor by its path
            (``obj.layers[0].weight``), its shape, stride and storage offset, the
            bytes they need and the bytes there are.
        TypeError: ``obj`` itself is none of the above.

    Upstream: https://github.com/pytorch/pytorch/issues/170298,
    https://github.com/pytorch/pytorch/issues/171676
    """
    require_container(obj, "check_consistent: obj")
    with without_torch_function():
        faults = ((path, _fault(tensor)) for path, tensor in tensors_in(obj, "obj", {}))
        path, fault = next((found for found in faults if found[1] is not None), ("", None))
    if fault is not None:
        raise InconsistentTensorError(
            f"{path}: {fault}; torchguard.repair_() turns it into a 1-D view of what is there"
        )


@public
def repair_(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` if it is consistent; else make it a 1-D view of its whole storage.

    Works in place and returns the same tensor: size ``(storage bytes // itemsize,)``,
    stride 1, storage offset 0. The bytes are whatever the storage holds; no
    element is read or written.

    Raises:
        InconsistentTensorError: the tensor is inconsistent and has no storage of
            its own to show (a sparse tensor or a wrapper whose parts are wrong).
        TypeError: ``tensor`` is not a tensor.

    Upstream: https://github.com/pytorch/pytorch/issues/170298
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"repair_: tensor is of type {type(tensor).__name__}, expected a torch.Tensor; "
            "torchguard.check_consistent(obj) finds the one in a module or container"
        )
    with without_torch_function():
        fault = _fault(tensor)
        if fault is None:
            return tensor
        if _is_made_of_others(tensor):
            raise InconsistentTensorError(
                f"repair_: the tensor's part {fault}; a {type(tensor).__name__} of layout "
                f"{tensor.layout} is made of other tensors, so call torchguard.repair_() on the "
                "one named here"
            )
        with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
            storage = tensor.untyped_storage()
            per_byte = _ELEMENTS_PER_BYTE.get(tensor.dtype, 1)
            length = storage.nbytes() * per_byte // tensor.itemsize
            original_set_(tensor, storage, 0, (length,), (1,))
    return tensor


def _fault(tensor: torch.Tensor) -> str | None:
    """Say what is wrong with a tensor, or None."""
    for name, part in parts_of(tensor):
        fault = _fault(part)
        if fault is not None:
            return f"{name} has {fault}"
    return None if _is_made_of_others(tensor) else _strided_fault(tensor)


def _is_made_of_others(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__")


def _strided_fault(tensor: torch.Tensor) -> str | None:
    offset: Any
    try:
        size = tuple(tensor.shape)
        stride, offset = read_stride_and_offset(tensor)
        held = tensor.untyped_storage().nbytes()
    except RuntimeError:  # NotImplementedError included: nothing to compare
        return None
    where = f"shape {size}, stride {stride}, storage offset {offset}"
    if not all(type(number) is int for number in (*size, *stride, offset, held)):
        return None  # symbolic: a comparison would become a guard of the compiler
    for name, numbers in (("size", size), ("stride", stride), ("storage offset", (offset,))):
        if min(numbers, default=0) < 0:
            return f"{where}: a negative {name}"
    needed = bytes_needed(size, stride, offset, tensor.itemsize)
    if tensor.dtype in _ELEMENTS_PER_BYTE:
        needed = -(-needed // _ELEMENTS_PER_BYTE[tensor.dtype])
    if needed > held:
        return f"{where}: {needed} bytes needed, the storage holds {held}"
    return None


def require_container(obj: object, name: str) -> None:
    """Raise where :func:`tensors_in` looks for no tensors."""
    if not isinstance(obj, torch.Tensor) and not is_container(obj):
        raise TypeError(
            f"{name} is of type {type(obj).__name__}, expected a tensor, a module, an optimizer, "
            "or a dict, list, tuple or data class of these"
        )


def is_container(obj: object) -> bool:
    """Whether :func:`tensors_in` looks for tensors inside."""
    return isinstance(
        obj, (torch.nn.Module, torch.optim.Optimizer, Mapping, list, tuple, set, frozenset)
    ) or (dataclasses.is_dataclass(obj) and not isinstance(obj, type))


def tensors_in(obj: Any, path: str, seen: dict[int, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor inside ``obj`` with the path that leads to it."""
    if isinstance(obj, torch.Tensor):
        yield path, obj
        if obj.is_leaf and obj.grad is not None:
            yield f"{path}.grad", obj.grad
        return
    if id(obj) in seen:
        return
    seen[id(obj)] = obj  # held: some are made here, and the id of one that is gone is used again
    for step, child in _children(obj):
        if isinstance(child, torch.Tensor) or is_container(child):
            yield from tensors_in(child, path + step, seen)


def _children(obj: Any) -> Iterator[tuple[str, Any]]:  # noqa: C901  a branch per container
    if isinstance(obj, torch.nn.Module):
        for name, tensor in (*obj.named_parameters(), *obj.named_buffers()):
            yield _step(name), tensor
    elif isinstance(obj, torch.optim.Optimizer):
        for index, group in enumerate(obj.param_groups):
            yield f".param_groups[{index}]", group
        yield ".state", dict(enumerate(obj.state.values()))
    elif isinstance(obj, Mapping):
        for key, value in obj.items():
            yield f"[{key!r}]", value
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        for name, value in zip(obj._fields, obj, strict=True):
            yield f".{name}", value
    elif isinstance(obj, (list, tuple, set, frozenset)):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    else:
        for field in dataclasses.fields(obj):
            yield f".{field.name}", getattr(obj, field.name, None)


def _step(name: str) -> str:
    """Write a parameter's name, ``1.running_var``, as Python would reach it from the module."""
    parts = name.split(".")
    return "".join(
        f".{part}" if part.isidentifier() else f"[{part if part.isdecimal() else repr(part)}]"
        for part in parts
    )
