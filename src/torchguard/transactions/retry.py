"""Run a whole training step, again in smaller parts if memory runs out."""

from __future__ import annotations

import contextlib
import gc
import math
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, get_args

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchguard._events import record, warn_user
from torchguard._torch.eager import versions_of
from torchguard.errors import (
    UnrecoverableStepError,
    add_note,
    is_out_of_memory,
    with_causes,
)
from torchguard.state.process import accelerator_in_use
from torchguard.training_setup import warn_of_setup
from torchguard.transactions.block import Guarded
from torchguard.transactions.ranks import FAILED, OUT_OF_MEMORY
from torchguard.transactions.split import Split, rows_of

Retry = Literal["halve"]


class Blocks(AbstractContextManager[Any], Protocol):
    """A transaction, of which :func:`run` opens a block for each attempt."""

    committed: bool
    part_size: int | None


def run(
    step: Blocks,
    guarded: Guarded,
    loss_of: Callable[[Any], torch.Tensor],
    batch: Any,
    *,
    retry: Retry | None,
    parts: int,
    split: Split,
    before_step: Callable[[], Any] | None,
    metric: Callable[[torch.Tensor], Any] | None,
) -> torch.Tensor:
    """Do what ``Transaction.run`` says."""
    _check(guarded, retry, parts, before_step, metric)
    ranks = guarded.ranks
    samples = size = 0  # B, and the size of a part; 0 until the batch has been looked at
    halved = False

    def may_halve(error: BaseException) -> bool:
        # The text of a rollback that failed may be one of memory.
        was_undone = not isinstance(error, UnrecoverableStepError)
        return retry is not None and size > 1 and was_undone and is_out_of_memory(error)

    def code_of(error: BaseException) -> int:
        return OUT_OF_MEMORY if may_halve(error) else FAILED

    while True:
        together = contextlib.nullcontext() if ranks is None else ranks.attempt(code_of)
        try:
            with together:
                pieces: Iterable[tuple[Any, float]] = [(batch, 1.0)]
                if retry is not None or parts > 1:
                    rows = rows_of(batch, split, guarded.lists)
                    samples = rows.samples
                    size = size or min(step.part_size or samples, math.ceil(samples / parts))
                    pieces = rows.parts(batch, size)
                with step:
                    loss = _train(guarded, loss_of, pieces, before_step)
                    _update(guarded, loss, metric)
        except BaseException as error:
            if ranks is None:
                again = may_halve(error) and not step.committed
            else:
                again = ranks.run_again(error)
            if not again:
                _explain(error, is_one_sample=retry is not None and size == 1)
                raise
            clear_frames(error)
        else:
            if halved and size != step.part_size:
                step.part_size = size  # the batches after it begin with it, and do not warn
                warn_user(
                    "batch-halved",
                    f"a batch of {samples} samples ran out of memory; it was run in parts of "
                    f"{size}, and the batches after it are too",
                )
            return loss
        # Outside of the except clause: until there the exception holds the frames of the failed
        # attempt, and these hold its activations (pytorch.org/docs/stable/notes/faq.html).
        empty_caches()
        size, halved = (size + 1) // 2, True
        what = f"memory ran out; the next parts have {size} samples"
        record("batch_halved", "transaction", what, is_said=True)  # by the warning above


def _explain(error: BaseException, *, is_one_sample: bool) -> None:
    if is_one_sample and is_out_of_memory(error):
        add_note(
            error,
            "run: memory ran out with one sample, which can't be halved: shorten it, or recompute "
            "its activations with torchguard.safe_checkpoint",
        )


def _train(
    guarded: Guarded,
    loss_of: Callable[[Any], torch.Tensor],
    parts: Iterable[tuple[Any, float]],
    before_step: Callable[[], Any] | None,
) -> torch.Tensor:
    """Run forward and backward, as a plain loop does; return the mean loss, detached."""
    if guarded.ranks is None:
        loss = _backward(guarded, loss_of, parts)
        if guarded.gate is not None:
            guarded.gate.loss = loss.detach()
    else:
        with guarded.ranks.without_communication():
            loss = _backward(guarded, loss_of, parts)
        guarded.ranks.average()
    if before_step is not None:
        if guarded.scaler is not None:  # without before_step, a fused step unscales in its kernel
            for optimizer in guarded.training.optimizers:
                guarded.scaler.unscale_(optimizer)
        before_step()
    return loss


def _update(
    guarded: Guarded, loss: torch.Tensor, metric: Callable[[torch.Tensor], Any] | None
) -> None:
    """Step optimizers, scaler and schedulers, and drop the gradients."""
    scaler, optimizers = guarded.scaler, guarded.training.optimizers
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if guarded.ranks is not None:
        guarded.ranks.agree_to_commit()  # GradScaler may have called no step()
    if scaler is not None:
        scaler.update()
    for scheduler in guarded.schedulers:
        last = guarded.epochs.get(id(scheduler))
        if last is not None and scheduler.last_epoch == last + 1 and not guarded.loop_steps_too:
            guarded.loop_steps_too = True
            warn_of_setup(
                "scheduler-stepped-twice",
                f"it steps {type(scheduler).__name__}, and your loop has stepped it too: the "
                "learning rate changes twice in each step. Leave out your scheduler.step()",
                "run",
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            assert metric is not None  # _check has asked
            scheduler.step(metric(loss))
        else:
            scheduler.step()
        guarded.epochs[id(scheduler)] = getattr(scheduler, "last_epoch", None)
    for optimizer in optimizers:
        optimizer.zero_grad()


def _backward(
    guarded: Guarded,
    loss_of: Callable[[Any], torch.Tensor],
    parts: Iterable[tuple[Any, float]],
) -> torch.Tensor:
    total: torch.Tensor | None = None
    for part, share in parts:
        before = None if guarded.loss_is_known else _gradients(guarded)
        loss = loss_of(part)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
            raise TypeError(
                f"run: loss_of(part) returned {shown}, expected a tensor of one number: return the "
                "mean loss, without .item()"
            )
        if not loss.requires_grad:
            raise TypeError(
                "run: loss_of(part) returned a loss without a gradient: compute it from the model, "
                "outside of torch.no_grad(), and leave out .detach()"
            )
        if before is not None and before != _gradients(guarded):
            raise TypeError(
                "run: loss_of has called backward() itself, and run() calls it too: return the "
                "loss, and leave out loss.backward()"
            )
        guarded.loss_is_known = True
        if share != 1.0:  # the whole batch in one part: not one operator more than plain code
            loss = loss * share
        (loss if guarded.scaler is None else guarded.scaler.scale(loss)).backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None  # a batch has at least one part
    return total


def _gradients(guarded: Guarded) -> list[tuple[int, int | None]]:
    """Return something that changes when a gradient is written."""
    parameters = [p for group in guarded.training.groups() for p in group]
    present = [each.grad for each in parameters if each.grad is not None]
    return list(zip(map(id, present), versions_of(present), strict=True))


def _check(
    guarded: Guarded, retry: object, parts: object, before_step: object, metric: object
) -> None:
    if retry not in {None, *get_args(Retry)}:
        raise ValueError(f"run: retry is {retry!r}, expected 'halve' or None")
    if not isinstance(parts, int) or parts < 1:
        raise ValueError(f"run: parts is {parts!r}, expected a number of 1 or more")
    for name, value, such_as in (("before_step", before_step, "clip"), ("metric", metric, "float")):
        if value is not None and not callable(value):
            raise TypeError(
                f"run: {name} is of type {type(value).__name__}, expected a function: write "
                f"{name}={such_as}, without parentheses"
            )
    if metric is None and any(isinstance(s, ReduceLROnPlateau) for s in guarded.schedulers):
        raise TypeError(
            "run: steps each scheduler after each batch, and ReduceLROnPlateau.step() takes a "
            "metric: pass metric=, a function of the loss, or transaction(..., also=(scheduler,)) "
            "and step it yourself"
        )
    if guarded.ranks is None and any(
        isinstance(m, DistributedDataParallel) for m in guarded.training.modules
    ):
        raise ValueError(
            "run: with DistributedDataParallel pass transaction(..., group=True): a rank that "
            "fails alone would leave the others waiting"
        )


def clear_frames(error: BaseException) -> None:
    """Free the local variables of the frames that an exception and its causes hold."""
    for each in with_causes(error):
        traceback.clear_frames(each.__traceback__)  # leaves alone those that still run


def empty_caches() -> None:
    """Give back memory that only garbage and the allocators hold."""
    gc.collect()  # graphs whose nodes hold each other, such as a Function that keeps its output
    in_use = accelerator_in_use()
    if in_use is not None and hasattr(in_use[1], "empty_cache"):
        in_use[1].empty_cache()
