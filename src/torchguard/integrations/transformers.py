"""A callback for the ``Trainer`` of Hugging Face. Needs the extra ``transformers``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from torchguard.integrations import Session

__all__ = ["GuardCallback"]


class GuardCallback(Session, TrainerCallback):
    """Guards on while the trainer trains, and tensors checked before each checkpoint.

    Equals no callback at all, as long as nothing fails. If training raises, this trainer does not
    tell its callbacks: the guards stay on until ``torchguard.uninstall()``.

    Args:
        guards: names for :func:`torchguard.install`; one or several.

    Raises:
        InconsistentTensorError: before a checkpoint: a parameter, a gradient, a buffer or a
            moment of the optimizer has a shape that its memory does not back.
    """

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Install."""
        self._start()

    def on_train_end(self, *_: object, **__: object) -> None:
        """Uninstall."""
        self._stop()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the tensors before they are written; the trainer's own callbacks come first."""
        del args, state
        if control.should_save:
            self._check(kwargs.get("model"), kwargs.get("optimizer"))

    on_epoch_end = on_step_end
