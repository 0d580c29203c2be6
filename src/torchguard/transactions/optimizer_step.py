"""One ``optimizer.step()``: undone or finished when it raises, skipped when it is not finite."""

from __future__ import annotations

import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchguard._torch import has_own_dispatch
from torchguard._torch.fused import FusedLists, FusedProgress, FusedStep, has_fused_lists
from torchguard._torch.optimizers import (
    call_unseen,
    init_group,
    per_optimizer_states,
    step_without_hooks,
)
from torchguard.errors import OptimizerStateError, UnrecoverableStepError
from torchguard.state.interrupts import DeferredSignals, roll_back
from torchguard.transactions.copies import (
    Containers,
    Copies,
    OptimizerSnapshot,
    StateContainers,
    state_of,
    state_tensors,
    undos_of,
)
from torchguard.transactions.state import TrainingSnapshot, TrainingState

Undo = Literal["auto", "copy", "none"]


def steps_in_one_call(optimizer: Optimizer) -> bool:
    """Whether ``step()`` writes parameters and state by fused kernels of torch and nothing else.

    A fused SGD with dampening is not among them: its first step makes the momentum buffers.
    """
    return (
        is_of_torch(optimizer)
        and has_fused_lists(optimizer)
        and all(
            group.get("fused")
            and not group.get("differentiable")
            and not group.get("dampening")
            # Parameters that are DTensors; no kernel of torch takes them with plain tensors.
            and not any(map(has_own_dispatch, group["params"][:1]))
            for group in optimizer.param_groups
        )
    )


def is_of_torch(optimizer: Optimizer) -> bool:
    """Whether ``step()`` is written in torch; a scheduler has wrapped that of an instance."""
    step: Any = type(optimizer).step
    return bool(step.__module__.startswith("torch.optim."))


class OptimizerStep:
    """What is known about one call of ``step()``, from before it until it has gone through.

    A step by fused kernels makes and checks its state before the first of them, so that what is
    left to fail is next to nothing; then it is undone if no kernel has run and finished if one has.
    For any other step parameters and state are copied, with ``copies``.
    """

    def __init__(self, optimizer: Optimizer, *, copies: bool, in_one_call: bool) -> None:
        self.optimizer = optimizer
        self._state: StateContainers | None = None
        """As it was when the step began; None as long as the step has not asked for it."""
        self.signals: DeferredSignals | None = None
        """Those that wait until the step has gone through, or is undone."""
        self.is_nesting = False
        """Whether it has called ``super().step()``, which has hooks of its own."""
        self._counts: bool | None = None
        self.copies: Copies | None = None
        """Of parameters and state: with them the step can be undone even after it went through."""
        self._own = None if is_of_torch(optimizer) else OptimizerSnapshot(optimizer)
        """Of an optimizer that is not torch's: its step may change its attributes and groups."""
        if copies:
            self._state = state_of(optimizer)
            written = [each for group in optimizer.param_groups for each in group["params"]]
            self.copies = Copies([*written, *state_tensors(optimizer)])
        self._fused = FusedStep(optimizer, self.prepare) if in_one_call else None

    def prepare(self) -> FusedLists:
        """Make and check the state of a fused step; if it raises, the optimizer is as before."""
        optimizer = self.optimizer
        state = self._state = state_of(optimizer)
        if state.lists is None or not call_unseen(state.lists.renew, optimizer):
            state.lists = None
            try:
                call_unseen(_make_state, optimizer)
                _check(optimizer)
                state = state_of(optimizer)
                state.lists = call_unseen(FusedLists, optimizer)
            except BaseException:
                self._state.restore()
                raise
        return state.lists

    def succeed(self) -> None:
        """Let go of what was held for the step. A signal that was deferred arrives now."""
        if self._fused is not None:
            self._fused.end()
        if self.signals is not None:
            signals, self.signals = self.signals, None
            signals.restore_handlers()

    def undo(self) -> None:
        """Put parameters and state back from their copies."""
        if self._own is not None:
            self._own.restore()
        if self._state is not None:
            self._state.restore()
        if self.copies is not None:
            self.copies.restore()

    def fail(self, error: BaseException | None) -> bool:
        """Undo the step that has raised, or finish it; return whether it counts.

        May be called again, also after an interrupt; raises if neither can be done.
        """
        if self._counts is None:
            signals = DeferredSignals()
            try:
                self._counts = self._undo_or_finish(error)
            finally:
                self.succeed()
                signals.restore_handlers()
        return self._counts

    def _undo_or_finish(self, error: BaseException | None) -> bool:
        if self.copies is not None:
            roll_back(self.undo)
            return False
        name = type(self.optimizer).__name__
        if self._fused is None:
            raise UnrecoverableStepError(
                f"{name}.step() raised midway and undo='none' keeps no copies: "
                "load a checkpoint, or use undo='auto'"
            ) from error
        self._fused.end()
        try:
            progress: FusedProgress | None = call_unseen(self._fused.progress)
            if progress is not None:
                call_unseen(progress.take_back_counts)
        except Exception as again:  # noqa: BLE001  the device is lost, whatever it says
            progress, error = None, error or again
        if progress is None:
            raise UnrecoverableStepError(
                f"{name}.step() raised within one of its fused kernels, or how many of them have "
                "run is unknown: load a checkpoint, or use undo='copy'"
            ) from error
        if not progress.stepped:
            self.undo()
            return False
        if not progress.all_stepped:
            self._step_the_others(progress.stepped, error)
        return True

    def _step_the_others(self, stepped: list[Tensor], error: BaseException | None) -> None:
        gradients = [parameter.grad for parameter in stepped]
        try:
            for parameter in stepped:
                parameter.grad = None
            call_unseen(step_without_hooks(self.optimizer))
        except Exception as again:  # noqa: BLE001  whatever it is, the step is torn
            raise UnrecoverableStepError(
                f"{type(self.optimizer).__name__}.step() raised after some of its kernels had run, "
                f"and the others raised again ({again}): load a checkpoint"
            ) from error
        finally:
            for parameter, gradient in zip(stepped, gradients, strict=True):
                parameter.grad = gradient


def _make_state(optimizer: Optimizer) -> None:
    """Make the state of a fused step, SGD's momentum buffers too.

    ``_fused_sgd`` calls ``empty_like`` and lets the kernel fill it. Where found_inf is set the
    kernel does nothing, and the next step uses whatever was there. Minus zero is the start that
    changes no bit: ``momentum * -0.0 + gradient`` is the gradient, its zeros' signs included.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/sgd.py#L511
    """
    for group in optimizer.param_groups:
        init_group(optimizer, group)
        if group.get("momentum") and "dampening" in group:
            with_gradient = [each for each in group["params"] if each.grad is not None]
            states = [optimizer.state[each] for each in with_gradient]
            if all(state.get("momentum_buffer") is None for state in states):
                for parameter, state in zip(with_gradient, states, strict=True):
                    state["momentum_buffer"] = torch.full_like(parameter, -0.0)


def _check(optimizer: Optimizer) -> None:
    """Refuse what a fused kernel would read or write beyond its memory: it does not look."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            name = type(optimizer).__name__
            where = f"param_groups[{number}]['params'][{place}]"
            if any(
                n > 1 and step == 0
                for n, step in zip(parameter.shape, parameter.stride(), strict=True)
            ):
                raise OptimizerStateError(
                    f"{name}: the elements of {where} share memory (it was expanded), "
                    "and a fused kernel writes one after the other: clone() it"
                )
            for key, tensor in optimizer.state.get(parameter, {}).items():
                if key == "step" or not isinstance(tensor, Tensor):
                    continue
                for kind in ("shape", "dtype", "device"):
                    expected, found = getattr(parameter, kind), getattr(tensor, kind)
                    if expected != found:
                        raise OptimizerStateError(
                            f"{name}: {key} of {where} has {kind} {found}, its parameter has "
                            f"{expected}: load a state_dict of this model, or delete the entry "
                            "from optimizer.state"
                        )


# --- a step that counts although its block raises -------------------------------------------


class AtCommit:
    """What changes after the optimizers, as it was when the last of them had stepped."""

    def __init__(self, training: TrainingState) -> None:
        also = [each for each in training.also if isinstance(each, LRScheduler)]
        self.schedulers = [x for x in training.others if per_optimizer_states(x) is None] + also
        self.others = {id(each): Containers([vars(each)]) for each in (*training.others, *also)}
        # By optimizer and not by scheduler: several of these may set one lr.
        self._groups = {
            each: Containers(each.param_groups, skip=[g["params"] for g in each.param_groups])
            for each in (training.optimizers if self.schedulers else ())
        }
        # A scheduler that went back alone would set an lr again that it has set.
        self._loads = {id(each): undos_of([each]) for each in also}
        others = [each for each in training.also if id(each) not in self._loads]
        self._also = undos_of(others, buffers=True)

    def put_back(self, exception: BaseException | None) -> list[str]:
        """Put each scheduler back that an exception went through, and the rest; return notes."""
        raised = [each for each in self.schedulers if _raised_inside(exception, each)]
        for each in raised:
            self._put_back(each)
        notes = [f"{type(each).__name__} is as it was before its step()" for each in raised]
        for undo in self._also:
            undo()
        if self._also:
            notes.append(
                "what also= names, schedulers apart, is as it was when the last optimizer had "
                "stepped"
            )
        return notes

    def _put_back(self, scheduler: Any) -> None:
        """Put a scheduler and its lr back, but for an lr that another one has set meanwhile."""
        self.others[id(scheduler)].restore()
        for load in self._loads.get(id(scheduler), ()):
            load()
        for optimizer, groups in self._groups.items():
            setting = [each for each in self.schedulers if self._may_set(each, optimizer)]
            others = [self.others[id(each)] for each in setting if each is not scheduler]
            if scheduler in setting and not any(each.replaced() for each in others):
                groups.restore()

    def _may_set(self, scheduler: Any, optimizer: Optimizer) -> bool:
        own = getattr(scheduler, "optimizer", None)
        return own is optimizer or not any(own is each for each in self._groups)


def finish_step(
    training: TrainingState,
    snapshot: TrainingSnapshot,
    stepped: Sequence[OptimizerStep],
    at_commit: AtCommit | None,
    exception: BaseException | None,
) -> None:
    """Finish scaler and scheduler, or put them back; note on the exception that the step counts.

    ``at_commit`` is None if an interrupt came while it was read: nothing has run since then.
    """
    notes = ["torchguard: the optimizers had stepped already, so this training step counts"]
    times = Counter(id(each.optimizer) for each in stepped)
    notes += [
        f"{type(optimizer).__name__} had stepped {times[id(optimizer)]} times in this block, and "
        "all of these steps stay"
        for optimizer in training.optimizers
        if times[id(optimizer)] > 1
    ]
    for optimizer in training.optimizers:
        # What scaler.step() hands to a fused optimizer, and deletes at its end: a scale that stays
        # is multiplied with the next one.
        now, before = vars(optimizer), snapshot.optimizers[id(optimizer)].attributes
        for name in ("grad_scale", "found_inf"):
            now.pop(name, None)
            now.update({name: before[name]} if name in before else {})
    for other in training.others:
        if per_optimizer_states(other) is not None:
            containers = None if at_commit is None else at_commit.others[id(other)]
            notes.append(_finish_scaler(other, containers))
    if at_commit is not None:
        notes += at_commit.put_back(exception)
    if exception is not None:
        add_note(exception, "; ".join(notes))


def _finish_scaler(scaler: Any, at_commit: Containers | None) -> str:
    """Do what ``scaler.update()`` has not done, so that the next step finds it ready."""
    if not per_optimizer_states(scaler):
        return "the scaler is updated"
    try:
        if at_commit is not None:
            at_commit.restore()  # update() may have raised with the scale changed already
        scaler.update()
    except Exception as error:  # noqa: BLE001  the exception on its way is the one to see
        per_optimizer_states(scaler).clear()  # type: ignore[union-attr]
        return f"the scaler keeps its scale ({error})"
    return "the scaler was updated"


def _raised_inside(exception: BaseException | None, owner: Any) -> bool:
    """Whether an exception, or one that it came of, went through a method of an object."""
    return any(
        frame.f_locals.get("self") is owner
        for each in with_causes(exception)
        for frame, _ in traceback.walk_tb(each.__traceback__)
    )


def with_causes(exception: BaseException | None) -> Iterable[BaseException]:
    """Return an exception and all that it came of."""
    found: dict[int, BaseException] = {}
    waiting = [exception]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting += [each.__cause__, each.__context__]
    return found.values()


def add_note(exception: BaseException, note: str) -> None:
    """Call ``exception.add_note``, which Python 3.10 does not have."""
    if hasattr(exception, "add_note"):
        exception.add_note(note)
    else:
        exception.__notes__ = [*getattr(exception, "__notes__", ()), note]  # type: ignore[attr-defined]


# --- a step that is skipped ------------------------------------------------------------------
#
# The fused optimizers have a way to skip on the device, made for GradScaler: a tensor ``found_inf``
# on the optimizer, which their kernel reads. It leaves parameters, moments and step counters as
# they are where ``found_inf`` is 1. Nothing else in PyTorch can be skipped without asking the
# device, so for other optimizers the host reads the flag.


def is_gated_on_device(optimizer: Optimizer) -> bool:
    """Whether a step reads ``found_inf`` within its kernel; ``GradScaler.step`` asks so too.

    The attribute says nothing of each group, and ``fused`` is an option of each.
    """
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(supports) and all(group.get("fused") for group in optimizer.param_groups)


class NonfiniteGate:
    """Closes for one ``optimizer.step()`` when what it would apply is not finite.

    :meth:`before` and :meth:`after` belong around each step; ``GradScaler`` does the same to
    ``optimizer.found_inf``, so there is no scaler.
    """

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        """Where it is not finite, the steps of this block are skipped, whatever the gradients."""
        self._found: Tensor | None = None
        self.taken_away: list[tuple[Tensor, Tensor]] = []
        """Parameters and their gradients, if the host has read that the step is skipped."""
        self._totals: dict[torch.device, Tensor] = {}

    @property
    def skipped(self) -> int:
        """How many steps were skipped. Reading it waits for the device."""
        return sum(int(total) for total in self._totals.values())

    def before(self, optimizer: Optimizer) -> None:
        """Find out whether the step is to be skipped, and let the optimizer know."""
        with torch.no_grad():
            self._found = _nonfinite(optimizer, self.loss)
        if self._found is None:
            return
        if is_gated_on_device(optimizer):
            optimizer.found_inf = self._found  # type: ignore[attr-defined]
        elif bool(self._found):  # the host read
            # A parameter without a gradient is left alone by every optimizer of PyTorch.
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.taken_away = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter, _ in self.taken_away:
                parameter.grad = None

    def before_or_in_closure(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Call :meth:`before` now, or after the closure, which makes the gradients.

        Returns the arguments of ``step()``, with a closure that does so.
        """
        given = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(given):
            self.before(optimizer)
            return args, kwargs

        @functools.wraps(given)
        def closure() -> Any:
            loss = given()
            self.before(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    def after(self, optimizer: Optimizer, restore_where: Callable[[Tensor], None]) -> None:
        """Call ``restore_where(skipped)``, to put buffers back where it is True, and count."""
        if self._found is not None:
            with torch.no_grad():
                restore_where(self._found.bool())
                total = self._totals.setdefault(
                    self._found.device, torch.zeros_like(self._found, dtype=torch.int64)
                )
                total.add_(self._found.to(torch.int64))
        self._end(optimizer)

    def close(self, optimizers: Iterable[Optimizer]) -> None:
        """Take back what :meth:`before` did, also after a step that raised."""
        for optimizer in optimizers:
            self._end(optimizer)
        self.loss = None

    def restore_gradients(self) -> None:
        """Let parameters have the gradients that :meth:`before` took away for a step."""
        for parameter, gradient in self.taken_away:
            parameter.grad = gradient
        self.taken_away = []

    def _end(self, optimizer: Optimizer) -> None:
        self.restore_gradients()
        if self._found is not None and vars(optimizer).get("found_inf") is self._found:
            del optimizer.found_inf  # type: ignore[attr-defined]
        self._found = None


def _nonfinite(optimizer: Optimizer, loss: Tensor | None) -> Tensor | None:
    """Return 1.0 if loss or gradients are not finite, else 0.0, on the first gradient's device.

    The largest magnitude is finite just if every element is: it does not overflow, as a sum of
    squares does, and a NaN stays a NaN.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    present = [each for each in gradients if each is not None]
    values = [each.coalesce().values() if each.is_sparse else each for each in present]
    with_elements = [each for each in values if each.numel() > 0]  # no elements, no norm
    if not with_elements:
        return None
    largest = torch.nn.utils.get_total_norm(with_elements, float("inf"))
    finite = torch.isfinite(largest)
    if loss is not None:
        finite = finite & torch.isfinite(loss).all().to(finite.device, non_blocking=True)
    return (~finite).float()
