"""What torch keeps of a tensor in private: version counter, base, hooks, dispatcher, parts."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "base_of",
    "coo_parts",
    "has_hooks",
    "has_own_dispatch",
    "has_saved_tensors_hooks",
    "inner_tensors",
    "is_view",
    "refuses_writes",
    "set_version",
    "storage_key",
    "version_of",
]


def version_of(tensor: torch.Tensor) -> int | None:
    """``tensor._version``, or None for an inference tensor, which has no version counter."""
    try:
        return tensor._version
    except RuntimeError:  # also for one that was made to view an inference tensor: x.data = y
        return None


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Put the version counter back after a write that autograd must not hear of.

    Without it a later backward would refuse a saved tensor whose bytes never
    changed. torch 2.6 takes a tensor and a number here, later releases take
    tuples of both: the class torch itself offers for this knows which.
    """
    keeper: Any = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    if hasattr(keeper, "prev_versions"):
        keeper.prev_versions = (version,)
    else:
        keeper.prev_version = version
    keeper.__exit__(None, None, None)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd tracks the tensor as a view, which can't be detached in place."""
    return tensor._is_view()


base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""Return the tensor of which autograd tracks this one as a view, or None."""


def refuses_writes(tensor: torch.Tensor) -> bool:
    """Whether autograd refuses to write to it in place, before anything is written.

    That is so for a leaf that requires grad, and for a view of one.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    return tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)


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


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
# True: those that tracing sees too.
has_saved_tensors_hooks: Callable[[], object] = (
    _saved_tensors_hooks_cannot_be_disabled
    if _top_hooks is None
    else functools.partial(_top_hooks, True)
)
"""Return something true where ``saved_tensors_hooks`` are on, which see what autograd saves."""


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Whether operators on this tensor run Python code of its class (fake, DTensor, jagged)."""
    own = getattr(type(tensor), "__torch_dispatch__", None)
    return own is not None and own is not torch.Tensor.__torch_dispatch__


def inner_tensors(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors a traceable wrapper subclass holds, each with the attribute's name.

    ``__tensor_flatten__`` names more than tensors: DTensor's names its device mesh too since
    torch 2.13, other classes optional attributes that are None.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    names, _ = tensor.__tensor_flatten__()
    held = ((name, getattr(tensor, name, None)) for name in names)
    return [(name, value) for name, value in held if isinstance(value, torch.Tensor)]


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for every alias of a storage, as long as it lives."""
    return int(storage._cdata)
