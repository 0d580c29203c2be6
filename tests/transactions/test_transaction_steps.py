"""transaction(): after the commit, and what is reported."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import torchguard
from support.small_training import FailAt, InjectedError
from support.training import Failure, begin, fail


def test_a_scaler_that_fails_in_the_middle_of_its_update_is_updated_once() -> None:
    """Its scale is written, and the version counter of the scale has not moved."""
    trainings = begin(), begin()
    for training, fault in zip(trainings, (FailAt(), FailAt(0, after=True)), strict=True):
        with contextlib.suppress(InjectedError), training.step:
            training.forward_backward()
            training.scaler.step(training.optimizer)
            with fault:
                training.scaler.update()
        assert (fault.seen, training.step.committed) == (1, True)
    expected, found = (each.scaler.state_dict() for each in trainings)
    assert found == expected
    with trainings[1].step:
        trainings[1].whole_step()


def test_a_fused_step_that_is_not_the_last_of_several_is_undone() -> None:
    models = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.Adam(each.parameters(), fused=True) for each in models]
    step = torchguard.transaction(models, optimizers)
    before = [each.tolist() for each in models[0].parameters()]
    with pytest.raises(Failure), step:
        models[0](torch.ones(1, 2)).sum().backward()
        optimizers[0].step()
        raise Failure
    assert [each.tolist() for each in models[0].parameters()] == before
    assert not any(optimizers[0].state.values())


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


def test_the_hooks_of_optimizers_go_with_the_last_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Optimizers are watched while there is a transaction, and cost nothing after it."""
    for name in ("_alive", "_watching"):  # transactions of other tests may live on
        monkeypatch.setattr(f"torchguard.transactions.hooks.{name}", [])
    before = len(_global_optimizer_pre_hooks)
    model = nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    steps = [torchguard.transaction(model, sgd) for _ in range(2)]
    for watched in (1, 1, 0):
        assert len(_global_optimizer_pre_hooks) == before + watched
        del steps[:1]
        gc.collect()
