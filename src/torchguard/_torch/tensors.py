"""What torch keeps in private of a tensor or a module, and what it raises where memory runs out."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch


def private(path: str, default: Any) -> Any:
    """Return ``torch.<path>``, or a default where this release of torch has no such thing."""
    try:
        return operator.attrgetter(path)(torch)
    except AttributeError:
        return default


def open_archive(file: Any) -> None:
    """Open a zip archive with the reader of ``torch.load``, which is stricter than ``zipfile``."""
    torch._C.PyTorchFileReader(file)


def version_of(tensor: torch.Tensor) -> int | None:
    """``tensor._version``, or None for an inference tensor, which has no version counter."""
    try:
        return tensor._version
    except RuntimeError:  # also for one that was made to view an inference tensor: x.data = y
        return None


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter, so that autograd does not see a write."""
    # Its C function takes a tensor and a number on 2.6, and tuples of both on later releases.
    keeper: Any = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    keeper.prev_version, keeper.prev_versions = version, (version,)
    keeper.__exit__(None, None, None)


def set_lazy_bits(tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Mark the tensor in place as conjugate or negative, as ``like`` is."""
    torch._C._set_conj(tensor, like.is_conj())
    torch._C._set_neg(tensor, like.is_neg())


def with_lazy_bits(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view of it that is conjugate or negative as ``like`` is."""
    if tensor.is_conj() != like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() != like.is_neg() else tensor


base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""Return the tensor of which autograd tracks this one as a view, or None."""


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values; the public ones refuse a tensor that is not coalesced."""
    return tensor._indices(), tensor._values()


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether the tensor has hooks, which see its gradient."""
    return bool(tensor._backward_hooks)


def _saved_tensors_hooks_cannot_be_disabled() -> bool:
    # torch 2.6 can't be asked, but it refuses to switch hooks off where there are some:
    # https://github.com/pytorch/pytorch/blob/v2.6.0/aten/src/ATen/SavedTensorHooks.cpp
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    try:
        autograd._saved_tensors_hooks_disable("")
    except RuntimeError:
        return True
    finally:
        autograd._saved_tensors_hooks_enable()
    return False


_top_hooks = private("_C._autograd._top_saved_tensors_default_hooks", None)
# True: those that tracing sees too.
has_saved_tensors_hooks: Callable[[], object] = (
    functools.partial(_top_hooks, True) if _top_hooks else _saved_tensors_hooks_cannot_be_disabled
)
"""Return something true where ``saved_tensors_hooks`` are on, which see what autograd saves."""


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Whether operators on this tensor run Python code of its class (fake, DTensor, jagged)."""
    own = getattr(type(tensor), "__torch_dispatch__", None)
    return own is not None and own is not torch.Tensor.__torch_dispatch__


def inner_tensors(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors a traceable wrapper subclass holds, each with the attribute's name."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    # DTensor's names its device mesh too since torch 2.13, others attributes that are None.
    names, _ = tensor.__tensor_flatten__()
    held = ((name, getattr(tensor, name, None)) for name in names)
    return [(name, value) for name, value in held if isinstance(value, torch.Tensor)]


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last of a strided tensor, both counted."""
    if 0 in size:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for every alias of a storage, as long as it lives."""
    return int(storage._cdata)


# ---- a module's state dict ----


def tensors_loaded_by_copies(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]] | None:
    """Return what ``module.load_state_dict(state)`` copies to, by name, if it does nothing else.

    None where a submodule has a hook, a loader or extra state of its own, or where torch is
    told to swap tensors (``torch.__future__.set_swap_module_params_on_conversion``).
    """
    found: list[tuple[str, torch.Tensor]] = []
    waiting = [("", module)]
    while waiting:
        prefix, each = waiting.pop()
        if (
            not _has_torchs_loader(type(each))  # type: ignore[arg-type]  # a class can be hashed
            # https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/module.py
            or each._load_state_dict_pre_hooks
            or each._load_state_dict_post_hooks
        ):
            return None
        # Names of buffers; a parameter may have one of them, and is loaded all the same.
        unsaved = each._non_persistent_buffers_set
        buffers = [item for item in each._buffers.items() if item[0] not in unsaved]
        held = [*each._parameters.items(), *buffers]
        found += [(prefix + name, tensor) for name, tensor in held if tensor is not None]
        children = each._modules.items()
        waiting += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
    return None if torch.__future__.get_swap_module_params_on_conversion() else found


@functools.lru_cache(maxsize=4096)
def _has_torchs_loader(kind: type[torch.nn.Module]) -> bool:
    # By the class that defines it, not by the function, which may be a guard's: the answer is
    # cached. BatchNorm has a loader too, which adds a key that older checkpoints lack.
    return (
        _definer(kind, "_load_from_state_dict").__module__.startswith("torch.nn.")
        and _definer(kind, "load_state_dict") is torch.nn.Module
        and _definer(kind, "set_extra_state") is torch.nn.Module
    )


def _definer(kind: type, name: str) -> type:
    return next(each for each in kind.__mro__ if name in vars(each))


# ---- out of memory ----


# In a RuntimeError of PyTorch's CPU allocator, and of cuBLAS.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: torch's, Python's, or that of a library."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )
