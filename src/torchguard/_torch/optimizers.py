"""What torch.optim, torch.nn and torch.amp keep to themselves and a transaction has to know."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, has_torch_function_unary
from torch.utils.hooks import RemovableHandle

from torchguard._torch.modes import call_with_grad, without_torch_dispatch, without_torch_function
from torchguard._torch.tensors import private, version_of

MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The dicts in which a module holds hooks; ids of hooks are their keys."""


def versions_of(tensors: list[Any]) -> list[int | None]:
    """Return ``tensor._version`` of each; None for an inference tensor."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # there is an inference tensor among them
        return [version_of(tensor) for tensor in tensors]


class _NotTheSame(Exception):  # noqa: N818  an answer
    """Two tensors were compared, so they are two."""


class _RefuseToCompare(TorchFunctionMode):
    def __torch_function__(self, *_: Any, **__: Any) -> Any:
        raise _NotTheSame


_refuse_to_compare = _RefuseToCompare()
_probe = torch.empty(0)
_with_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = private(
    "_C._EnableTorchFunction", contextlib.nullcontext
)


def same_tensors(now: Any, before: Any) -> bool:
    """Whether two lists, of tensors or of lists or dicts of tensors, hold the very same tensors."""
    # == of lists and dicts looks at identity first, in C, at a fiftieth of what a loop takes, and
    # calls Tensor.__eq__ for those that differ; a mode keeps torch from comparing elements.
    with _with_torch_function():
        try:
            torch._C._push_on_torch_function_stack(_refuse_to_compare)
            if has_torch_function_unary(_probe):
                return bool(now == before)
        except _NotTheSame:
            return False
        finally:
            torch._C._pop_torch_function_stack()
    return same_one_by_one(now, before)  # inside of torch._C.DisableTorchFunction


def same_one_by_one(now: Any, before: Any) -> bool:
    """Whether two lists, of any objects or of lists or dicts of them, hold the very same ones."""
    return len(now) == len(before) and all(map(_is_same, now, before))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return same_one_by_one(list(one.values()), list(other.values()))
    return one is other or (isinstance(one, list) and same_one_by_one(one, other))


def members_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the dicts in which a module holds its parameters, its buffers and its children."""
    return module._parameters, module._buffers, module._modules


def not_saved(module: torch.nn.Module) -> set[str]:
    """Return the set of names of those buffers that are not in a module's state dict."""
    return module._non_persistent_buffers_set


def hooks_registered() -> int:
    """Return how many hooks torch has registered in this process: ids of hooks count up."""
    return int(RemovableHandle.next_id)


def remove_hooks_since(registered: int, tensor: torch.Tensor) -> None:
    """Take away the hooks of a tensor that came since :func:`hooks_registered` said a number."""
    kinds: list[Any] = [tensor._backward_hooks, tensor._post_accumulate_grad_hooks]
    for hooks in kinds:
        for number in [each for each in hooks or () if each >= registered]:
            del hooks[number]


def scale_version(scaler: Any) -> int:
    """Return a number that ``update()`` of a GradScaler moves on."""
    scale = getattr(scaler, "_scale", None)  # None before it has a scale, whose number is 0
    return (version_of(scale) or 0) if isinstance(scale, torch.Tensor) else 0


def per_optimizer_states(scaler: Any) -> dict[int, dict[str, Any]] | None:
    """Return what a GradScaler notes of each optimizer between two calls of ``update()``."""
    # https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py
    found = getattr(scaler, "_per_optimizer_states", None)
    return found if isinstance(found, dict) else None


def can_make_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`make_state` knows how this optimizer makes its state."""
    return hasattr(type(optimizer), "_init_group")


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of all parameters that have a gradient, as ``step()`` does."""
    make: Any = getattr(type(optimizer), "_init_group")  # noqa: B009
    names = _names_of_arguments(make)
    for group in optimizer.param_groups:
        # Lists that it fills, but for AdamW's on 2.6, which takes the option amsgrad as well. SGD
        # names the list that it fills "params", as the group names its parameters.
        # https://github.com/pytorch/pytorch/blob/v2.6.0/torch/optim/adamw.py#L132
        make(optimizer, group, *([] if n == "params" else group.get(n, []) for n in names))


@functools.cache
def _names_of_arguments(make: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(make).parameters)[2:]  # after self and group


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step()`` calls the hooks of :func:`register_optimizer_step_pre_hook`."""
    # Optimizer.__init__ puts them around the step of the class, and marks it `hooked`.
    step: Any = type(optimizer).step
    return getattr(step, "hooked", False) or getattr(step, "__code__", None) is _around_step


# The code of what stands around every step: one object for all classes.
_around_step = private("optim.Optimizer.profile_hook_step", lambda f: f)(lambda *_: None).__code__


def step_is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook is called by a ``step()`` inside of another one: by ``super().step()``."""
    count = 0
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _around_step and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count > 1


def call_unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` so that no mode sees it and autograd records nothing."""
    with without_torch_function(), without_torch_dispatch():
        return call_with_grad(False, function, *args)


# autograd's kernel asks each tensor whether to record, which makes the copy half as slow again.
_below_autograd: Callable[[], contextlib.AbstractContextManager[None]] = private(
    "_C._AutoDispatchBelowAutograd", torch.no_grad
)


def concatenated(kinds: list[list[Any]]) -> list[torch.Tensor]:
    """Copy all tensors of each kind by one call, unseen by modes and by autograd."""
    with without_torch_function(), without_torch_dispatch(), _below_autograd():
        return [torch.cat(tensors) for tensors in kinds]


def copy_all(targets: list[Any], sources: list[Any]) -> None:
    """Copy each source into its target: one call of torch, on a GPU one kernel per dtype."""
    if targets:
        torch._foreach_copy_(targets, sources)


def close_checkpoints(exception: BaseException | None) -> None:
    """Leave the scopes that ``checkpoint`` has opened and, up to torch 2.11, not closed."""
    # They belong to a generator that is suspended while the checkpointed function runs. Its hooks
    # on saved tensors would stay until the exception goes, and reach a retry.
    # https://github.com/pytorch/pytorch/blob/v2.9.0/torch/utils/checkpoint.py#L490
    module: Any = sys.modules.get("torch.utils.checkpoint")
    code = None if module is None else getattr(inspect.unwrap(module.checkpoint), "__code__", None)
    while code is not None and exception is not None:
        frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
        for frame in reversed(frames):  # the innermost was opened last
            if frame.f_code is code and inspect.isgenerator(frame.f_locals.get("gen")):
                frame.f_locals["gen"].close()
        exception = exception.__context__


def call_while_tracing(function: Callable[[], int]) -> None:
    """Let Dynamo call a function while it traces a call of it; its result is a constant then.

    As ``torch.compiler.assume_constant_result`` does, which imports Dynamo first.
    """
    # https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/decorators.py
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook changes the state that ``load_state_dict`` is given."""
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))
