"""An open block of a transaction, and the hooks by which optimizers tell it that they step."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchguard._events import record
from torchguard._pytree import KeyPath
from torchguard._torch import patch
from torchguard._torch.dynamo import frame_callback, is_compiling_here, mark_untraced
from torchguard._torch.eager import (
    call_unseen,
    call_while_tracing,
    can_make_state,
    has_own_dispatch,
    make_state,
    per_optimizer_states,
    same_tensors,
    scale_version,
    steps_on_stack,
    steps_read_global_hooks,
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
)
from torchguard.training_setup import FirstSteps, StepsOutside
from torchguard.transactions.ranks import Ranks

_NAME = "transaction"

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
        """Let optimizers call this block."""
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
            if self._pending is None and not _is_guarded(optimizer):
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
            snapshots = list(map(OptimizerSnapshot, every))
            # PyTorch's steps write no options and no attributes, other libraries' may.
            self._states = [
                saved.state if is_of_torch(each) else saved
                for each, saved in zip(every, snapshots, strict=True)
            ]
            written = [p for each in every for group in each.param_groups for p in group["params"]]
            written += [tensor for saved in snapshots for tensor in saved.state.held]
            self.copies = Elements(written, reuse)
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


# --- a step that is skipped ------------------------------------------------------------------


class NonfiniteGate:
    """Takes the gradients away for one ``optimizer.step()`` if one of them is not finite.

    A parameter without a gradient is left alone by every optimizer of PyTorch.
    """

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        """If it is not finite, the steps of this block are skipped, whatever the gradients."""
        self.taken_away: list[tuple[Tensor, Tensor]] = []
        """Parameters and their gradients, during a step that is skipped."""
        self.skipped = 0
        """How many steps were skipped."""

    def of_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Look at the gradients, or let the closure do so; return the arguments of the step."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.before(optimizer)
        elif len(args) > 1:
            args = (args[0], self.after_closure(optimizer, closure), *args[2:])
        else:
            kwargs = {**kwargs, "closure": self.after_closure(optimizer, closure)}
        return args, kwargs

    def before(self, optimizer: Optimizer) -> None:
        """Find out whether the step is to be skipped; the host waits for the device."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        present = [(p, p.grad) for p in parameters if p.grad is not None]
        with torch.no_grad():
            finite = _all_finite([gradient for _, gradient in present], self.loss)
        if not finite:
            self.skipped += 1
            self.taken_away = present
            for parameter, _ in present:
                parameter.grad = None

    def after_closure(self, optimizer: Optimizer, given: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that calls :meth:`before` when it has made the gradients."""

        @functools.wraps(given)
        def closure() -> Any:
            loss = given()
            self.before(optimizer)
            return loss

        return closure

    def restore_gradients(self) -> None:
        """Let parameters have the gradients that :meth:`before` took away for a step."""
        for parameter, gradient in self.taken_away:
            parameter.grad = gradient
        self.taken_away = []


def _all_finite(gradients: list[Tensor], loss: Tensor | None) -> bool:
    """Whether loss and gradients are finite, by one question to the device.

    The largest magnitude is finite just if every element is: it does not overflow, as a sum of
    squares does, and a NaN stays a NaN.
    """
    values = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    with_elements = [each for each in values if each.numel() > 0]  # no elements, no norm
    finite = torch.ones((), dtype=torch.bool) if loss is None else torch.isfinite(loss).all()
    if with_elements:
        largest = torch.nn.utils.get_total_norm(with_elements, float("inf"))
        finite = torch.isfinite(largest) & finite.to(
            largest.device, non_blocking=not largest.is_cpu
        )
    return bool(finite)


# --- hooks -----------------------------------------------------------------------------------

opened: list[Block] = []
"""Blocks that are open, of all threads."""
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
        if guarded is not None and guarded.outside.are_looked_for and not _is_guarded(optimizer):
            guarded.outside.step_ends(guarded.training, optimizer)


def _is_guarded(optimizer: Optimizer) -> bool:
    """Whether a block is open whose transaction has an optimizer."""
    return any(optimizer in block.guarded.training.all_optimizers() for block in tuple(opened))


# Past its limit of recompilations Dynamo runs the one hook, and may still trace the other.
mark_untraced(_note_step)
