"""A callback for Lightning's ``Trainer``. Needs the extra ``lightning``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from torchguard.integrations import Session

__all__ = ["GuardCallback"]


class GuardCallback(Session, Callback):
    """Guards on while the trainer runs, and tensors checked before each checkpoint.

    Equals no callback at all, as long as nothing fails.

    Args:
        guards: names for :func:`torchguard.install`; one or several.

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
        """Check the tensors before they are written."""
        del checkpoint
        self._check(pl_module, *trainer.optimizers)
