"""An open block of a transaction: what it saves, when, and how it ends."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchguard._events import record
from torchguard._pytree import KeyPath
from torchguard._torch.eager import (
    call_unseen,
    can_make_state,
    has_own_dispatch,
    make_state,
    per_optimizer_states,
    same_tensors,
    scale_version,
    steps_on_stack,
)
from torchguard.errors import UnrecoverableStepError, with_causes
from torchguard.state.process import DeferredSignals, ThreadModes, open_steps, roll_back
from torchguard.state.tensors import Elements, failures_in, warn_if_refused
from torchguard.state.training import (
    BufferCopies,
    OptimizerSnapshot,
    TrainingState,
    is_of_torch,
    optimizers_of,
    state_of,
)
from torchguard.training_setup import FirstSteps, StepsOutside
from torchguard.transactions.nonfinite import NonfiniteGate
from torchguard.transactions.ranks import Ranks

Undo = Literal["auto", "copy", "none"]


@dataclass(eq=False)
class Guarded:
    """What a transaction answers for, and what one block leaves to the next."""

    training: TrainingState
    undo: Undo
    scaler: Any
    schedulers: tuple[Any, ...]
    gate: NonfiniteGate | None
    ranks: Ranks | None
    first_steps: dict[Optimizer, FirstSteps]
    """Empty from the second step of each optimizer on."""
    outside: StepsOutside
    kept: dict[Optimizer, Elements] = field(default_factory=dict)
    """Copies of an optimizer's last step, whose lists and memory the next one uses again."""
    compiled: set[Optimizer] = field(default_factory=set)
    """Those whose step Dynamo has traced: it runs without the hooks."""
    accumulation: BufferCopies | None = None
    """Those of the first block since the last step, for ``skip_nonfinite``."""
    accumulation_is_known: bool = False
    """Whether ``also`` has the Accelerator whose ``accumulate`` counts, or its lack was said."""
    loss_is_known: bool = False
    """Whether ``run`` knows that the loss function does not call ``backward()``."""
    sharded: str | None = None
    """Why no block can be opened, if ``also`` has a model of FSDP: only its state is saved."""
    epochs: dict[int, int | None] = field(default_factory=dict)
    """Where ``run`` has left each scheduler."""
    lists: dict[KeyPath, bool] = field(default_factory=dict)
    """What ``run`` has seen of the lists in batches: whether each has an entry for each sample."""
    loop_steps_too: bool = False
    """Whether it was said that the loop steps a scheduler beside ``run``."""


class Block:
    """One ``with`` statement: the training before it, and what its optimizers have done."""

    def __init__(self, guarded: Guarded) -> None:
        self.guarded = guarded
        self.modes = ThreadModes.capture()
        self.snapshot = guarded.training.capture(parameters=guarded.undo == "copy")
        self._scale = self._scale_now()
        self._scaler_at_step: Elements | None = None
        self._epochs = [getattr(each, "last_epoch", None) for each in guarded.schedulers]
        self._stepped: list[OptimizerStep] = []
        self._pending: OptimizerStep | None = None
        self._skipped: set[Optimizer] = set()
        self._foreign: str | None = None
        self._signals: DeferredSignals | None = None
        """Those that wait from the first step to the end of the block."""

    def _scale_now(self) -> int:
        """Return a number that ``scaler.update()`` moves on."""
        return 0 if self.guarded.scaler is None else scale_version(self.guarded.scaler)

    def open(self) -> None:
        """Let the hooks of optimizers call this block."""
        changed = self.guarded.training.changed_by_a_step
        open_steps[id(self)] = threading.get_ident(), changed
        opened.append(self)

    # What the hooks of optimizers call.

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Prepare a step, so that it can be rolled back; return its arguments."""
        guarded, by = self.guarded, optimizer
        pending = self._pending
        if pending is not None and pending.goes_on_around(by):
            pending.include(by, guarded.training)
            return args, kwargs
        if by in guarded.training.inside:  # SAM.second_step() calls that of the one in it
            optimizer = guarded.training.inside[by]
        elif by not in guarded.training.optimizers:
            self._note_unknown_optimizer(by)
            return args, kwargs
        self.settle(None)  # what the last step raised was caught inside the block
        if self._signals is None:
            self._signals = DeferredSignals(at_most=1)
        with_closure = len(args) > 1 or bool(kwargs)
        if guarded.gate is not None:
            args, kwargs = guarded.gate.of_step(optimizer, args, kwargs)
        last, fused = self._is_last(optimizer), steps_fused(optimizer)
        if guarded.undo == "auto":
            copies = with_closure or not last or not fused
        else:
            copies = guarded.undo == "copy"
        reuse = guarded.kept.pop(optimizer, None)
        inside = [each for each, outer in guarded.training.inside.items() if outer is optimizer]
        pending = OptimizerStep(
            optimizer, by=by, inside=inside, copies=copies, fused=fused, reuse=reuse
        )
        if guarded.ranks is not None and last and not copies:
            guarded.ranks.agree_to_commit()
        if optimizer in guarded.first_steps:
            guarded.first_steps[optimizer].before_step()
        self._pending = pending
        return args, kwargs

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        pending, guarded = self._pending, self.guarded
        if pending is None or pending.by is not optimizer:
            return
        if pending.is_nesting and steps_on_stack(optimizer) > 1:
            return
        optimizer = pending.optimizer
        if guarded.ranks is not None and self._is_last(optimizer):
            guarded.ranks.agree_to_commit()  # if it raises, the step is rolled back
        skipped = guarded.gate is not None and bool(guarded.gate.taken_away)
        if guarded.gate is not None:
            if skipped:
                name = type(optimizer).__name__
                record("step_skipped", "transaction", f"a step of {name} was not finite")
                if not is_of_torch(optimizer):
                    roll_back(pending.undo)  # another library's may count the step
                self._restore_buffers(optimizer)
            guarded.gate.restore_gradients()
        self._pending = None
        self._stepped.append(pending)
        if guarded.scaler is not None:
            values = vars(guarded.scaler).values()
            self._scaler_at_step = Elements(each for each in values if isinstance(each, Tensor))
        # Autocast keeps its cast of a weight by the weight, whatever its version.
        # https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/autocast_mode.cpp
        torch.clear_autocast_cache()
        first = None if skipped else guarded.first_steps.get(optimizer)
        if first is not None and first.after_step():
            del guarded.first_steps[optimizer]

    def _restore_buffers(self, skipped: Optimizer) -> None:
        """Restore buffers to when the gradients of a step that was skipped began.

        With several optimizers, those of modules whose every optimizer was skipped.
        """
        self._skipped.add(skipped)
        training, began = self.guarded.training, self.guarded.accumulation
        buffers = self.snapshot.buffers
        if began is not None and self.snapshot.has_gradients:
            buffers = began
        owners = optimizers_of(training.modules, training.optimizers)
        buffers.restore(keep=[m for m, those in owners.items() if not those <= self._skipped])

    def _is_last(self, optimizer: Optimizer) -> bool:
        steps = [*self._stepped, *filter(None, [self._pending])]
        stepped = {optimizer, *(each.optimizer for each in self._stepped)}
        stepped.update(each for step in steps for each in step.included)
        return stepped >= set(self.guarded.training.optimizers)

    def _note_unknown_optimizer(self, optimizer: Optimizer) -> None:
        if self.guarded.training.shares_parameters(optimizer, modules=True):
            self._foreign = (
                f"{type(optimizer).__name__}, which the transaction was not given, has stepped "
                "over its parameters: pass every optimizer to transaction()"
            )
            if self._pending is None and not is_guarded(optimizer):
                self.guarded.outside.say_once("optimizer-not-given", self._foreign)

    # The end of the block.

    def settle(self, exception: BaseException | None) -> None:
        """Roll back a step that has raised."""
        # No hook of PyTorch is called for a step() that raises. A block that catches it goes on, so
        # the next step, or the end of the block, comes upon it here.
        if self.guarded.gate is not None:
            self.guarded.gate.restore_gradients()
        if self._pending is not None:
            self._pending.fail(exception)
        self._pending = None

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped."""
        return bool(self._stepped) or self._foreign is not None

    def all_have_stepped(self) -> bool:
        """Whether every optimizer has stepped."""
        return bool(self._stepped) and self._is_last(self._stepped[-1].optimizer)

    def counts(self) -> bool:
        """Whether the step counts, of a block that did not raise.

        A GradScaler calls no ``step()`` after an overflow: there it is ``update()`` that counts. Of
        a step that is compiled the writes are seen.
        """
        stepped = {step.optimizer for step in self._stepped}
        stepped.update(each for step in self._stepped for each in step.included)
        return self._scale_now() != self._scale or all(
            each in stepped or (each in self.guarded.compiled and self.snapshot.has_written(each))
            for each in self.guarded.training.optimizers
        )

    def note_accumulation(self) -> None:
        """Keep the buffers of the first block whose gradients wait for a step in a later one."""
        guarded = self.guarded
        if guarded.gate is None or self._stepped:
            guarded.accumulation = None
        elif guarded.accumulation is None or not self.snapshot.has_gradients:
            guarded.accumulation = self.snapshot.buffers

    def roll_back(self) -> list[str]:
        """Restore the training to the beginning of the block; return what could not be restored.

        Signals have to be deferred.
        """
        problems: list[str] = []
        with failures_in(problems):
            warn_if_refused(self.snapshot.wait, failure="waiting for the device")
            for step in reversed(self._stepped):
                if step.copies is None:
                    name = type(step.optimizer).__name__
                    problems.append(f"{name} has stepped, and undo='none' keeps no copies")
                warn_if_refused(step.undo, failure=f"{type(step.optimizer).__name__}.step()")
            if self._foreign is not None:
                problems.append(self._foreign)
            elif self.guarded.undo != "none" and self.snapshot.written():
                problems.append(
                    "the block wrote parameters outside of optimizer.step(), and undo='auto' "
                    "copies them only there: use undo='copy'"
                )
            self.snapshot.restore()
        return problems

    def finish_step(self, exception: BaseException) -> str:
        """Complete a step that counts though its block raised; return a note for the exception."""
        notes = ["torchguard: the optimizers had stepped already, so this training step counts"]
        guarded = self.guarded
        for optimizer in guarded.training.all_optimizers():
            # What scaler.step() hands to a fused optimizer, and deletes at its end: a scale that
            # stays is multiplied with the next one.
            saved = self.snapshot.optimizers.get(id(optimizer))  # None: made in this block
            now, before = vars(optimizer), {} if saved is None else saved.attributes
            for name in ("grad_scale", "found_inf"):
                now.pop(name, None)
                now.update({name: before[name]} if name in before else {})
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        notes.append("its gradients are dropped")
        states = per_optimizer_states(guarded.scaler)
        if states:
            if self._scaler_at_step is not None:
                self._scaler_at_step.restore()  # update() may have raised in its middle
            notes.append(_update(guarded.scaler, states))
        notes += [
            f"{type(scheduler).__name__} has not stepped, call its step()"
            for scheduler, epoch in zip(guarded.schedulers, self._epochs, strict=True)
            if getattr(scheduler, "last_epoch", None) == epoch or _raised_in(exception, scheduler)
        ]
        return "; ".join(notes)

    def close(self) -> None:
        """Let go of everything; a signal that was deferred arrives now."""
        guarded = self.guarded
        if guarded.gate is not None:
            guarded.gate.restore_gradients()
            guarded.gate.loss = None
        for step in filter(None, (*self._stepped, self._pending)):
            if step.copies is not None:
                guarded.kept[step.optimizer] = step.copies.for_reuse()
        self._stepped, self._pending = [], None
        if self in opened:
            opened.remove(self)
        open_steps.pop(id(self), None)
        if self._signals is not None:
            signals, self._signals = self._signals, None
            signals.restore_handlers()


def _update(scaler: Any, states: dict[int, Any]) -> str:
    """Call ``scaler.update()``, so that the next step finds the scaler ready."""
    try:
        scaler.update()
    except Exception as error:  # noqa: BLE001  the exception on its way is the one to see
        states.clear()
        return f"the scaler keeps its scale ({error})"
    return "the scaler was updated"


def _raised_in(exception: BaseException, owner: Any) -> bool:
    """Whether an exception, or one that caused it, went through a method of an object."""
    return any(
        frame.f_locals.get("self") is owner
        for each in with_causes(exception)
        for frame, _ in traceback.walk_tb(each.__traceback__)
    )


opened: list[Block] = []
"""Blocks that are open, of all threads."""


def is_guarded(optimizer: Optimizer) -> bool:
    """Whether a block is open whose transaction has an optimizer."""
    return any(optimizer in block.guarded.training.all_optimizers() for block in tuple(opened))


# --- one optimizer.step() ---


def steps_fused(optimizer: Optimizer) -> bool:
    """Whether ``step()`` runs PyTorch's fused kernels and nothing that allocates memory.

    That is so once its state is there. SGD with dampening makes it in its first step.
    """
    return (
        is_of_torch(optimizer)
        and can_make_state(optimizer)
        and all(
            group.get("fused")
            and not group.get("differentiable")
            and not group.get("dampening")
            # Parameters that are DTensors; no kernel of PyTorch takes them with plain tensors.
            and not any(map(has_own_dispatch, group["params"][:1]))
            for group in optimizer.param_groups
        )
    )


class OptimizerStep:
    """A call of ``step()`` that a block has seen begin, and what rolls it back."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        copies: bool,
        by: Optimizer | None = None,
        inside: Sequence[Optimizer] = (),
        fused: bool = False,
        reuse: Elements | None = None,
    ) -> None:
        """``inside`` are the optimizers that this one holds; ``by`` is the one that was called.

        ``reuse`` are the copies of an earlier step, whose memory is used again.
        """
        self.optimizer = optimizer
        self.by = optimizer if by is None else by
        self.included: dict[Optimizer, OptimizerStep] = {}
        """Steps of other optimizers inside of this one, which it was not known to hold."""
        self.is_nesting = False
        """Whether it has called ``super().step()``, which has hooks of its own."""
        self.copies: Elements | None = None
        if copies:
            every = (optimizer, *inside)
            # PyTorch's steps write no options and no attributes, other libraries' may.
            self._states = [
                state_of(each) if is_of_torch(each) else OptimizerSnapshot(each) for each in every
            ]
            trained = [p for each in every for group in each.param_groups for p in group["params"]]
            held = [tensor for each in every for tensor in state_of(each).held]
            # The version counters of moments go on: no graph saves a moment, and to read them takes
            # a fifth of the time.
            self.copies = Elements([*trained, *held], reuse, counted=trained)
        elif fused and _lacks_state(optimizer):
            _make_whole_state(optimizer)

    def goes_on_around(self, optimizer: Optimizer) -> bool:
        """Whether a step that begins is inside of this one, by ``super().step()`` or so."""
        return steps_on_stack(self.by) > (self.by is optimizer)

    def include(self, optimizer: Optimizer, training: TrainingState) -> None:
        """Note, before an optimizer steps inside of this step, that it is a part of it."""
        if optimizer is self.by:
            self.is_nesting = True
            return
        if training.inside.get(optimizer) is self.optimizer or optimizer in self.included:
            return
        self.included[optimizer] = OptimizerStep(optimizer, copies=self.copies is not None)
        if optimizer not in training.optimizers:
            training.inside[optimizer] = self.optimizer

    def undo(self) -> None:
        """Restore what the step may have written from its copies, if there are any."""
        for step in self.included.values():
            step.undo()
        if self.copies is not None:
            for state in self._states:
                state.restore()
            self.copies.restore()

    def fail(self, error: BaseException | None) -> None:
        """Roll back the step, which has raised.

        Raises:
            UnrecoverableStepError: there are no copies.
        """
        if self.copies is None:
            raise UnrecoverableStepError(
                f"{type(self.optimizer).__name__}.step() raised, and of "
                + ("a fused step" if steps_fused(self.optimizer) else "a step with undo='none'")
                + " there are no copies: load a checkpoint, or use undo='copy'"
            ) from error
        roll_back(self.undo)


def _lacks_state(optimizer: Optimizer) -> bool:
    """Whether a fused step has to make state before its kernels run."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if same_tensors(list(optimizer.state), every) and all(optimizer.state.values()):
        return False
    return any(
        not optimizer.state.get(parameter)
        for group in optimizer.param_groups
        if group.get("momentum", True)  # SGD without momentum has none
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _make_whole_state(optimizer: Optimizer) -> None:
    """Make the state of all parameters, so that memory runs out before the first is written.

    ``_fused_sgd`` makes its momentum by ``empty_like`` and lets the kernel fill it. Minus zero
    changes no bit: ``momentum * -0.0 + gradient`` is the gradient, its zeros' signs included.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/sgd.py#L511
    """
    before = OptimizerSnapshot(optimizer)
    try:
        call_unseen(make_state, optimizer)
        for group in optimizer.param_groups:
            if not (group.get("momentum") and "dampening" in group):
                continue
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if parameter.grad is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = call_unseen(torch.full_like, parameter, -0.0)
    except BaseException:
        roll_back(before.restore)
        raise
