"""transaction(): after the commit, what is reported, and replay."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import torchguard
from support.training import KINDS, Failure, begin, changed, fail, fingerprint

# ---- after the commit ----


def test_an_exception_after_the_step_leaves_a_step_that_counts() -> None:
    """The scaler is updated, so the next step works; a note says so."""
    training = begin()
    before = [each.tolist() for each in training.model.parameters()]
    with pytest.raises(Failure) as raised:
        with training.step:
            training.forward_backward()
            training.scaler.step(training.optimizer)
            raise Failure
    assert "this training step counts" in "".join(raised.value.__notes__)  # type: ignore[attr-defined]
    assert training.step.committed
    assert [each.tolist() for each in training.model.parameters()] != before
    training.scheduler.step()
    training.optimizer.zero_grad()
    with training.step:
        training.whole_step()


class Counter:
    calls = 0


class Torn(torch.optim.lr_scheduler.LambdaLR):
    fails = False

    def __init__(self, *args: Any) -> None:
        self.counter = Counter()  # an object that state_dict() holds
        super().__init__(*args)

    def get_lr(self) -> list[Any]:
        self.counter.calls += 1
        if self.fails:
            raise Failure  # the counters are advanced already
        return super().get_lr()


@pytest.mark.parametrize("where", ["scheduler", "also"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_scheduler_that_raises_midway_is_as_it_was_before_its_step(
    where: str, wrapped: bool
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = Torn(optimizer, lambda epoch: 0.5**epoch)
    named: dict[str, Any] = {where: scheduler}
    step = torchguard.transaction(model, optimizer, **named)
    scheduler.fails = True
    calls = scheduler.counter.calls
    with pytest.raises(RuntimeError if wrapped else Failure) as raised:
        with step:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            try:
                scheduler.step()
            except Failure as error:
                if wrapped:
                    raise RuntimeError("no schedule") from error
                raise
    if where == "also":
        assert scheduler.counter.calls == calls
    assert "Torn is as it was" in "".join(raised.value.__notes__)  # type: ignore[attr-defined]
    scheduler.fails = False
    scheduler.step()
    assert scheduler.last_epoch == 1
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("apart", [False, True])
def test_a_scheduler_that_raises_leaves_the_lr_that_another_one_has_set(apart: bool) -> None:
    """Of one optimizer or of two."""
    model = nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(1 + apart)]
    first = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5)
    second = Torn(optimizers[-1], lambda epoch: 0.5**epoch)
    step = torchguard.transaction(model, optimizers, scheduler=[first, second])
    second.fails = True
    with pytest.raises(Failure), step:
        model(torch.ones(1, 2)).sum().backward()
        for each in optimizers:
            each.step()
        first.step()
        second.step()
    assert (first.last_epoch, second.last_epoch) == (1, 0)
    assert [optimizers[0].param_groups[0]["lr"]] == first.get_last_lr() == [0.5]
    assert optimizers[-1].param_groups[0]["lr"] == (1.0 if apart else 0.5)


class TornPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    fails = False

    def _reduce_lr(self, epoch: int) -> None:
        super()._reduce_lr(epoch)
        if self.fails:
            raise Failure


@pytest.mark.parametrize("fails", [False, True])
def test_a_scheduler_in_also_and_its_lr_go_back_together_or_stay(fails: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = TornPlateau(optimizer, factor=0.5, patience=0)
    average = [torch.zeros(1)]
    step = torchguard.transaction(model, optimizer, also=[plateau, *average])
    plateau.step(1.0)
    plateau.fails = fails
    with pytest.raises(Failure), step:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        average[0].add_(1)
        plateau.step(1.0)
        raise Failure
    stays = 0 if fails else 1
    assert plateau.last_epoch == 1 + stays
    assert optimizer.param_groups[0]["lr"] == 0.5**stays
    assert average[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_two_optimizers_step_together_or_not_at_all(kind: str) -> None:
    """The first has stepped when the second one raises: it goes back, fused or not."""
    models = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.Adam(each.parameters(), **KINDS[kind]) for each in models]
    step = torchguard.transaction(models, optimizers)
    before = [each.tolist() for each in models[0].parameters()]
    with pytest.raises(Failure), step:
        models[0](torch.ones(1, 2)).sum().backward()
        optimizers[0].step()
        assert [each.tolist() for each in models[0].parameters()] != before
        raise Failure
    assert [each.tolist() for each in models[0].parameters()] == before
    assert not any(optimizers[0].state.values())


# ---- never silent ----


def test_parameters_written_outside_of_step_are_named_or_put_back() -> None:
    """They are copied on entry once a compiled function has a step in it: its hooks do not run."""
    training = begin()
    bias = training.model.head.bias
    before = bias.detach().clone()
    with pytest.raises((torchguard.UnrecoverableStepError, Failure)) as raised:
        with training.step:
            with torch.no_grad():
                bias.add_(1)
            raise Failure
    if isinstance(raised.value, Failure):
        assert torch.equal(bias, before)
    else:
        assert "use undo='copy'" in str(raised.value)
        assert isinstance(raised.value.__cause__, Failure)


def test_an_optimizer_that_the_transaction_does_not_know_is_named() -> None:
    training = begin()
    stranger = torch.optim.SGD(training.model.head.parameters(), lr=0.1, fused=True)
    with pytest.raises(torchguard.UnrecoverableStepError, match="pass every optimizer"):
        with training.step:
            training.forward_backward()
            stranger.step()
            raise Failure


def test_scopes_of_torch_that_the_block_has_not_left_are_closed() -> None:
    """An interrupt inside of ``torch.autocast.__exit__`` leaves autocast on, and its counter."""
    model = nn.Linear(2, 2)
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(Failure), step:
        torch.autocast("cpu", dtype=torch.float16, cache_enabled=False).__enter__()
        torch.set_grad_enabled(False)
        raise Failure
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.is_autocast_cache_enabled()
    assert torch.is_grad_enabled()
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def test_a_retry_within_the_except_clause_after_a_checkpointed_forward_failed() -> None:
    """Up to torch 2.11 its hooks on saved tensors stay as long as the exception lives."""
    model = nn.Linear(2, 2)
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), 0.1))
    x = torch.ones(2, 2, requires_grad=True)

    def nested(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(fail, x, use_reentrant=False)
        return out

    try:
        with step:
            checkpoint(nested, x, use_reentrant=False)
    except Failure:
        with step:
            model(x).exp().sum().backward()
    assert x.grad is not None


def test_the_hooks_of_optimizers_go_with_the_last_transaction() -> None:
    """Optimizers are watched while there is a transaction, and cost nothing after it."""
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    model = nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    steps = [torchguard.transaction(model, sgd) for _ in range(2)]
    for watched in (1, 1, 0):
        assert len(_global_optimizer_pre_hooks) == before + watched
        del steps[:1]
        gc.collect()


def test_stats_count_what_was_put_back() -> None:
    """By kind; what the block has left alone is not among it, nor what a commit keeps."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = torchguard.transaction(model, optimizer)
    for number in range(3):
        with pytest.raises(Failure), step:
            model(torch.ones(4, 2)).sum().backward()
            if number == 2:
                optimizer.step()
            raise Failure
    assert step.stats().put_back == {"gradients": 8, "buffers": 6, "RNG states": 2}
    assert step.stats().rollbacks == {"Failure": 2}
    assert step.stats().commits == 1
    with pytest.raises(Failure), step:
        np.random.rand()  # noqa: NPY002 - the global one
        raise Failure
    assert step.stats().put_back["RNG states"] == 3
    assert step.stats().microseconds > 0


# ---- replay ----


def test_replay_runs_twice_and_leaves_one_run() -> None:
    """The same gradients, buffers and random numbers as after one run."""
    ends = []
    for replayed in (False, True):
        training = begin()
        runs = 0
        for _ in training.step.replay(2) if replayed else range(1):
            training.forward_backward()
            runs += 1
        assert runs == 1 + replayed
        gradients = [each.grad for each in training.model.parameters() if each.grad is not None]
        ends.append([*gradients, *training.model.buffers(), torch.get_rng_state()])
        ends[-1].append(torch.tensor([random.random(), np.random.rand()]))  # noqa: NPY002, S311
    assert len(ends[0]) == len(ends[1])
    assert all(map(torch.equal, *ends))


def test_replay_names_the_first_gradient_that_differs_and_leaves_nothing() -> None:
    """Nor does it leave anything of code that raises."""
    training = begin()
    before = fingerprint(training)
    with pytest.raises(torchguard.errors.ReplayMismatchError, match=r"gradient of model.head.bias"):
        for run in training.step.replay(2):
            training.forward_backward()
            training.model.head.bias.grad[0] += run * 1e-3
    assert changed(training, before) == []
    with pytest.raises(Failure):
        for _ in training.step.replay(2):
            training.forward_backward()
            raise Failure
    assert changed(training, before) == []
    with pytest.raises(ValueError, match="times is 1"):
        next(training.step.replay(1))
