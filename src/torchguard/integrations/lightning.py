"""For Lightning's ``Trainer``: steps that are run again, and a callback for guards.

Needs the extra ``lightning``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import lightning
from lightning.pytorch import Callback, LightningModule, Trainer

import torchguard
from torchguard.errors import UnrecoverableStepError
from torchguard.integrations import Session
from torchguard.transactions.retry import clear_frames, empty_caches
from torchguard.transactions.step import Transaction

__all__ = ["GuardCallback", "RetryMixin"]

T = TypeVar("T")


class GuardCallback(Session, Callback):
    """Guards on while the trainer runs, tensors checked before each checkpoint, buckets logged.

    Equals no callback at all, as long as nothing fails. If a guard did something, its counts are
    logged as ``torchguard/<kind>`` (see :func:`torchguard.events`).

    Args:
        guards: names for :func:`torchguard.install`; one or several.
        buckets: bucketed functions or modules to log, by name. They are logged every
            ``log_every_n_steps`` as ``torchguard/<name>/waste`` and the like.

    Raises:
        InconsistentTensorError: at a checkpoint: a parameter, a gradient, a buffer or a
            moment of an optimizer has a shape that its memory does not back.
    """

    def setup(self, *_: object, **__: object) -> None:
        """Install."""
        self._start()

    def teardown(self, *_: object, **__: object) -> None:
        """Uninstall."""
        self._stop()

    def on_exception(self, *_: object, **__: object) -> None:
        """Uninstall: after an exception there is no ``teardown``."""
        # Its _interrupt() calls this hook and then tears the trainer down, not its callbacks:
        # https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/pytorch/trainer/call.py
        self._stop()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Check what is about to be written."""
        del checkpoint
        self._check(pl_module, *trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the buckets, and what the guards did."""
        del pl_module, outputs, batch
        # To the loggers themselves: self.log() averages over an epoch what are counters, and
        # refuses names that come up later.
        every = getattr(trainer, "log_every_n_steps", 50)
        if (batch_idx + 1) % every == 0 and (metrics := self._metrics()):
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)


class RetryMixin:
    """A ``LightningModule`` whose steps are run again: ``class Net(RetryMixin, LightningModule)``.

    Equals the module without it as long as nothing fails. If forward, backward or
    ``optimizer.step()`` raises, weights, gradients, buffers, optimizers, random numbers and
    Lightning's counters are restored, and the batch is run again. Gradients of earlier batches of
    an accumulation stay. With manual optimization all of ``training_step`` is run again. An
    interrupt is rolled back too, and not run again.

    Attributes:
        retries: how often a batch is run again before its exception is raised.

    Raises:
        TypeError: the model is sharded, or an optimizer's step can't be rolled back (LBFGS).
        RuntimeError: this Lightning has other names in its loops: please report it to torchguard.
        UnrecoverableStepError: the step could not be rolled back: load a checkpoint.

    Cost:
        That of :func:`torchguard.transaction`, and copies of the gradients, which Lightning keeps
        until the next batch; it passes a closure to ``optimizer.step()``, so a fused step is copied
        too.

    Example:
        >>> from lightning import LightningModule
        >>> from torchguard.integrations.lightning import RetryMixin
        >>> class Net(RetryMixin, LightningModule):
        ...     retries = 2
    """

    retries: int = 1

    @property
    def trainer(self) -> Any:
        """The trainer that runs this module."""
        return LightningModule.trainer.fget(self)  # type: ignore[attr-defined]

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        # The hooks of a module are the user's to override; this is set before each fit().
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        if trainer is not None:
            self._attach(trainer)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Run forward and backward, and then the step, each again if it fails."""
        module: Any = super()
        if optimizer_closure is None:
            module.optimizer_step(epoch, batch_idx, optimizer)
            return
        result = optimizer_closure()  # is run again by itself
        self._again(
            self._blocks()[0],
            lambda: module.optimizer_step(epoch, batch_idx, optimizer, lambda: result),
        )

    def _attach(self, trainer: Any) -> None:
        """Let the loops of a trainer run their parts through this module."""
        # https://github.com/Lightning-AI/pytorch-lightning/tree/master/src/lightning/pytorch/loops/optimization
        self._made: tuple[Transaction, Transaction] | None = None
        try:
            loop = trainer.fit_loop.epoch_loop
            automatic, manual = loop.automatic_optimization, loop.manual_optimization
            make, advance = type(automatic)._make_closure, type(manual).advance
            self._counters = automatic.optim_progress, manual.optim_step_progress
        except AttributeError as error:
            raise RuntimeError(
                f"RetryMixin: Lightning {lightning.__version__} has other names in its loops "
                f"({error}): please report it to torchguard"
            ) from error

        def make_closure(*args: Any, **kwargs: Any) -> Any:
            closure = make(automatic, *args, **kwargs)
            run = closure.closure
            closure.closure = lambda *a, **k: self._again(self._blocks()[1], lambda: run(*a, **k))
            return closure

        automatic._make_closure = make_closure
        manual.advance = lambda kwargs: self._again(
            self._blocks()[0], lambda: advance(manual, kwargs)
        )

    def _blocks(self) -> tuple[Transaction, Transaction]:
        """Return a block for a whole step, and one for a batch of an accumulation."""
        if self._made is None:
            trainer = self.trainer
            optimizers = [getattr(each, "optimizer", each) for each in trainer.optimizers]
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._made = (
                torchguard.transaction(self, optimizers, scaler, also=self._counters),  # type: ignore[arg-type]
                torchguard.transaction(self, (), also=self._counters),  # type: ignore[arg-type]
            )
        return self._made

    def _again(self, block: Transaction, run: Callable[[], T]) -> T:
        """Run something in a block, and again if it fails before its step counts."""
        for left in range(self.retries, -1, -1):
            try:
                with block:
                    return run()
            except UnrecoverableStepError:
                raise
            except Exception as error:
                if not left or block.committed:
                    raise
                clear_frames(error)
            # Outside of the except clause, which holds the frames and so the activations.
            empty_caches()
        raise AssertionError
