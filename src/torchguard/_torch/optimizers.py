"""What torch.optim, torch.nn and torch.amp keep to themselves and a transaction has to know."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
from collections.abc import Callable
from types import CellType, CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from torchguard._torch.modes import call_with_grad, without_torch_function
from torchguard._torch.tensors import version_of

__all__ = [
    "FORWARD_HOOKS",
    "FusedProgress",
    "call_unseen",
    "call_while_tracing",
    "copy_all",
    "fused_progress",
    "hooks_registered",
    "init_group",
    "members_of",
    "per_optimizer_states",
    "step_without_hooks",
    "subtract",
    "unwrap_steps",
    "versions_of",
    "wrap_step",
]

FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""The dicts of a module whose hooks run in forward and backward; ids of hooks are their keys."""


def versions_of(tensors: list[Any]) -> list[int | None]:
    """Return ``tensor._version`` of each; None for an inference tensor."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # there is an inference tensor among them
        return [version_of(tensor) for tensor in tensors]


def members_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the dicts in which a module holds its parameters, its buffers and its children."""
    return module._parameters, module._buffers, module._modules


def hooks_registered() -> int:
    """Return how many hooks torch has registered in this process: ids of hooks count up."""
    return int(RemovableHandle.next_id)


def per_optimizer_states(scaler: Any) -> dict[int, dict[str, Any]] | None:
    """Return what a GradScaler notes of each optimizer between two calls of ``update()``."""
    found = getattr(scaler, "_per_optimizer_states", None)
    return found if isinstance(found, dict) else None


@functools.cache
def _parameters_of_init_group(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def init_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Make the state of a group as ``step()`` would: by ``_init_group``, which returns it in lists.

    The lists differ by optimizer and release. AdamW's on 2.6 has ``amsgrad`` among them, which is
    no list but the option of that name, so an argument named like an option gets the option.
    https://github.com/pytorch/pytorch/blob/v2.6.0/torch/optim/adamw.py#L132
    """
    make = getattr(optimizer, "_init_group", None)
    if make is None:
        return
    names = _parameters_of_init_group(make.__func__ if inspect.ismethod(make) else make)
    first = 2 if inspect.ismethod(make) else 1  # after self and group
    # SGD names the list that it fills "params", as the group names its parameters.
    make(group, *[[] if name == "params" else group.get(name, []) for name in names[first:]])


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return ``optimizer.step`` without the hooks that run before and after it.

    ``Optimizer.profile_hook_step`` puts them around the ``step`` of the class.
    """
    step: Any = type(optimizer).step
    return functools.partial(step.__wrapped__ if hasattr(step, "hooked") else step, optimizer)


_disable_torch_dispatch: Callable[[], contextlib.AbstractContextManager[None]] = getattr(
    torch._C, "_DisableTorchDispatch", contextlib.nullcontext
)


def call_unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function(*args)`` so that no mode sees it and autograd records nothing.

    A transaction is no part of the step: FLOP counters and loggers are not to count its copies.
    """
    with without_torch_function(), _disable_torch_dispatch():
        return call_with_grad(False, function, *args)


def copy_all(targets: list[Any], sources: list[Any]) -> None:
    """Copy each source into its target: one call of torch, on a GPU one kernel per dtype."""
    if targets:
        torch._foreach_copy_(targets, sources)


def call_while_tracing(function: Callable[[], int]) -> None:
    """Let Dynamo call a function while it traces a call of it; its result is a constant then.

    As ``torch.compiler.assume_constant_result`` does, which imports Dynamo first.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/decorators.py
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


class FusedProgress(NamedTuple):
    """How far a fused ``step()`` got before it raised, read from its traceback."""

    stepped: list[torch.Tensor]
    """Parameters whose kernel has run."""

    counted: list[torch.Tensor]
    """Step counters that were incremented for a kernel that has not run."""

    overcounted: list[torch.Tensor]
    """Step counters from which ``found_inf`` has yet to be subtracted; their kernel has run."""


def fused_progress(
    optimizer: torch.optim.Optimizer, traceback: TracebackType | None
) -> FusedProgress | None:
    """Read from a traceback which kernels of a fused ``step()`` have run; None if it can't be told.

    Nothing else tells: a fused kernel does not move the version counters of what it writes
    (measured on 2.6 to 2.15). ``step`` takes one group after the other, and within a group
    ``_fused_adam`` and its like take one device and dtype after the other: increment the step
    counters, run the kernel, and with a GradScaler subtract ``found_inf`` from the counters.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py#L802
    """
    groups = optimizer.param_groups
    progress: FusedProgress | None = None
    while traceback is not None:
        frame, offset = traceback.tb_frame, traceback.tb_lasti
        name, held = frame.f_code.co_name, frame.f_locals
        if name == "wrapper" and held.get("self") is optimizer:
            finished = "out" in held  # what step() returned: a hook after it has raised
            progress = FusedProgress(_with_gradient(groups if finished else []), [], [])
        elif name == "step" and held.get("self") is optimizer:
            place = next((i for i, g in enumerate(groups) if g is held.get("group")), 0)
            progress = FusedProgress(_with_gradient(groups[:place]), [], [])
        elif name.startswith("_fused_") and progress is not None:
            return _progress_in_group(progress, frame, offset)
        traceback = traceback.tb_next
    return progress


def _with_gradient(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [p for group in groups for p in group["params"] if p.grad is not None]


def _progress_in_group(before: FusedProgress, frame: FrameType, offset: int) -> FusedProgress:
    held = frame.f_locals
    current = held.get("device_params")
    if current is None:  # no kernel of this group yet
        return before
    stepped, counters = list(before.stepped), held.get("device_state_steps") or []
    for lists, _ in held["grouped_tensors"].values():
        if lists[0][0] is current[0]:
            break
        stepped += lists[0]
    kernel, correction = _offsets(frame.f_code)
    if offset >= correction:
        return FusedProgress(stepped + current, [], counters)
    return FusedProgress(stepped, counters if offset >= kernel else [], [])


@functools.cache
def _offsets(code: CodeType) -> tuple[int, int]:
    """Return where the kernel is named in the code of ``_fused_adam``, and the correction."""
    kernel = correction = sys.maxsize
    for instruction in dis.get_instructions(code):
        argument = instruction.argval
        if isinstance(argument, str) and argument.startswith("_fused_"):
            kernel = min(kernel, instruction.offset)
        elif argument == "_foreach_sub_":
            correction = min(correction, instruction.offset)
    return kernel, correction


def subtract(counters: list[torch.Tensor], amount: Any) -> None:
    """Subtract a number, or a tensor of one element, from step counters."""
    if counters and isinstance(amount, torch.Tensor):
        torch._foreach_sub_(counters, [amount.to(counters[0].device)] * len(counters))
    elif counters:
        torch._foreach_sub_(counters, amount)


def wrap_step(optimizer: torch.optim.Optimizer, wrap: Callable[[Any], Any]) -> None:
    """Put ``wrap(step)`` between the hooks of ``optimizer.step()`` and the step itself, once.

    No hook sees an exception. ``Optimizer.profile_hook_step`` keeps the step in a cell, ``func``,
    and reads it after the pre-hooks, so from a pre-hook it is changed for the call that runs too.
    A class of somebody's own that hooks its step in another way is left alone.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py#L500
    """
    cell = _cell_of_step(type(optimizer))
    if cell is not None and id(cell) not in _wrapped_cells:
        _wrapped_cells[id(cell)] = cell, cell.cell_contents
        cell.cell_contents = wrap(cell.cell_contents)


def unwrap_steps() -> None:
    """Take away what :func:`wrap_step` has put anywhere."""
    while _wrapped_cells:
        _, (cell, original) = _wrapped_cells.popitem()
        cell.cell_contents = original


_wrapped_cells: dict[int, tuple[CellType, Any]] = {}


def _cell_of_step(kind: type) -> CellType | None:
    step: Any = getattr(kind, "step", None)
    names = getattr(getattr(step, "__code__", None), "co_freevars", ())
    if not getattr(step, "hooked", False) or "func" not in names:
        return None
    return step.__closure__[names.index("func")]  # type: ignore[no-any-return]
