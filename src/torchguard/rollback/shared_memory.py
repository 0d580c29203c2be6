"""Storage in shared memory: torch thinks it can grow, and has no allocator to do it with.

``torch.ones(4).share_memory_().resize_(1000)`` calls through a null pointer, and
so does an ``out=`` that has to grow; ``untyped_storage().resizable()`` says True.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from torchguard._torch import without_torch_function
from torchguard.errors import NonResizableStorageError
from torchguard.rollback.snapshot import Snapshot


def lacks_allocator(storage: torch.UntypedStorage) -> bool:
    """Whether growing this storage would call through a null pointer.

    CUDA storage always claims to be shared. A shared file mapping says itself
    that it can't grow, and torch raises.
    """
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


def can_stand_in_for(tensor: torch.Tensor) -> bool:
    """Whether torch would do the same with a plain tensor over the same bytes."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    # Autograd and inference mode refuse these; they have to see the tensor itself.
    frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return not (
        tensor.requires_grad or frozen or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    )


def locked_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage over the same bytes that says it can't grow.

    Given to torch in place of one in shared memory, it turns the null pointer
    into torch's ordinary exception. It keeps ``storage`` alive.
    """
    if not storage.nbytes():
        return torch.from_numpy(np.empty(0, dtype=np.uint8)).untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def stand_in_for(saved: Snapshot, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return what the tensor of a snapshot is, over the storage of :func:`locked_storage`."""
    with without_torch_function():
        blank = torch.empty(0, dtype=saved.tensor.dtype, device="cpu")
        view: torch.Tensor = blank.set_(storage, saved.storage_offset, saved.size, saved.stride)
        return view
