"""For the ``Trainer`` of Hugging Face: steps that are run again, and a callback for guards.

Needs the extra ``transformers``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import Self

import torchguard
from torchguard._events import logger, record
from torchguard._public import message
from torchguard.checkpoint.folder import seal
from torchguard.checkpoint.whole import CheckpointCheck
from torchguard.errors import UnrecoverableStepError, add_note, is_out_of_memory
from torchguard.integrations import Session
from torchguard.state.process import RNGState
from torchguard.transactions.retry import clear_frames, empty_caches
from torchguard.transactions.split import Split, rows_of
from torchguard.transactions.step import Transaction

__all__ = ["GuardCallback", "RetryMixin", "RetryTrainer"]

_IGNORED = -100  # a label that no loss counts


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


# ---- steps that are run again ----


class RetryMixin:
    """A ``Trainer`` whose steps survive: put it before the class of your trainer.

    Equals that trainer as long as nothing fails, with two differences on disk: each checkpoint has
    a manifest, and ``resume_from_checkpoint=True`` takes the newest checkpoint that is complete.
    If something fails:

    - A micro-batch that runs out of memory is rolled back and run again in halves, until one row is
      left. The micro-batches after it begin with that size. Gradients of earlier micro-batches
      stay. The loss of each part is weighted so that the gradient is that of the whole micro-batch,
      up to rounding: where the loss is a mean, by the share of the labels that are not -100, or of
      the rows if there are no labels. Dropout and BatchNorm see each part on its own.
    - After any other exception, Ctrl-C included, the step is rolled back, and a checkpoint of the
      last complete step is written, unless ``save_strategy="no"``. Then the exception is raised.

    Attributes:
        split: what of the inputs has a row for each sample, as ``split=`` of ``step.run`` takes it.
            Leave it None unless an error asks for it.

    Raises:
        TypeError: the inputs can't be split (the message names what), or the model is sharded.
        ValueError: ``resume_from_checkpoint=True``, and each checkpoint was damaged after it was
            written. If a kill has ended the first save, training begins again.
        UnrecoverableStepError: the step could not be rolled back: load a checkpoint.

    Cost:
        That of :func:`torchguard.transaction`. With accumulation, each micro-batch but the first
        copies the gradients.

    Example:
        >>> from transformers import Trainer
        >>> from torchguard.integrations.transformers import RetryMixin
        >>> class MyTrainer(RetryMixin, Trainer):  # or trl's SFTTrainer
        ...     pass
    """

    split: Split = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step: Transaction | None = None  # from the beginning of a step to its end
        self._micro_batch: Transaction | None = None  # forward and backward, without a step
        self._open = contextlib.ExitStack()
        self._begun: tuple[int, int | None] | None = None  # step and schedule of the open block
        self._random: RNGState | None = None  # when the last complete step ended
        self._rows: int | None = None  # of a part, once a micro-batch ran out of memory
        self._is_share: bool | None = None
        self._first_counts = True  # whether a loss that is a mean counts the first label of a row
        self.add_callback(_Blocks(self))  # type: ignore[attr-defined]

    # ---- what Trainer calls ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train; after an exception leave a checkpoint of the last complete step."""
        trainer: Any = super()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_complete(Path(str(self._arguments.output_dir)))
        try:
            with self._open:
                return trainer.train(resume_from_checkpoint, *args, **kwargs)
        except UnrecoverableStepError:
            raise
        except BaseException as error:
            self._name_override(error)
            self._save_last_step(error)
            raise
        finally:
            self._step = self._micro_batch = self._random = None

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of a micro-batch, in parts if memory runs out."""
        trainer: Any = super()
        if self._micro_batch is None:  # called by hand
            return trainer.training_step(model, inputs, *args, **kwargs)
        while True:
            try:
                with self._micro_batch:
                    if self._rows is None:
                        return trainer.training_step(model, inputs, *args, **kwargs)
                    return self._in_parts(trainer.training_step, model, inputs, args, kwargs)
            except Exception as error:
                if not is_out_of_memory(error) or isinstance(error, UnrecoverableStepError):
                    raise
                if self._arguments.world_size > 1:  # the other ranks would wait for this one
                    raise
                samples = rows_of(inputs, self.split, {}).samples
                size = min(samples, self._rows or samples)
                if size <= 1:
                    raise
                clear_frames(error)
            # Outside of the except clause, which holds the frames and so the activations.
            empty_caches()
            self._rows = math.ceil(size / 2)
            record(
                "batch_halved", "RetryTrainer", f"memory ran out; parts have {self._rows} rows now"
            )

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        trainer: Any = super()
        trainer._save_checkpoint(*args, **kwargs)
        folder = self._folder()
        if self._arguments.should_save and folder.is_dir():
            seal(folder)

    # ---- the blocks ----

    def _begin_step(self) -> None:
        trainer: Any = self
        if self._step is None:
            optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
            self._step = torchguard.transaction(
                trainer.model,
                getattr(optimizer, "optimizer", optimizer),
                trainer.accelerator.scaler,
                getattr(scheduler, "scheduler", scheduler),
                also=trainer.accelerator,
            )
            self._micro_batch = torchguard.transaction(trainer.model, (), also=trainer.accelerator)
        self._begun = trainer.state.global_step, getattr(trainer.lr_scheduler, "last_epoch", None)
        self._open.enter_context(self._step)

    def _end_step(self) -> None:
        try:
            self._open.close()  # Ctrl-C that came during optimizer.step() is raised here
        finally:
            self._begun = None
            self._random = RNGState.capture()

    def _in_parts(
        self, run: Any, model: Any, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Run a micro-batch in parts of ``_rows`` rows; return its loss."""
        items = args[0] if args else kwargs.get("num_items_in_batch")
        assert self._rows is not None
        rows = rows_of(inputs, self.split, {})
        total: torch.Tensor | None = None
        if self._is_share is None:
            row = next(rows.parts(inputs, 1))[0]
            self._is_share = items is not None and self._divides_by_items(model, row, items)
            self._first_counts = self._is_share or self._counts_first_label(model, row, items)
        whole = self._count(inputs)
        for part, share in rows.parts(inputs, self._rows):
            weight = self._count(part) / whole if whole else share
            if self._is_share:
                weight = 1.0  # a sum over the part, divided by what all micro-batches have
            with self._weighted(weight):
                loss: torch.Tensor = run(model, part, *args, **kwargs) * weight
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _count(self, inputs: Any) -> int:
        """Return over how many labels the loss of the inputs is a mean; 0 if there is no label."""
        labels = _labels(inputs)
        if labels is None:
            return 0
        if not self._first_counts and labels.ndim > 1:
            labels = labels[..., 1:]
        return int((labels != _IGNORED).sum())

    def _divides_by_items(self, model: Any, row: Any, items: Any) -> bool:
        """Try on one row whether the loss is a sum divided by ``num_items_in_batch``.

        A ``compute_loss`` of your own, or a model that takes the argument and ignores it, returns a
        mean instead.
        """
        once, twice = (self._tried(model, row, number) for number in (items, 2 * items))
        return abs(twice - once / 2) < abs(twice - once)

    def _counts_first_label(self, model: Any, row: Any, items: Any) -> bool:
        """Try on one row whether its first label counts: a model of text predicts the next one."""
        labels = _labels(row)
        if labels is None or labels.ndim == 1:
            return True
        with_first, without = labels.clone(), labels.clone()
        with_first[..., 0].clamp_(min=0)  # no class, where it is ignored
        without[..., 0] = _IGNORED
        one, other = (
            self._tried(model, {**row, "labels": each}, items) for each in (with_first, without)
        )
        return one != other and not (math.isnan(one) and math.isnan(other))

    def _tried(self, model: Any, row: Any, items: Any) -> float:
        """Return the loss of a row, without a gradient and without dropout."""
        trainer: Any = self
        model.eval()  # training_step calls train()
        row = trainer._prepare_inputs(copy.copy(row))
        with torch.no_grad(), trainer.compute_loss_context_manager():
            return float(trainer.compute_loss(model, row, num_items_in_batch=items))

    @contextlib.contextmanager
    def _weighted(self, weight: float) -> Iterator[None]:
        """Let ``accelerator.backward`` weight the loss, whoever has computed it."""
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        backward = accelerator.backward

        def weighted(loss: torch.Tensor, **kwargs: Any) -> None:
            backward(loss * weight, **kwargs)

        accelerator.backward = weighted
        try:
            yield
        finally:
            del accelerator.backward

    # ---- after an exception ----

    def _name_override(self, error: BaseException) -> None:
        """Say why memory that ran out in an override of ``training_step`` was not run again."""
        outer: Any = type(self).training_step
        frames = traceback.walk_tb(error.__traceback__)
        codes = {frame.f_code for frame, _ in frames} if is_out_of_memory(error) else set()
        is_ours = RetryMixin.training_step.__code__ in codes
        if getattr(outer, "__code__", None) in codes and not is_ours:
            add_note(
                error,
                f"torchguard: memory ran out in {outer.__qualname__}, and only what its super() "
                "runs is run again: derive its class from Trainer, and put the mixin before it, "
                "class Retried(RetryMixin, YourTrainer)",
            )

    @property
    def _arguments(self) -> TrainingArguments:
        arguments: TrainingArguments = self.args  # type: ignore[attr-defined]
        return arguments

    def _folder(self) -> Path:
        """Return the folder of the checkpoint of the last complete step."""
        trainer: Any = self
        root = trainer._get_output_dir(trial=None)
        return Path(root, f"checkpoint-{trainer.state.global_step}")

    def _save_last_step(self, error: BaseException) -> None:
        if self._step is None or self._arguments.save_strategy == "no":
            return
        if self._begun is not None and self._step.committed:  # a callback raised behind the step
            self._count_step(*self._begun)
        elif self._random is None:
            return  # no step is complete
        else:
            self._random.restore()
        if _is_complete(self._folder()):
            return
        trainer: Any = self
        try:
            trainer._save_checkpoint(trainer.model, None)
        except Exception:  # noqa: BLE001 - the one on its way is the one to see
            text = "RetryTrainer: no checkpoint of the last complete step was written"
            logger.exception(message("no-checkpoint-written", text))
            return
        add_note(
            error,
            f"torchguard: {self._folder()} holds the last complete step; continue with "
            "trainer.train(resume_from_checkpoint=True)",
        )

    def _count_step(self, number: int, epoch: int | None) -> None:
        """Count a step that is complete, if the trainer could not."""
        trainer: Any = self
        if trainer.state.global_step == number:
            trainer.state.global_step += 1
        if getattr(trainer.lr_scheduler, "last_epoch", None) == epoch is not None:
            trainer.lr_scheduler.step()


class RetryTrainer(RetryMixin, Trainer):
    """``transformers.Trainer`` whose steps survive; see :class:`RetryMixin`.

    Example:
        >>> from torchguard.integrations.transformers import RetryTrainer
        >>> def main(model, args, dataset):
        ...     trainer = RetryTrainer(model, args, train_dataset=dataset)
        ...     trainer.train(resume_from_checkpoint=True)
    """


def _labels(inputs: Any) -> torch.Tensor | None:
    """Return the labels that are classes, if there are any."""
    labels = inputs.get("labels") if hasattr(inputs, "get") else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim == 0:
        return None
    return labels


class _Blocks(TrainerCallback):
    """Tells a trainer where its steps begin and end."""

    def __init__(self, trainer: RetryMixin) -> None:
        self._trainer = trainer

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._trainer._begin_step()

    def on_step_end(self, *_: object, **__: object) -> None:
        self._trainer._end_step()


def _newest_complete(folder: Path) -> str | bool:
    """Return the newest checkpoint that is complete.

    True if there is no checkpoint at all, and False if a kill has ended the first save.
    """
    found = {
        int(match[1]): each
        for each in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"checkpoint-(\d+)", each.name)) and each.is_dir()
    }
    faults: list[str] = []
    was_complete = False
    for number in sorted(found, reverse=True):
        check = _check(found[number])
        if check:
            newest: str | bool = str(found[number])
            break
        was_complete |= check is not None
        faults.append(str(found[number] if check is None else check))
    else:
        if was_complete:
            raise ValueError(
                f"resume_from_checkpoint: no checkpoint in {folder} is complete: "
                f"{'; '.join(faults)}; pass resume_from_checkpoint=False to begin again"
            )
        newest = not faults
    for fault in faults:
        logger.warning(message("checkpoint-left-out", f"RetryTrainer: left out {fault}"))
    return newest


def _is_complete(folder: Path) -> bool:
    check = _check(folder)
    return check is not None and bool(check)


def _check(folder: Path) -> CheckpointCheck | None:
    """Check a checkpoint; None if the file that Trainer writes last is missing or cut off."""
    # https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py
    try:
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return torchguard.verify_checkpoint(folder)
