"""A callback for the ``Trainer`` of Hugging Face. Needs the extra ``transformers``."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import Self

from torchguard.integrations import Session

__all__ = ["GuardCallback"]


class GuardCallback(Session, TrainerCallback):
    """Guards on while the trainer trains, tensors checked before each checkpoint, buckets logged.

    Equals no callback at all, as long as nothing fails. Use ``GuardCallback().attach(trainer)``:
    it comes before the callbacks that report, so that they report the buckets too, and the
    counts of what the guards did as ``torchguard/<kind>`` (see :func:`torchguard.events`). Where
    training raises, this trainer does not tell its callbacks: the guards stay on until
    ``torchguard.uninstall()``.

    Args:
        guards: names for :func:`torchguard.install`; one or several.
        buckets: bucketed functions or modules to log, by name, as ``torchguard/<name>/waste``
            and the like, whenever the trainer logs.

    Raises:
        InconsistentTensorError: before a checkpoint: a parameter, a gradient, a buffer or a
            moment of the optimizer has a shape that its memory does not back.
    """

    def attach(self, trainer: Trainer) -> Self:
        """Add this to a trainer, behind what controls the flow and before what reports."""
        # The handler calls its list in order. DefaultFlowCallback stands first and sets
        # control.should_save; add_callback() would put this last, behind what reports.
        # https://github.com/huggingface/transformers/blob/main/src/transformers/trainer_callback.py
        trainer.callback_handler.callbacks.insert(1, self)
        return self

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Install."""
        self._start()

    def on_train_end(self, *_: object, **__: object) -> None:
        """Uninstall."""
        self._stop()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check what is about to be written."""
        del args, state
        if control.should_save:
            self._check(kwargs.get("model"), kwargs.get("optimizer"))

    on_epoch_end = on_step_end

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the buckets, and what the guards did, to what is logged."""
        del args, control, kwargs
        # Trainer.log() has appended a copy of `logs` to the history before it calls this.
        metrics = self._metrics()
        if logs is not None:
            logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)
