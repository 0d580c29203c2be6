"""``with step:``, a training step that is undone if it fails."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from torchguard._public import public
from torchguard._torch.optimizers import call_unseen, close_checkpoints, step_is_nested
from torchguard.errors import ReplayMismatchError, UnrecoverableStepError
from torchguard.rollback.block import UndoOnExit
from torchguard.rollback.scope import guarded
from torchguard.state.interrupts import DeferredSignals, failures_in, roll_back
from torchguard.state.modes import ThreadModes
from torchguard.transactions.hooks import opened, step_is_compiled, watch
from torchguard.transactions.optimizer_step import (
    AtCommit,
    NonfiniteGate,
    OptimizerStep,
    Undo,
    finish_step,
    is_gated_on_device,
    is_of_torch,
    steps_in_one_call,
)
from torchguard.transactions.ranks import Ranks
from torchguard.transactions.retry import Retry, differs_in_parts, run
from torchguard.transactions.state import BufferCopies, TrainingSnapshot, TrainingState


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
    ``RNG states``. Parameters and gradients are compared by their version counters."""


@dataclass
class _Block:
    """One ``with`` statement: the training before it, and what its optimizers have done."""

    snapshot: TrainingSnapshot
    modes: ThreadModes
    stepped: list[OptimizerStep] = field(default_factory=list)
    pending: OptimizerStep | None = None
    at_commit: AtCommit | None = None
    foreign: str | None = None
    changed: dict[str, int] | None = None


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
        self.optimizers = training.optimizers
        """The optimizers that step in a block."""
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
        self._accumulation: BufferCopies | None = None
        """Those of the first block since the last step, for ``skip_nonfinite``."""
        self.committed = False
        """Whether the last block counts: it went through, or every optimizer had stepped."""
        self.saved: list[_Block] = []
        watch(self)

    def run(
        self,
        loss_of: Callable[[Any], Tensor],
        batch: Any,
        *,
        retry: Retry | None = None,
        before_step: Callable[[], Any] | None = None,
    ) -> Tensor:
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

        With ``retry="halve"``, a step that runs out of memory is undone and run again in parts of
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
            TypeError: the batch can't be split (the message names what), ``loss_of`` does not
                return one number, or a scheduler is a ReduceLROnPlateau, which needs a metric.
            ValueError: ``retry`` is another, or a DistributedDataParallel model without ``group=``.
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
        if times < 2:  # noqa: PLR2004  once compares nothing
            raise ValueError(f"replay: times is {times}, expected 2 or more")
        snapshot = self.training.capture()
        first: dict[str, Tensor | None] = {}
        finished = False
        try:
            for number in range(times):
                if number:
                    # Dropout has to draw the same numbers, BatchNorm to begin with the same mean.
                    roll_back(snapshot.restore)
                with guarded(overlap=True):  # else the order of threads would show
                    yield number
                call_unseen(_compare, first, self.training, number)
            finished = True
        finally:
            if not finished:
                roll_back(snapshot.restore)

    @property
    def guarantee(self) -> str:
        """What holds when a block raises, in words; "strong: ..." where all of it holds."""
        if self._undo_option == "none" and not all(map(steps_in_one_call, self.optimizers)):
            return (
                "weak: undo='none' keeps no copies, so an exception inside optimizer.step() leaves "
                "parameters and state half updated and raises UnrecoverableStepError; whatever "
                "else raises before it, everything is as it was"
            )
        strong = (
            "strong: whatever the block raises before every optimizer has stepped, everything is "
            "as it was; after that the step counts, wholly"
        )
        if self._undo_option != "copy":
            strong += (
                "; but what the block itself writes to parameters through .data (SAM, weight "
                "noise) stays, for which undo='copy' keeps copies"
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

    # The with statement. _Leave in rollback/block.py says why __exit__ is no plain method.

    def __enter__(self) -> Self:
        began = time.perf_counter()
        if self.saved:
            raise RuntimeError("this transaction is open already: leave its block first")
        self.committed = False
        parameters = self._undo_option == "copy" or (
            step_is_compiled() and self._undo_option == "auto"
        )
        block = _Block(self.training.capture(parameters=parameters), ThreadModes.capture())
        try:
            opened.append(self)
            self._seconds += time.perf_counter() - began
            self.saved.append(block)
        except BaseException:  # an interrupt: no __exit__ will be called
            self._close()
            raise
        return self

    __exit__ = UndoOnExit()

    def leave(
        self,
        undo_if_dropped: Any,
        _: type[BaseException] | None = None,
        exception: BaseException | None = None,
        *__: object,
    ) -> None:
        """Commit the block, or undo it."""
        began = time.perf_counter()
        if not self.saved:
            if exception is not None:
                return  # there is nothing to undo, and it goes on
            raise RuntimeError("this transaction has no open block: enter it first")
        block = self.saved[-1]
        signals = None if exception is None else DeferredSignals()
        try:
            if self.gate is not None:
                self.gate.restore_gradients()
            if exception is not None:
                self._failed(block, exception)
            else:
                self._settle(block, None)  # the block has caught what optimizer.step() raised
                self.committed = True
                self._commits += 1
                if self.gate is not None:
                    self._note_accumulation(block)
        finally:
            self._close()
            not_needed = undo_if_dropped()
            if not_needed is not None:
                next(not_needed, None)
            self._seconds += time.perf_counter() - began
            if signals is not None:
                signals.restore_handlers()

    def undo_if_dropped(self, depth: int) -> Generator[None, None, None]:
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
        if self in opened:
            opened.remove(self)
        self.saved.clear()

    def _note_accumulation(self, block: _Block) -> None:
        """Keep the buffers of the first block whose gradients wait for a step in a later one."""
        if block.stepped:
            self._accumulation = None
        elif self._accumulation is None or not block.snapshot.has_gradients:
            self._accumulation = block.snapshot.buffers

    def _settle(self, block: _Block, exception: BaseException | None) -> None:
        """Undo or finish a step that has raised. May be called again, after an interrupt."""
        pending = block.pending
        # No hook of torch is called for a step() that raises. A block that catches it goes on, so
        # the next step, or the end of the block, comes upon it here.
        if pending is not None and pending.fail(exception):
            self._has_stepped(block, pending)
        block.pending = None

    def _has_stepped(self, block: _Block, pending: OptimizerStep) -> None:
        if self.gate is not None:
            if self.gate.taken_away and not is_of_torch(pending.optimizer):
                roll_back(pending.undo)  # one that is not torch's may count the step
            began = block.snapshot.buffers
            if self._accumulation is not None and block.snapshot.has_gradients:
                began = self._accumulation
            self.gate.after(pending.optimizer, began.restore_where)
        if pending not in block.stepped:
            block.stepped.append(pending)
        block.pending = None
        if self._all_have_stepped(block):
            block.at_commit = AtCommit(self.training)

    def _failed(self, block: _Block, exception: BaseException | None) -> None:
        close_checkpoints(exception)
        block.modes.restore()  # an interrupt may have come inside of torch.autocast or no_grad
        self._settle(block, exception)
        if self._all_have_stepped(block):
            self.committed = True
            self._commits += 1
            self._accumulation = None
            roll_back(
                finish_step,
                *(self.training, block.snapshot, block.stepped, block.at_commit, exception),
            )
            return
        cause = "interrupt" if exception is None else type(exception).__name__
        self._rollbacks[cause] += 1
        problems: list[str] = []
        roll_back(self._undo, block, problems)
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
        with failures_in(problems):
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

    def _all_have_stepped(self, block: _Block) -> bool:
        return bool(block.stepped) and self._is_last(block, block.stepped[-1].optimizer)

    # What the hooks of optimizers call.

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Prepare a step, so that it can be undone or finished; return its arguments."""
        block = self.saved[-1] if self.saved else None
        if block is None:
            return args, kwargs
        if optimizer not in self.optimizers:
            self._note_unknown_optimizer(block, optimizer)
            return args, kwargs
        if block.pending is not None and step_is_nested(optimizer):
            block.pending.is_nesting = True
            return args, kwargs
        self._settle(block, None)  # what the last step raised was caught inside the block
        began = time.perf_counter()
        with_closure = len(args) > 1 or bool(kwargs)
        if self.gate is not None:
            args, kwargs = self.gate.before_or_in_closure(optimizer, args, kwargs)
        in_one_call = steps_in_one_call(optimizer) and not with_closure
        last = self._is_last(block, optimizer)
        copies = self._undo_option == "auto" and not (in_one_call and last)
        copies = copies or self._undo_option == "copy"
        pending = OptimizerStep(optimizer, copies=copies, in_one_call=in_one_call)
        if self.ranks is not None and last and pending.copies is None:
            pending.signals = DeferredSignals()  # the others step, whatever happens to this rank
            try:
                if in_one_call:
                    pending.prepare()
                self.ranks.agree_to_commit()
            except BaseException:
                pending.succeed()
                raise
        block.pending = pending
        self._seconds += time.perf_counter() - began
        return args, kwargs

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        block = self.saved[-1] if self.saved else None
        if block is None or block.pending is None or block.pending.optimizer is not optimizer:
            return
        pending = block.pending
        if pending.is_nesting and step_is_nested(optimizer):
            return
        if self.ranks is not None and self._is_last(block, optimizer):
            self.ranks.agree_to_commit()  # if it raises, the step is undone from its copies
        self._has_stepped(block, pending)
        pending.succeed()

    def _is_last(self, block: _Block, optimizer: Optimizer) -> bool:
        return {optimizer, *(each.optimizer for each in block.stepped)} >= set(self.optimizers)

    def _note_unknown_optimizer(self, block: _Block, optimizer: Optimizer) -> None:
        own = {id(each) for group in self.training.groups() for each in group}
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


# --- replay() --------------------------------------------------------------------------------


def _results(training: TrainingState) -> Iterator[tuple[str, Tensor | None]]:
    """Yield what forward and backward write: gradients, then buffers."""
    for number, module in enumerate(training.modules):
        model = "model" if len(training.modules) == 1 else f"model[{number}]"
        for name, parameter in module.named_parameters():
            yield f"the gradient of {model}.{name}", parameter.grad
        for name, buffer in module.named_buffers():
            yield f"the buffer {model}.{name}", buffer


def _bits(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of the elements as bytes: so NaN equals NaN, and 0.0 not -0.0."""
    if tensor is None:
        return None
    dense = (tensor if tensor.layout is torch.strided else tensor.to_dense()).detach()
    copied = dense.clone(memory_format=torch.contiguous_format)
    return copied.unsqueeze(-1).view(torch.uint8)


def _compare(first: dict[str, Tensor | None], training: TrainingState, number: int) -> None:
    """Keep the bits of the first run; raise where those of a later one are others."""
    for name, tensor in _results(training):
        now = _bits(tensor)
        if not number:
            first[name] = now
            continue
        before = first.get(name)
        same = before is now if before is None or now is None else torch.equal(before, now)
        if not same:
            raise ReplayMismatchError(
                f"{name} has other bits in run {number + 1} than in run 1 on the same batch, with "
                "the same random numbers: an operator is not deterministic (see "
                "torch.use_deterministic_algorithms), or the hardware made an error"
            )
