"""A callback for Lightning's ``Trainer``. Needs the extra ``lightning``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from torchguard.integrations import Session

__all__ = ["GuardCallback"]


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
