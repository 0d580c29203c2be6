"""Whether a tensor's shape fits the memory its storage really has, without reading an element."""

from __future__ import annotations

from typing import Any

import torch

from torchguard._public import public
from torchguard._torch import without_torch_function
from torchguard.errors import InconsistentTensorError
from torchguard.state.containers import require_container, tensors_in
from torchguard.state.tensors import (
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

    Args:
        obj: a tensor, a module (parameters, buffers and their gradients), an optimizer (parameters
            and state), or dicts, lists, tuples and data classes of these, nested as you like.

    Raises:
        InconsistentTensorError: names the first such tensor by its path
            (``obj.layers[0].weight``), its shape, stride and storage offset, the
            bytes they need and the bytes there are.
        TypeError: ``obj`` itself is none of the above.

    Upstream: https://github.com/pytorch/pytorch/issues/170298,
    https://github.com/pytorch/pytorch/issues/171676

    Cost:
        The metadata of each tensor is read, and no element.

    Example:
        >>> import numpy as np, torch, torchguard
        >>> t = torch.from_numpy(np.zeros(4))
        >>> try:
        ...     t.resize_(5, 5)  # fails, and PyTorch leaves the new shape
        ... except RuntimeError:
        ...     pass
        >>> try:
        ...     torchguard.check_consistent({"input": t})
        ... except torchguard.InconsistentTensorError as error:
        ...     print(str(error).partition(", stride")[0])
        obj['input']: shape (5, 5)
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
    stride 1, storage offset 0. Its elements are the bytes that the storage holds.

    Args:
        tensor: any tensor.

    Raises:
        InconsistentTensorError: the tensor is inconsistent and has no storage of
            its own to show (a sparse tensor or a wrapper whose parts are wrong).
        TypeError: ``tensor`` is not a tensor.

    Upstream: https://github.com/pytorch/pytorch/issues/170298

    Cost:
        Metadata only: no element is read or written.

    Example:
        >>> import numpy as np, torch, torchguard
        >>> t = torch.from_numpy(np.zeros(4))
        >>> try:
        ...     t.resize_(5, 5)  # fails, and PyTorch leaves the new shape
        ... except RuntimeError:
        ...     pass
        >>> torchguard.repair_(t).tolist()
        [0.0, 0.0, 0.0, 0.0]
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
