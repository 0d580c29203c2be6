"""``with step:``, a training step that is rolled back if it fails."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from typing_extensions import Self

from torchguard._events import record
from torchguard._public import public
from torchguard._torch.eager import close_checkpoints
from torchguard.errors import UnrecoverableStepError, add_note
from torchguard.state.process import DeferredSignals, refuse_inside_step
from torchguard.training_setup import frozen, warn_of_setup
from torchguard.transactions.accumulation import is_accumulating
from torchguard.transactions.block import Block, Guarded, steps_fused
from torchguard.transactions.hooks import watch
from torchguard.transactions.resume import load, state_of
from torchguard.transactions.retry import Retry, run
from torchguard.transactions.split import Split


@public
@dataclass(frozen=True)
class TransactionStats:
    """What a transaction has done so far.

    Example:
        >>> import torch, torchguard
        >>> model = torch.nn.Linear(2, 1)
        >>> step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loss = step.run(lambda batch: model(batch).mean(), torch.ones(4, 2))
        >>> stats = step.stats()
        >>> stats.commits, stats.rollbacks
        (1, {})
    """

    commits: int = 0
    """Blocks whose step counts."""

    rollbacks: dict[str, int] = field(default_factory=dict)
    """Blocks that were rolled back, by the name of the exception."""

    skipped: int = 0
    """Steps of optimizers that ``skip_nonfinite`` has skipped."""


class Transaction:
    """What :func:`transaction` returns.

    Use it as ``with step:`` around one training step at a time, or call :meth:`run`.

    Attributes:
        committed: whether the last block's step counts: every optimizer has stepped. A block that
            ends before that (an accumulation of gradients, a ``return``) does not count, and
            neither does a block that was rolled back.
        part_size: how many samples :meth:`run` puts into a part, once a batch ran out of memory.

    Example:
        >>> import torch, torchguard
        >>> model = torch.nn.Linear(2, 1)
        >>> step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loss = step.run(lambda batch: model(batch).mean(), torch.ones(4, 2))
        >>> step.committed
        True
    """

    committed: bool

    part_size: int | None

    def __init__(self, guarded: Guarded) -> None:
        if not isinstance(guarded, Guarded):
            raise TypeError("Transaction: write transaction(model, optimizer), which returns one")
        self.committed = False
        self.part_size = None
        self._guarded = guarded
        self._commits = 0
        self._rollbacks: Counter[str] = Counter()
        self._blocks: list[Block] = []
        watch(guarded)

    def run(
        self,
        loss_of: Callable[[Any], Tensor],
        batch: Any,
        *,
        retry: Retry | None = None,
        parts: int = 1,
        split: Split = None,
        before_step: Callable[[], Any] | None = None,
        metric: Callable[[Tensor], Any] | None = None,
    ) -> Tensor:
        """Run one training step; it steps the schedulers too, so your loop must not.

        Equals, in a block of this transaction::

            loss = loss_of(batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # if there is a before_step
            before_step()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()

        With ``retry="halve"``, a step that runs out of memory is rolled back and run again in twice
        as many parts, whose size is kept for the batches after it. The loss of each part is
        weighted by its share of the samples, so the gradient is that of the whole batch up to
        rounding. Statistics over the batch (BatchNorm) are those of the parts.

        Args:
            loss_of: takes a batch, or a part of one, and returns its mean loss.
            batch: tensors whose dimension 0 counts the samples, in lists, tuples, mappings
                (``BatchEncoding``) or dataclasses. A list with one entry per sample (strings,
                token ids, boxes) is cut between samples; other lists, numbers, strings and 0-d
                tensors go to each part.
            retry: what to do when memory runs out; None raises at once.
            parts: over how many parts of the batch gradients accumulate; the last may be smaller.
            split: what of the batch is cut, where the batch does not tell. A dict such as
                ``{"labels": True, "image_size": False}``: True of what has one row or entry per
                sample, False of what each part gets completely. For a tuple, a tuple:
                ``(True, False)``. True alone says that the batch is a list of samples.
            before_step: a function, called between backward and the optimizers' steps, with
                gradients unscaled: the place for ``clip_grad_norm_``.
            metric: takes the mean loss, and returns what a ReduceLROnPlateau steps with: ``float``.
                With ``group=``, it has to return the same on all ranks.

        Returns:
            The mean loss of the batch, detached, a tensor of one number.

        Raises:
            TypeError: the batch can't be split, or can be split in two ways (the message names
                what, and ``loss_of`` was not called), ``loss_of`` does not return one number or
                calls ``backward()`` itself, ``before_step`` is not a function, or a scheduler is a
                ReduceLROnPlateau and ``metric`` is missing.
            ValueError: ``retry`` is another, ``parts`` is below 1, or a model is a
                DistributedDataParallel and the transaction has no ``group=``.
            PeerFailedError: another rank failed; with ``group=``.
        """
        if not callable(loss_of):
            raise TypeError(f"run: loss_of is {type(loss_of).__name__}: write run(loss_of, batch)")
        return run(
            self, self._guarded, loss_of, batch,
            retry=retry, parts=parts, split=split, before_step=before_step, metric=metric,
        )  # fmt: skip

    @property
    def guarantee(self) -> str:
        """What holds when a block raises, in words; "strong: ..." if all of it holds."""
        guarded = self._guarded
        fused = [steps_fused(each) for each in guarded.training.optimizers]
        torn = (
            "an exception inside optimizer.step() leaves parameters and state half updated and "
            "raises UnrecoverableStepError"
        )
        if guarded.undo == "none" and not all(fused):
            return f"weak: undo='none' keeps no copies, so {torn}; one before it changes nothing"
        strong = (
            "strong: an exception before every optimizer has stepped changes nothing; after that "
            "the step counts, wholly"
        )
        if guarded.undo != "copy":
            if any(fused):
                strong += f"; a fused step is not copied, so {torn}"
            strong += (
                "; what the block itself writes to parameters through .data (SAM, weight noise) "
                "stays, for which undo='copy' keeps copies"
            )
        besides = {
            "a step that is not finite does not change parameters, state and buffers": guarded.gate,
            "on every rank, with run(): a step is taken on all of them or on none": guarded.ranks,
            f"run() splits batches into parts of {self.part_size} samples": self.part_size,
        }
        limits = "".join(f"; {text}" for text, why in besides.items() if why is not None)
        return strong + limits + frozen(guarded.training.modules)

    def stats(self) -> TransactionStats:
        """Return how many blocks were committed and rolled back, and with what."""
        gate = self._guarded.gate
        skipped = 0 if gate is None else gate.skipped
        return TransactionStats(self._commits, dict(self._rollbacks), skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the training consists of, to resume it bit for bit.

        These are the states of models, optimizers, scaler, schedulers, ``also=`` and every random
        generator, and the number of commits, for ``torchguard.save``, ``torch.save`` and
        ``torch.distributed.checkpoint``. Gradients are not in it: call it after a step.

        Raises:
            SaveError: called inside a block, which is half a step, in this thread or another one.
        """
        self._refuse_inside_step("step.state_dict()")
        counts = {"commits": self._commits, "part_size": self.part_size}
        return {**state_of(self._guarded), **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, whole or not at all.

        The state of an optimizer goes to the parameters of the same names, if both have names, and
        keeps the dtype in which it was saved.

        Raises:
            TypeError: the state is not one of a transaction.
            ValueError: it has another number of optimizers or of other parts, no generator of a
                device that holds it, or was on a device that is not there.
            SaveError: called inside a block.
        """
        self._refuse_inside_step("step.load_state_dict()")
        load(self._guarded, state)
        self._commits, self.part_size = state["commits"], state["part_size"]

    def _refuse_inside_step(self, function: str) -> None:
        """Raise if this thread is inside of a block, or another one trains the same tensors."""
        refuse_inside_step(function, self._guarded.training.changed_by_a_step)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse to decorate: a step is a block."""
        raise TypeError(
            "transaction: is not a decorator and is not called; write `with step:` inside the "
            "function, or step.run(loss_of, batch)"
        )

    def __deepcopy__(self, _: object) -> Self:
        """Refuse: the copy would guard copies of models and optimizers, and not those you train."""
        raise TypeError(
            "transaction: can't be copied; make a new one for the copied model and its optimizer"
        )

    # The with statement.

    def __enter__(self) -> Self:
        if self._blocks:
            raise RuntimeError("transaction: this one is open already: leave its block first")
        if self._guarded.sharded is not None:
            raise TypeError(self._guarded.sharded)
        self.committed = False
        block = Block(self._guarded)
        try:
            block.open()
            # Python handles signals behind calls; there is none between here and the block.
            self._blocks.append(block)
        except BaseException:  # an interrupt: __exit__ will not be called
            self._blocks.clear()
            block.close()
            raise
        return self

    def __exit__(
        self, _: type[BaseException] | None, exception: BaseException | None, *__: object
    ) -> None:
        signals = None if exception is None else DeferredSignals()
        block = self._blocks.pop()
        try:
            self._leave(block, exception)
        finally:
            try:
                block.close()
            finally:
                if signals is not None:
                    signals.restore_handlers()

    def _ask_for_accelerator(self) -> None:
        """Warn once if a block ends within an accumulation whose counter is not put back."""
        if self._guarded.training.optimizers and is_accumulating():
            self._guarded.accumulation_is_known = True
            warn_of_setup(
                "accumulation-not-restored",
                "accelerate's accumulate() counts micro-batches, and a rollback does not restore "
                "its counter, so a batch that is run again shifts every later step: pass "
                "transaction(..., also=accelerator)",
            )

    def _leave(self, block: Block, exception: BaseException | None) -> None:
        """Commit the block, or roll it back."""
        # Most programs have no Accelerate, and the walk to it costs more than this question.
        if "accelerate.state" in sys.modules and not self._guarded.accumulation_is_known:
            self._ask_for_accelerator()
        if exception is not None:
            close_checkpoints(exception)
            block.modes.restore()  # an interrupt may have come inside of torch.autocast or no_grad
        try:
            block.settle(exception)  # also if the block has caught what optimizer.step() raised
        except UnrecoverableStepError as error:
            record("rollback_failed", "transaction", str(error), is_said=True)
            raise
        if exception is not None and not block.all_have_stepped():
            name = type(exception).__name__
            if problems := block.roll_back():
                text = f"the training step could not be rolled back: {'; '.join(problems)}"
                record("rollback_failed", "transaction", text, is_said=True)
                raise UnrecoverableStepError(text) from exception
            self._rollbacks[name] += 1
            record("rolled_back", "transaction", f"a training step was rolled back after {name}")
            return
        if exception is not None:
            add_note(exception, block.finish_step(exception))
        block.note_accumulation()
        self.committed = block.counts()
        self._commits += self.committed
        outside = self._guarded.outside
        if outside.are_looked_for:
            outside.block_ends(stepped=self.committed or block.has_stepped())
