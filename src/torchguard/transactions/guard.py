"""What ``install("optimizer")`` does: a ``step()`` that raises has changed nothing."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchguard._torch import patch
from torchguard._torch.optimizers import unwrap_steps, wrap_step
from torchguard.transactions import fused
from torchguard.transactions.commit import (
    IN_TRANSACTION,
    OptimizerStep,
    Prepared,
    add_note,
    steps_in_one_call,
)
from torchguard.transactions.containers import StateContainers
from torchguard.transactions.copies import state_tensors

__all__ = ["changed", "not_needed", "replacements"]

MAX_BYTES = "TORCHGUARD_OPTIMIZER_COPY_BYTES"
"""Environment variable: the largest copy that is made of parameters and state for one step.

Without it a copy may take half of the memory that is free where the parameters are.
"""

_SCALER = "torch.amp.grad_scaler.GradScaler._lazy_init_scale_growth_tracker"
_handles: list[Any] = []
_last: weakref.WeakKeyDictionary[Optimizer, _Last] = weakref.WeakKeyDictionary()


class _Last:
    """What was found at an optimizer's last step, and is true as long as nothing is replaced."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.state = StateContainers(optimizer)
        self.prepared = Prepared()
        self.copies: bool | None = None


def replacements() -> Mapping[str, patch.Make]:
    """Return what ``install("optimizer")`` patches; optimizers are reached through their hooks."""
    return {_SCALER: _guard_lazy_init, **fused.replacements()}


def not_needed() -> str | None:
    """Return None: no release so far undoes a step, and to try one imports Dynamo."""
    return None


def changed() -> None:
    """Register the hook that every ``step()`` calls, or take it and its traces away."""
    if patch.patched(_SCALER):
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_before_step))
    else:
        while _handles:
            _handles.pop().remove()
        unwrap_steps()
        _last.clear()


def _guard_lazy_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def lazy_init(scaler: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(scaler, *args, **kwargs)
        except BaseException:
            # The scale without the tracker: every later call would raise.
            scaler._scale = scaler._growth_tracker = None
            raise

    return lazy_init


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        wrap_step(optimizer, _guarded)


def _guarded(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def guarded_step(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0]
        if torch.compiler.is_compiling() or any(each is optimizer for each in IN_TRANSACTION):
            return step(*args, **kwargs)
        prepared = _prepare(optimizer, with_closure=len(args) > 1 or bool(kwargs))
        if prepared is None:
            return step(*args, **kwargs)
        try:
            result = step(*args, **kwargs)
        except BaseException as error:
            if prepared.fail(error):
                add_note(error, "torchguard: this optimizer step was finished, so it counts")
            raise
        prepared.succeed()
        return result

    return guarded_step


def _prepare(optimizer: Optimizer, *, with_closure: bool) -> OptimizerStep | None:
    if isinstance(optimizer, torch.optim.LBFGS):  # steps many times in one step()
        return None
    last = _last.get(optimizer)
    if last is None or not last.state.are_current(optimizer):
        before, last = last, _Last(optimizer)
        if before is not None:
            last.prepared, last.copies = before.prepared, before.copies
        _last[optimizer] = last
    in_one_call = steps_in_one_call(optimizer) and not with_closure
    if not in_one_call and last.copies is None:
        last.copies = _there_is_room(optimizer)
    if not in_one_call and not last.copies:
        return None
    return OptimizerStep(
        optimizer,
        last.state,
        copies=not in_one_call,
        in_one_call=in_one_call,
        prepared=last.prepared,
    )


def _there_is_room(optimizer: Optimizer) -> bool:
    parameters: list[Tensor] = [
        each for group in optimizer.param_groups for each in group["params"]
    ]
    tensors = [*parameters, *state_tensors(optimizer)]
    # Before the first step the state is not there yet; Adam's is twice the parameters.
    needed = max(sum(each.nbytes for each in tensors), 3 * sum(each.nbytes for each in parameters))
    limit = os.environ.get(MAX_BYTES)
    room = int(limit) if limit else _free_bytes(parameters) // 2
    if needed <= room:
        return True
    warnings.warn(
        f"torchguard: {type(optimizer).__name__}.step() is not undone if it raises: a copy of its "
        f"parameters and state takes {needed >> 20} MiB, the limit is {room >> 20} MiB; set "
        f"{MAX_BYTES}, or use fused=True, which needs no copy",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _free_bytes(parameters: list[Tensor]) -> int:
    if parameters and parameters[0].is_cuda:
        return torch.cuda.mem_get_info(parameters[0].device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return 1 << 62
