"""Fused steps on the CPU: the kernels get tensors that they read and write rightly.

A fused CPU kernel walks over as many elements as the parameter has, from the first address of
parameter, gradient and state, and looks at no strides: it makes a contiguous gradient, and then
reads the other one. A transposed gradient gives a wrong update, an expanded one (the gradient of
a sum, from ``torch.autograd.grad``) is read beyond its memory. Kernels on a GPU refuse them.
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cpu/FusedSGDKernel.cpp
https://github.com/pytorch/pytorch/issues/106951
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._torch import patch
from torchguard._torch.fused import known_contiguous
from torchguard._torch.optimizers import call_unseen, copy_all, fused_sgd_skips_half

__all__ = ["replacements"]

# What SGD.step() and its like call with fused=True. Only older releases have one for AdamW.
_PATHS = (
    "torch.optim.adagrad._fused_adagrad",
    "torch.optim.adam._fused_adam",
    "torch.optim.adamw._fused_adamw",
    "torch.optim.sgd._fused_sgd",
)
_HALF = (torch.bfloat16, torch.float16)

_Lists = list[list[Any]]
"""Parameters, gradients and each kind of state, which may be empty or hold None."""


def replacements() -> Mapping[str, patch.Make]:
    """Return what is patched so that fused steps on the CPU are right, by path."""
    return {path: _guard_kernel for path in _PATHS if patch.exists(path)}


def _guard_kernel(original: Callable[..., None]) -> Callable[..., None]:
    names = list(inspect.signature(original).parameters)
    # Step counters are one number each: their layout is not the parameter's.
    counters = names.index("state_steps") if "state_steps" in names else None
    is_sgd = "momentum_buffer_list" in names

    @functools.wraps(original)
    def call_with_fitting_tensors(*args: Any, **options: Any) -> None:
        lists = [each for place, each in enumerate(args) if place != counters]
        if not any(each.is_cpu for each in lists[0]):  # a GPU's kernel refuses what it can't read
            original(*args, **options)
            return
        in_float = is_sgd and _has_half(lists[0]) and fused_sgd_skips_half()
        fits = any(each is lists[0] for each in known_contiguous) or not _has_strides(lists)
        if options.get("has_sparse_grad") or (fits and not in_float):
            original(*args, **options)
            return
        fitted = call_unseen(_fit, lists, in_float)
        try:
            original(*args, **options)
        finally:
            # Also if it has raised: what a kernel has done is what tells whether it has run.
            unscaled = options.get("grad_scale") is not None
            call_unseen(_give_back, lists, fitted, unscaled)
        if in_float:
            call_unseen(_keep_dtype, lists[0], lists[2])

    return call_with_fitting_tensors


def _has_half(parameters: list[Tensor]) -> bool:
    return any(each.dtype in _HALF and each.is_cpu for each in parameters)


def _has_strides(lists: _Lists) -> bool:
    """Whether some tensor is not contiguous; this is asked at every fused step."""
    for tensors in lists:
        if not all(map(Tensor.is_contiguous, [each for each in tensors if each is not None])):
            return True
    return False


class _Fitted(NamedTuple):
    """A tensor in whose place the kernel was given a copy."""

    number: int
    """Which of the lists: 0 for parameters, 1 for gradients."""

    place: int
    tensor: Tensor
    copy: Tensor


def _fit(lists: _Lists, in_float: bool) -> list[_Fitted]:
    """Put copies that a fused CPU kernel reads and writes rightly in place of other tensors."""
    fitted = []
    for place, parameter in enumerate(lists[0]):
        if not parameter.is_cpu or hasattr(parameter, "__tensor_flatten__"):
            continue
        dtype = torch.float32 if in_float and parameter.dtype in _HALF else None
        all_of_it = dtype is not None or not _is_dense(parameter)
        for number, tensors in enumerate(lists):
            tensor = tensors[place] if place < len(tensors) else None
            if tensor is None or tensor.shape != parameter.shape:
                continue
            if all_of_it:
                copy = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
            elif _order(tensor) != _order(parameter):
                copy = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
            else:
                continue
            fitted.append(_Fitted(number, place, tensor, copy))
    for each in fitted:
        lists[each.number][each.place] = each.copy
    return fitted


def _give_back(lists: _Lists, fitted: list[_Fitted], unscaled: bool) -> None:
    """Copy back what the kernel has written, and put the tensors themselves back in the lists.

    With ``unscaled`` the kernel has divided the gradients by the scale.
    """
    targets, sources = [], []
    for number, place, tensor, copy in fitted:
        lists[number][place] = tensor
        if number != 1 or unscaled:
            targets.append(_without_repetition(tensor) if number == 1 else tensor)
            sources.append(_like(targets[-1], copy))
    copy_all(targets, sources)


def _keep_dtype(parameters: list[Tensor], buffers: list[Any]) -> None:
    """Give momentum buffers that ``_fused_sgd`` has just made the dtype of their parameters.

    There are none without momentum.

    SGD keeps what it finds in the list after the call.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/sgd.py#L511
    """
    for place, (parameter, buffer) in enumerate(zip(parameters, buffers, strict=False)):
        if buffer is not None and buffer.dtype != parameter.dtype:
            buffers[place] = torch.empty_like(parameter).copy_(buffer)


def _order(tensor: Tensor) -> list[int]:
    """Return the strides that say where elements lie: those of dims that have more than one."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie one after the other in some order, without gaps or sharing."""
    expected = 1
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for step, size in sorted((step, size) for step, size in steps if size != 1):
        if step != expected and tensor.numel():
            return False
        expected *= size
    return True


def _without_repetition(tensor: Tensor) -> Tensor:
    """Return one of each of the elements that an expanded tensor repeats, which can be written."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


def _like(target: Tensor, copy: Tensor) -> Tensor:
    for dim, size in enumerate(target.shape):
        copy = copy.narrow(dim, 0, size)
    return copy
