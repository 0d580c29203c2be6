"""What every optimizer of the process calls: transactions, and ``install("optimizer")``."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchguard._torch import patch
from torchguard._torch.optimizers import call_while_tracing, unwrap_steps, wrap_step
from torchguard.rollback.interrupts import SignalsHeldBack
from torchguard.transactions import fused
from torchguard.transactions.commit import (
    OptimizerStep,
    add_note,
    steps_in_one_call,
)
from torchguard.transactions.copies import forget_states, state_tensors

if TYPE_CHECKING:
    from torchguard.transactions.step import Transaction

__all__ = ["changed", "not_needed", "opened", "replacements", "step_is_compiled", "watch"]


# --- transactions ----------------------------------------------------------------------------

opened: list[Transaction] = []
_alive: list[weakref.ref[Transaction]] = []
_watching: list[Any] = []


def watch(step: Transaction) -> None:
    """Let optimizers call a transaction, and fused CPU steps be right, as long as it lives."""
    with patch.lock:  # other threads make transactions too, or collect their last one
        _alive.append(weakref.ref(step, _forget))
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_before_step))
            _watching.append(register_optimizer_step_post_hook(_after_step))
            patch.apply(fused.replacements().items())


def _forget(_: object) -> None:
    # Python drops what a finalizer raises and does not call it again, so an interrupt in the middle
    # would leave hooks or patches for good. One before it leaves a dead reference, for the next.
    signals = SignalsHeldBack()
    try:
        with patch.lock:
            _alive[:] = [each for each in _alive if each() is not None]
            if not _alive and _watching:
                while _watching:
                    _watching.pop().remove()
                patch.undo(fused.replacements(), leave_conflicts=True)
                forget_states()
    finally:
        signals.let_go()


_compiled = False


def step_is_compiled() -> bool:
    """Whether a compiled function has an optimizer's step in it."""
    return _compiled


def _note_compiled() -> int:
    """Note that Dynamo traces a step: it will run without the hooks.

    Called while tracing, so before the step: what it writes is copied now, and from the next block
    on when the block begins.
    """
    global _compiled
    _compiled = True
    for step in tuple(opened):
        for block in step.saved:
            block.snapshot.copy_parameters()
    return 0


call_while_tracing(_note_compiled)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        _note_compiled()
        return
    for step in tuple(opened):
        step.before_step(optimizer, args, kwargs)


# torch calls this where the step has gone through; it has no hook for a step that raises.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py#L500
def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for step in tuple(opened):
        step.after_step(optimizer)


# --- install("optimizer") --------------------------------------------------------------------

MAX_BYTES = "TORCHGUARD_OPTIMIZER_COPY_BYTES"
"""Environment variable: the largest copy that is made of parameters and state for one step.

Without it a copy may take half of the memory that is free where the parameters are.
"""

_SCALER = "torch.amp.grad_scaler.GradScaler._lazy_init_scale_growth_tracker"
_handles: list[Any] = []
_may_copy: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
"""Whether there was room for copies when an optimizer stepped first."""


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
            _handles.append(register_optimizer_step_pre_hook(_guard_step))
    else:
        while _handles:
            _handles.pop().remove()
        unwrap_steps()
        _may_copy.clear()
        forget_states()


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


def _guard_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        wrap_step(optimizer, _guarded)


def _guarded(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def guarded_step(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0]
        if torch.compiler.is_compiling() or any(
            each is optimizer for transaction in opened for each in transaction.optimizers
        ):
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
    if steps_in_one_call(optimizer) and not with_closure:
        return OptimizerStep(optimizer, copies=False, in_one_call=True)
    if optimizer not in _may_copy:
        _may_copy[optimizer] = _there_is_room(optimizer)
    return (
        OptimizerStep(optimizer, copies=True, in_one_call=False) if _may_copy[optimizer] else None
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
