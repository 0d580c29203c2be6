"""transaction(): a training step that fails leaves the training as it was."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from typing_extensions import Self

from torchguard._public import public
from torchguard._torch import patch
from torchguard._torch.optimizers import (
    call_while_tracing,
    close_checkpoints,
    per_optimizer_states,
)
from torchguard.equivalence.isolate import ThreadModes
from torchguard.errors import UnrecoverableStepError
from torchguard.rollback.block import UndoOnExit
from torchguard.rollback.interrupts import finish
from torchguard.transactions import fused
from torchguard.transactions.commit import (
    IN_TRANSACTION,
    OptimizerStep,
    Prepared,
    SignalsHeldBack,
    Undo,
    add_note,
    steps_in_one_call,
)
from torchguard.transactions.nonfinite import NonfiniteGate, is_gated_on_device
from torchguard.transactions.ranks import Ranks
from torchguard.transactions.replay import replay
from torchguard.transactions.retry import Halved, differs_in_parts, run
from torchguard.transactions.state import Containers, TrainingSnapshot, TrainingState, undos_of

__all__ = ["Transaction", "TransactionStats", "transaction"]


@public
@dataclass(frozen=True)
class TransactionStats:
    """What a transaction has done so far."""

    commits: int = 0
    """Blocks that went through, and blocks that raised after every optimizer had stepped."""

    rollbacks: dict[str, int] = field(default_factory=dict)
    """Blocks that were undone, by the name of the exception."""

    microseconds: float = 0.0
    """Time spent in torchguard, of blocks that went through and of others."""

    skipped: int = 0
    """Steps of optimizers that ``skip_nonfinite`` has skipped."""

    put_back: dict[str, int] = field(default_factory=dict)
    """What rollbacks have found changed, by kind: ``parameters``, ``gradients``, ``buffers`` and
    ``RNG states``. Of parameters and gradients, as far as version counters tell."""


class _Block:
    """One ``with`` statement: the training before it, and what its optimizers have done."""

    def __init__(self, snapshot: TrainingSnapshot) -> None:
        self.snapshot = snapshot
        self.modes = ThreadModes.capture()
        self.stepped: list[OptimizerStep] = []
        self.pending: OptimizerStep | None = None
        self.at_commit: list[tuple[Any, Containers]] = []
        self.also_at_commit: list[Callable[[], None]] = []
        self.foreign: str | None = None
        self.changed: dict[str, int] | None = None


class Transaction:
    """What :func:`transaction` returns: ``with step:`` around a training step."""

    def __init__(
        self,
        training: TrainingState,
        *,
        undo: Undo,
        scaler: Any = None,
        schedulers: Iterable[Any] = (),
        gate: NonfiniteGate | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.training = training
        self.scaler = scaler
        self.schedulers = tuple(schedulers)
        self.gate = gate
        self.ranks = ranks
        self.part_size: int | None = None
        """How many samples :meth:`run` puts into a part, once a batch ran out of memory."""
        self._undo_option = undo
        self._commits = 0
        self._rollbacks: Counter[str] = Counter()
        self._put_back: Counter[str] = Counter()
        self._seconds = 0.0
        self.committed = False
        """Whether the last block counts: it went through, or every optimizer had stepped."""
        self.saved: list[_Block] = []
        self._prepared = {id(each): Prepared() for each in training.optimizers}
        _watch(self)

    def run(
        self,
        loss_of: Callable[[Any], torch.Tensor],
        batch: Any,
        *,
        retry: Halved | None = None,
        before_step: Callable[[], Any] | None = None,
    ) -> torch.Tensor:
        """Run one training step: forward, backward, optimizers, scaler, schedulers, zero_grad.

        Equals, in a block of this transaction::

            loss = loss_of(batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # if there is a before_step
            before_step()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()

        With ``retry=halved()``, a step that runs out of memory is undone and run again in parts of
        half the size. The loss of each part is weighted by its share of the samples, so that the
        gradient is that of the whole batch up to rounding. Statistics over the batch (BatchNorm)
        are those of the parts. The size is kept for the batches after it, and a warning says so.

        Args:
            loss_of: takes a batch, or a part of one, and returns its mean loss.
            batch: tensors whose dimension 0 counts the samples, in lists, tuples, mappings
                (``BatchEncoding``) or dataclasses. Lists of as many strings or numbers as there
                are samples are split too; other numbers, strings and 0-d tensors go to each part.
            retry: what to do when memory runs out; None raises at once.
            before_step: called between backward and the optimizers' steps, with gradients
                unscaled: the place for ``clip_grad_norm_``.

        Returns:
            The mean loss of the batch, detached, a tensor of one number.

        Raises:
            TypeError: the batch can't be split (the message names what), or ``loss_of`` does not
                return one number.
            PeerFailedError: another rank failed; with ``group=``.
        """
        return run(self, loss_of, batch, retry=retry, before_step=before_step)

    def replay(self, times: int = 2) -> Iterator[int]:
        """Run the body of a ``for`` statement again and compare bits.

        Use it for forward and backward, outside of a block of this transaction or at the beginning
        of one. Equals running the body once::

            for _ in step.replay(2):
                loss_of(batch).backward()

        Before each run everything is as it was before the first; gradients and buffers have to
        be the same bits after each. What differs is computed by an operator that is not
        deterministic, or by hardware that makes errors. If the body raises, everything is as it
        was.

        Raises:
            ReplayMismatchError: names the first gradient or buffer that differs; everything is as
                it was before the first run.
            ValueError: ``times`` is less than 2.
        """
        return replay(self.training, times)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that step in a block."""
        return self.training.optimizers

    @property
    def guarantee(self) -> str:
        """What holds when a block raises, in words; "strong: ..." where all of it holds."""
        if self._undo_option == "none" and not all(
            map(steps_in_one_call, self.training.optimizers)
        ):
            return (
                "weak: undo='none' keeps no copies, so an exception inside optimizer.step() leaves "
                "parameters and state half updated and raises UnrecoverableStepError; whatever "
                "else raises before it, everything is as it was"
            )
        strong = (
            "strong: whatever the block raises before every optimizer has stepped, everything is "
            "as it was; after that the step counts, wholly"
        )
        return strong + "".join(self._limits())

    def _limits(self) -> Iterable[str]:
        """Yield what holds besides, each after a semicolon."""
        if self.gate is not None:
            yield "; a step that is not finite leaves parameters, state and buffers as they were"
            if not all(map(is_gated_on_device, self.optimizers)):
                yield ", for which the host waits for the device: no fused optimizer"
        if self.ranks is not None:
            yield "; on every rank, with run(): a step is taken on all of them or on none"
        if self.part_size is not None:
            yield f"; run() splits batches into parts of {self.part_size} samples"
            names = differs_in_parts(self.training.modules)
            if names:
                yield f", and statistics over the batch are those of the parts: {names}"

    def stats(self) -> TransactionStats:
        """Return how many blocks were committed and rolled back, with what and in what time."""
        return TransactionStats(
            self._commits,
            dict(self._rollbacks),
            self._seconds * 1e6,
            0 if self.gate is None else self.gate.skipped,
            {kind: count for kind, count in self._put_back.items() if count},
        )

    # The with statement. Rollback explains why __exit__ is no plain method.

    def __enter__(self) -> Self:
        began = time.perf_counter()
        if self.saved:
            raise RuntimeError("this transaction is open already: leave its block first")
        self.committed = False
        block = _Block(self.training.capture(parameters=self._copies_on_entry()))
        try:
            _open.append(self)
            IN_TRANSACTION.extend(self.training.optimizers)
            self._seconds += time.perf_counter() - began
            self.saved.append(block)
        except BaseException:  # an interrupt: no __exit__ will be called
            self._close()
            raise
        return self

    __exit__ = UndoOnExit()

    def _copies_on_entry(self) -> bool:
        return self._undo_option == "copy" or (_compiled and self._undo_option == "auto")

    def leave(
        self,
        last_chance: Any,
        _: type[BaseException] | None = None,
        exception: BaseException | None = None,
        *__: object,
    ) -> None:
        """Commit the block, or undo it."""
        began = time.perf_counter()
        block = self.saved[-1]
        signals = None if exception is None else SignalsHeldBack()
        try:
            if self.gate is not None:
                self.gate.give_gradients_back()
            if exception is not None:
                self._failed(block, exception)
            else:
                self._went_through(block)
        finally:
            self._close()
            not_needed = last_chance()
            if not_needed is not None:
                next(not_needed, None)
            self._seconds += time.perf_counter() - began
            if signals is not None:
                signals.let_go()

    def last_chance(self, depth: int) -> Generator[None, None, None]:
        """Undo the block if this is dropped before :meth:`leave` has gone through."""
        try:
            yield
        except GeneratorExit:
            if len(self.saved) > depth:
                self._failed(self.saved[-1], None)
                self._close()

    def _close(self) -> None:
        if self.gate is not None:
            self.gate.close(self.optimizers)
        if self in _open:
            _open.remove(self)
            own = set(map(id, self.training.optimizers))
            IN_TRANSACTION[:] = [each for each in IN_TRANSACTION if id(each) not in own]
        self.saved.clear()

    def _went_through(self, block: _Block) -> None:
        self._settle(block, None)  # the block has caught what optimizer.step() raised
        self.committed = True
        self._commits += 1

    def _settle(self, block: _Block, exception: BaseException | None) -> None:
        """Undo or finish a step that has raised. May be called again, after an interrupt."""
        pending = block.pending
        if pending is not None and pending.fail(exception):
            self._has_stepped(block, pending)
        block.pending = None

    def _has_stepped(self, block: _Block, pending: OptimizerStep) -> None:
        if self.gate is not None:
            self.gate.after(pending.optimizer, block.snapshot.restore_buffers_where)
        if pending not in block.stepped:
            block.stepped.append(pending)
        block.pending = None
        self._note_commit(block)

    def _failed(self, block: _Block, exception: BaseException | None) -> None:
        close_checkpoints(exception)
        block.modes.restore()  # an interrupt may have come inside of torch.autocast or no_grad
        self._settle(block, exception)
        if self._all_have_stepped(block):
            self.committed = True
            self._commits += 1
            finish(self._finish_step, block, exception)
            return
        self.roll_back(exception)

    def roll_back(self, exception: BaseException | None = None) -> None:
        """Put everything back as it was when the open block began."""
        block = self.saved[-1]
        cause = "interrupt" if exception is None else type(exception).__name__
        self._rollbacks[cause] += 1
        problems: list[str] = []
        finish(self._undo, block, problems)
        self._put_back.update(block.changed or {})
        if problems:
            raise UnrecoverableStepError(
                f"the training step could not be undone: {'; '.join(problems)}"
            ) from exception

    def _undo(self, block: _Block, problems: list[str]) -> None:
        problems.clear()  # an interrupt lets it begin again
        if block.changed is None:
            with contextlib.suppress(Exception):  # a number for stats() is not worth an undo
                block.changed = block.snapshot.changed()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # what persist() says of a failure
            for step in reversed(block.stepped):
                _attempt(step.undo, problems)
            if block.foreign is not None:
                problems.append(block.foreign)
            elif self._undo_option != "none" and block.snapshot.written():
                problems.append(
                    "the block wrote parameters outside of optimizer.step(), and undo='auto' "
                    "copies them only there: use undo='copy'"
                )
            for undo in block.snapshot.undos():
                _attempt(undo, problems)

    # After the commit.

    def _all_have_stepped(self, block: _Block) -> bool:
        stepped = {id(each.optimizer) for each in block.stepped}
        return bool(stepped) and stepped >= set(map(id, self.training.optimizers))

    def _note_commit(self, block: _Block) -> None:
        """Read what changes after the optimizers, once all have stepped, for an exception there."""
        if not self._all_have_stepped(block):
            return
        groups = [group for each in self.training.optimizers for group in each.param_groups]
        parameters = [group["params"] for group in groups]
        block.at_commit = [
            (other, Containers([vars(other)]))
            if per_optimizer_states(other) is not None
            else (other, Containers([vars(other), *groups], skip=parameters))
            for other in self.training.others
        ]
        block.also_at_commit = undos_of(self.training.also, buffers=True)

    def _finish_step(self, block: _Block, exception: BaseException | None) -> None:
        notes = ["torchguard: the optimizers had stepped already, so this training step counts"]
        for optimizer in self.training.optimizers:
            block.snapshot.restore_scaling(optimizer)
        scalers = [e for e in self.training.others if per_optimizer_states(e) is not None]
        # An interrupt may come while they are read: then nothing has run since the commit.
        read = {id(other): at_commit for other, at_commit in block.at_commit}
        notes += [_finish_scaler(scaler, read.get(id(scaler))) for scaler in scalers]
        for other, at_commit in block.at_commit:
            if other not in scalers and _raised_inside(exception, other):
                at_commit.restore()
                notes.append(f"{type(other).__name__} is as it was before its step()")
        for undo in block.also_at_commit:
            undo()
        if block.also_at_commit:
            notes.append("what also= names is as it was when the last optimizer had stepped")
        if exception is not None:
            add_note(exception, "; ".join(notes))

    # What the hooks of optimizers call.

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Any) -> None:
        """Prepare a step, so that it can be undone or finished."""
        block = self.saved[-1] if self.saved else None
        if block is None:
            return
        if not any(each is optimizer for each in self.training.optimizers):
            self._note_foreign(block, optimizer)
            return
        self._settle(block, None)  # what the last step raised was caught inside the block
        began = time.perf_counter()
        if self.gate is not None:
            self.gate.before(optimizer)
        with_closure = len(args) > 1 or bool(kwargs)
        in_one_call = steps_in_one_call(optimizer) and not with_closure
        last = self._is_last(block, optimizer)
        copies = self._undo_option == "auto" and not (in_one_call and last)
        pending = OptimizerStep(
            optimizer,
            block.snapshot.state_of(optimizer),
            copies=copies or self._undo_option == "copy",
            in_one_call=in_one_call,
            prepared=self._prepared[id(optimizer)],
        )
        if self.ranks is not None and last and not pending.is_copied:
            pending.hold_signals_back()  # the others step, whatever happens to this rank
            try:
                if in_one_call:
                    pending.prepare()
                self.ranks.agree_to_commit()
            except BaseException:
                pending.succeed()
                raise
        block.pending = pending
        self._seconds += time.perf_counter() - began

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        block = self.saved[-1] if self.saved else None
        if block is None or block.pending is None or block.pending.optimizer is not optimizer:
            return
        pending = block.pending
        if self.ranks is not None and self._is_last(block, optimizer):
            self.ranks.agree_to_commit()  # if it raises, the step is undone from its copies
        self._has_stepped(block, pending)
        pending.succeed()

    def _is_last(self, block: _Block, optimizer: Optimizer) -> bool:
        stepped = {id(each.optimizer) for each in block.stepped} | {id(optimizer)}
        return stepped >= set(map(id, self.optimizers))

    def _note_foreign(self, block: _Block, optimizer: Optimizer) -> None:
        own = {id(p) for o in self.training.optimizers for g in o.param_groups for p in g["params"]}
        own |= {id(p) for module in self.training.modules for p in module.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            block.foreign = (
                f"{type(optimizer).__name__}, which the transaction was not given, has stepped "
                "over its parameters: pass every optimizer to transaction()"
            )


def _attempt(undo: Any, problems: list[str]) -> None:
    try:
        undo()
    except Exception as error:  # noqa: BLE001  collected: the rest has to go back all the same
        problems.append(f"{type(error).__name__}: {error}")


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
    """Whether an exception went through a method of an object."""
    traceback = None if exception is None else exception.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_locals.get("self") is owner:
            return True
        traceback = traceback.tb_next
    return False


# Every optimizer of the process calls these; they look whether a transaction is open.

_open: list[Transaction] = []
_alive: list[weakref.ref[Transaction]] = []
_handles: list[Any] = []


def _watch(step: Transaction) -> None:
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


_compiled = False  # whether a compiled function has an optimizer's step in it


def _note_compiled() -> int:
    """Note that Dynamo traces a step: it will run without the hooks.

    Called while tracing, so before the step: what it writes is copied now, and from the next block
    on when the block begins.
    """
    global _compiled
    _compiled = True
    for step in tuple(_open):
        for block in step.saved:
            block.snapshot.copy_parameters()
    return 0


call_while_tracing(_note_compiled)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        _note_compiled()
        return
    for step in tuple(_open):
        step.before_step(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for step in tuple(_open):
        step.after_step(optimizer)


@public
def transaction(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | Iterable[Optimizer],
    scaler: Any = None,
    scheduler: Any = None,
    *,
    also: Iterable[Any] = (),
    undo: Undo = "auto",
    skip_nonfinite: bool = False,
    group: Any = None,
) -> Transaction:
    """Make ``with step:`` blocks that leave the training as it was if they raise.

    Equals plain code on success: no bit, no gradient, no random number and no compiled graph
    differs, but for fused steps on the CPU that torch computes wrong (``fused-layout`` and
    ``sgd-fused-half`` in the doctor's table), which are right while there is a transaction.

    If the block raises, whatever it raises, everything is bit for bit as it was when the block
    began, and the exception goes on, the very object: parameters, gradients, buffers, the
    optimizer's state and options, scaler, schedulers, random states, ``training`` and
    ``requires_grad``, attributes and hooks of modules. Once every optimizer has stepped the step
    counts: an exception after that leaves a whole step, and carries a note that says so.

    Gradients that exist when the block begins are copied, so call ``zero_grad()`` at the end of
    the block and not at its beginning, unless gradients accumulate over blocks.

    Args:
        model: the module, or several in a list. What lies inside belongs to it.
        optimizer: the optimizer, or all of them in a list.
        scaler: a ``torch.amp.GradScaler``.
        scheduler: the learning rate scheduler, or several in a list.
        also: what else the step changes: modules (a teacher, whose parameters are then copied when
            a block begins), tensors, generators, and objects with ``state_dict`` and
            ``load_state_dict`` (an average of the weights).
        undo: ``"auto"`` copies parameters and the optimizer's state when ``step()`` begins, and
            not at all where fused kernels do the step in one call. ``"copy"`` copies them when the
            block begins, for code that writes parameters itself. ``"none"`` never copies them.
        skip_nonfinite: skip the step of a loss or a gradient that is not finite, for bf16 training
            without a scaler.
        group: the process group of DistributedDataParallel; a step is taken on all its ranks or
            on none, with :meth:`Transaction.run`.

    Returns:
        A :class:`Transaction`: use it in a ``with`` statement, for one step at a time.

    Raises:
        TypeError: an argument is of another type, or an optimizer or a module that a step can't
            be undone with (LBFGS, FSDP, an optimizer that steps inside backward).
        ValueError: ``undo`` is none of the three, or a parameter is not initialised yet.

    Upstream: https://github.com/pytorch/pytorch/issues/64636,
    https://github.com/pytorch/pytorch/issues/10615

    Example:
        >>> import torch, torchguard
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = torchguard.transaction(model, optimizer)
        >>> try:
        ...     with step:
        ...         model(torch.ones(3, 2)).sum().backward()
        ...         raise RuntimeError("out of memory")
        ... except RuntimeError:
        ...     print(model.weight.grad)
        None
    """
    models = _several(model, nn.Module, "model")
    optimizers = [_innermost(each) for each in _several(optimizer, Optimizer, "optimizer")]
    if undo not in get_args(Undo):
        raise ValueError(f"transaction: undo is {undo!r}, expected one of {get_args(Undo)}")
    for each in models:
        _refuse_model(each)
    for each in optimizers:
        _refuse_optimizer(each)
    if skip_nonfinite and scaler is not None and scaler.is_enabled():
        raise ValueError(
            "transaction: skip_nonfinite=True with a GradScaler, which skips such steps itself; "
            "leave one of them out"
        )
    schedulers = _several(scheduler)
    others = [*_several(scaler), *schedulers]
    return Transaction(
        TrainingState(models, optimizers, others, tuple(also)),
        undo=undo,
        scaler=scaler,
        schedulers=schedulers,
        gate=NonfiniteGate() if skip_nonfinite else None,
        ranks=None if group is None else Ranks(models, group),
    )


def _several(value: Any, kind: Any = object, name: str = "") -> list[Any]:
    if value is None:
        return []
    several = (list, tuple, set) if kind is object else Iterable
    # A Sequential is both a module and an iterable of modules: it is one.
    one = not isinstance(value, several) or (kind is not object and isinstance(value, kind))
    values = [value] if one else list(value)
    for each in values:
        if not isinstance(each, kind):
            raise TypeError(
                f"transaction: {name} is a {type(each).__name__}, expected a torch "
                f"{kind.__name__} or a list of them"
            )
    return values


def _innermost(optimizer: Any) -> Optimizer:
    """Return what a wrapper such as Accelerate's steps: the wrapper itself has no hooks."""
    inner = vars(optimizer).get("optimizer")
    return _innermost(inner) if isinstance(inner, Optimizer) else optimizer


def _refuse_optimizer(optimizer: Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "transaction: LBFGS runs forward and backward many times inside step(), so there is "
            "no point at which its step is prepared and not begun"
        )


def _refuse_model(model: nn.Module) -> None:
    sharded = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(
        kind
        for name in ("FullyShardedDataParallel", "FSDPModule")
        if (kind := getattr(sharded, name, None)) is not None
    )
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            raise TypeError(
                f"transaction: {name or 'model'} is sharded by FSDP, whose parameters lie on "
                "several ranks; only whole parameters can be put back"
            )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"transaction: {name} has no shape yet; run the model once before transaction()"
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise TypeError(
                f"transaction: an optimizer steps over {name} inside backward, before it is "
                "known whether the step succeeds"
            )
