"""What every optimizer of the process calls while there is a transaction."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchguard._torch import patch
from torchguard._torch.optimizers import call_while_tracing
from torchguard.transactions import fused
from torchguard.transactions.commit import SignalsHeldBack

if TYPE_CHECKING:
    from torchguard.transactions.step import Transaction

__all__ = ["opened", "step_is_compiled", "watch"]

opened: list[Transaction] = []
_alive: list[weakref.ref[Transaction]] = []
_handles: list[Any] = []


def watch(step: Transaction) -> None:
    """Let optimizers call a transaction, and fused CPU steps be right, as long as it lives."""
    with patch.lock:  # other threads make transactions too, or collect their last one
        _alive.append(weakref.ref(step, _forget))
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_before_step))
            _handles.append(register_optimizer_step_post_hook(_after_step))
            patch.apply(fused.replacements().items())


def _forget(_: object) -> None:
    # Python drops what a finalizer raises and does not call it again, so an interrupt in the middle
    # would leave hooks or patches for good. One before it leaves a dead reference, for the next.
    signals = SignalsHeldBack()
    try:
        with patch.lock:
            _alive[:] = [each for each in _alive if each() is not None]
            if not _alive and _handles:
                while _handles:
                    _handles.pop().remove()
                patch.undo(fused.replacements(), leave_conflicts=True)
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
