"""A step that counts although its block raises: what runs after the optimizers is made whole."""

from __future__ import annotations

from typing import Any

from torchguard._torch.optimizers import per_optimizer_states
from torchguard.transactions.commit import add_note
from torchguard.transactions.containers import Containers
from torchguard.transactions.copies import undos_of
from torchguard.transactions.state import TrainingSnapshot, TrainingState

__all__ = ["AtCommit", "finish_step"]


class AtCommit:
    """What changes after the optimizers, as it was when the last of them had stepped."""

    def __init__(self, training: TrainingState) -> None:
        groups = [group for each in training.optimizers for group in each.param_groups]
        parameters = [group["params"] for group in groups]
        self.others = [
            (other, Containers([vars(other)]))
            if per_optimizer_states(other) is not None
            else (other, Containers([vars(other), *groups], skip=parameters))
            for other in training.others
        ]
        self.also = undos_of(training.also, buffers=True)


def finish_step(
    training: TrainingState,
    snapshot: TrainingSnapshot,
    at_commit: AtCommit | None,
    exception: BaseException | None,
) -> None:
    """Finish scaler and scheduler, or put them back; note on the exception that the step counts.

    ``at_commit`` is None if an interrupt came while it was read: nothing has run since then.
    """
    notes = ["torchguard: the optimizers had stepped already, so this training step counts"]
    for optimizer in training.optimizers:
        snapshot.restore_scaling(optimizer)
    others = [] if at_commit is None else at_commit.others
    read = {id(other): containers for other, containers in others}
    scalers = [each for each in training.others if per_optimizer_states(each) is not None]
    notes += [_finish_scaler(scaler, read.get(id(scaler))) for scaler in scalers]
    for other, containers in others:
        if other not in scalers and _raised_inside(exception, other):
            containers.restore()
            notes.append(f"{type(other).__name__} is as it was before its step()")
    if at_commit is not None and at_commit.also:
        for undo in at_commit.also:
            undo()
        notes.append("what also= names is as it was when the last optimizer had stepped")
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
    """Whether an exception went through a method of an object."""
    traceback = None if exception is None else exception.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_locals.get("self") is owner:
            return True
        traceback = traceback.tb_next
    return False
