"""What optimizers call: the hooks by which open blocks learn that one steps, and where they do not.

Compiled steps run without hooks, and so does what a CUDA graph replays.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchguard._torch import patch
from torchguard._torch.dynamo import frame_callback, is_compiling_here, mark_untraced
from torchguard._torch.eager import call_while_tracing, steps_on_stack, steps_read_global_hooks
from torchguard.state.process import DeferredSignals
from torchguard.transactions.block import Guarded, is_guarded, opened

_NAME = "transaction"

_alive: list[weakref.ref[Guarded]] = []
_watching: list[Any] = []


def watch(guarded: Guarded) -> None:
    """Let optimizers call the blocks of a transaction as long as it lives."""
    _try_hooks()
    if torch.cuda.is_initialized():
        patch.apply(_NAME, {"torch.cuda.CUDAGraph.replay": _note_replay})
    with patch.lock:  # other threads make transactions too, or collect their last one
        _alive.append(weakref.ref(guarded, _forget))
        if any(id(each) in _traced for each in guarded.training.optimizers):
            while _watching:  # Dynamo traces a step again if it has other hooks
                _watching.pop().remove()
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_before_step))
            _watching.append(register_optimizer_step_post_hook(_after_step))


def _forget(_: object) -> None:
    # Python drops what a finalizer raises and does not call it again, so an interrupt in the middle
    # would leave hooks for good. One before it leaves a dead reference, for the next.
    signals = DeferredSignals()
    try:
        with patch.lock:
            _alive[:] = [each for each in _alive if each() is not None]
            # Collected in the middle of a compilation: Dynamo looks up the hooks that it has seen.
            # They stay, and do nothing, until the next transaction ends.
            while not _alive and _watching and not is_compiling_here():
                _watching.pop().remove()
            if not _alive:
                patch.undo(_NAME, leave_conflicts=True)
    finally:
        signals.restore_handlers()


@functools.cache
def _try_hooks() -> None:
    """Raise if on this torch ``optimizer.step()`` does not call its hooks.

    It is not tried where other code has registered hooks, which would see an optimizer of ours.
    """

    class Innermost(Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    class Outer(Innermost):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    # Each puts the hooks around the step of its class.
    _, probe = Innermost([torch.zeros(1)], {}), Outer([torch.zeros(1)], {})
    nested: list[bool] = []

    def note(optimizer: Optimizer, *_: Any) -> None:
        nested.append(steps_on_stack(optimizer) > 1)

    handles = [register_optimizer_step_pre_hook(note), register_optimizer_step_post_hook(note)]
    try:
        others = any(len(handle.hooks_dict_ref() or ()) > 1 for handle in handles)
        if others and steps_read_global_hooks():
            return
        probe.step()
    finally:
        for handle in handles:
            handle.remove()
    if nested != [False, True, True, False]:
        raise RuntimeError(
            f"transaction: on torch {torch.__version__} optimizer.step() does not call its hooks "
            "as expected, so steps can't be seen: please report it to torchguard"
        )


_traced: set[int] = set()
"""The ids of optimizers whose step Dynamo has traced. One that is gone may leave its id to another,
whose transaction has Dynamo trace once more than it needs to."""


def _note_compiled(number: int) -> bool:
    """Note that Dynamo traces the step of an optimizer; return whether blocks refuse it."""
    _traced.add(number)
    refused = False
    for guarded in filter(None, (each() for each in tuple(_alive))):
        for optimizer in guarded.training.optimizers:
            if id(optimizer) == number:
                guarded.compiled.add(optimizer)
                refused |= guarded.undo == "auto"
    return refused


call_while_tracing(_note_compiled)


def _note_replay(original: Callable[..., Any]) -> Callable[..., Any]:
    """Copy what a CUDA graph may write, before a block replays it: no hook, no counter tells."""

    def replay(self: Any) -> Any:
        # torch replays forward and backward passes, which write nothing that is not copied.
        if opened and not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            for block in tuple(opened):
                if block.guarded.undo == "auto":
                    block.snapshot.copy_parameters()
        return original(self)

    return replay


def _refuse_compiled(optimizer: Optimizer) -> None:
    """Raise in a block that would copy what the step writes when it begins, which it can't see."""
    for block in tuple(opened):
        if block.guarded.undo == "auto" and optimizer in block.guarded.training.optimizers:
            raise TypeError(
                f"transaction: {type(optimizer).__name__}.step() is compiled, and compiled code "
                "does not say when a step begins: pass transaction(..., undo='copy'), or leave "
                "optimizer.step() out of torch.compile"
            )


mark_untraced(_refuse_compiled, "transaction() refuses compiled steps unless undo='copy'")


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if torch.compiler.is_compiling():
        if _note_compiled(id(optimizer)):
            _refuse_compiled(optimizer)
        return None
    # Behind install() Dynamo leaves frames of torchguard alone, and the break above leads here.
    if any(optimizer in block.guarded.compiled for block in tuple(opened)) and frame_callback():
        _refuse_compiled(optimizer)
    for block in tuple(opened):
        args, kwargs = block.before_step(optimizer, args, kwargs)
    return args, kwargs


# PyTorch calls this if the step has gone through; it has no hook for a step that raises.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py#L500
def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not torch.compiler.is_compiling() or _note_compiled(id(optimizer)):
        _note_step(optimizer)


def _note_step(optimizer: Optimizer) -> None:
    for block in tuple(opened):
        block.after_step(optimizer)
    for each in tuple(_alive):
        guarded = each()
        if guarded is not None and guarded.outside.are_looked_for and not is_guarded(optimizer):
            guarded.outside.step_ends(guarded.training, optimizer)


# Past its limit of recompilations Dynamo runs the one hook, and may still trace the other.
mark_untraced(_note_step)
