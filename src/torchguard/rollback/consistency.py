"""Whether a tensor's shape fits the memory its storage really has, without reading an element."""

from __future__ import annotations

from typing import Any

import torch

from torchguard._public import public
from torchguard._torch import coo_parts, inner_tensors, without_torch_function
from torchguard.errors import InconsistentTensorError
from torchguard.state.tensors import bytes_needed, read_stride_and_offset
from torchguard.state.walk import require_container, tensors_in

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_PACKED = {torch.quint4x2, torch.quint2x4}  # several elements in one byte


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
            f"{path}: {fault}. Under torch.no_grad(), tensor.set_(tensor.untyped_storage(), 0, "
            "(0,), (1,)) empties it"
        )


def _fault(tensor: torch.Tensor) -> str | None:
    """Say what is wrong with a tensor, or None."""
    for name, part in _parts_of(tensor):
        fault = _fault(part)
        if fault is not None:
            return f"{name} has {fault}"
    is_made_of_others = tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__")
    return None if is_made_of_others else _strided_fault(tensor)


def _parts_of(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that another tensor is made of, each with how Python reaches it."""
    if hasattr(tensor, "__tensor_flatten__"):
        return [(f".{name}", part) for name, part in inner_tensors(tensor)]
    if tensor.layout is torch.sparse_coo:
        indices, values = coo_parts(tensor)
        return [("._indices()", indices), ("._values()", values)]
    names = _COMPRESSED.get(tensor.layout, ())
    return [(f".{name}()", getattr(tensor, name)()) for name in names]


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
    if needed > held and tensor.dtype not in _PACKED:
        return f"{where}: {needed} bytes needed, the storage holds {held}"
    return None
