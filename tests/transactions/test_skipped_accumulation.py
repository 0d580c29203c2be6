"""skip_nonfinite=True where gradients accumulate over several blocks, one for each micro-batch."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

import torchguard


def model_and_optimizer(*, fused: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)


def accumulate(
    step: torchguard.Transaction,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[torch.Tensor],
) -> None:
    *first, last = batches
    for batch in first:
        with step:
            model(batch).pow(2).sum().backward()
    with step:
        model(last).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    return [each.clone() for each in model.buffers()]


BAD, GOOD = torch.full((4, 2), float("nan")), torch.randn(4, 2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("batches", [(BAD, GOOD), (GOOD, BAD, GOOD), (GOOD, GOOD, BAD), (BAD,)])
def test_buffers_go_back_to_where_the_accumulation_began(
    batches: tuple[torch.Tensor, ...], fused: bool
) -> None:
    model, optimizer = model_and_optimizer(fused=fused)
    step = torchguard.transaction(model, optimizer, skip_nonfinite=True)
    accumulate(step, model, optimizer, (GOOD, GOOD))
    before = buffers(model)
    accumulate(step, model, optimizer, batches)
    assert step.stats().skipped == 1
    for now, then in zip(model.buffers(), before, strict=True):
        assert torch.equal(now, then)
    model.eval()
    assert model(GOOD).isfinite().all()


def test_an_accumulation_that_was_given_up_does_not_count() -> None:
    """Its gradients are gone when the next one begins, whose first block says where to go back."""
    model, optimizer = model_and_optimizer(fused=False)
    step = torchguard.transaction(model, optimizer, skip_nonfinite=True)
    with step:
        model(GOOD).pow(2).sum().backward()
    optimizer.zero_grad()
    before = buffers(model)
    accumulate(step, model, optimizer, (GOOD, BAD))
    for now, then in zip(model.buffers(), before, strict=True):
        assert torch.equal(now, then)


def test_steps_that_are_finite_keep_their_statistics() -> None:
    model, optimizer = model_and_optimizer(fused=False)
    plain, plain_optimizer = model_and_optimizer(fused=False)
    step = torchguard.transaction(model, optimizer, skip_nonfinite=True)
    for _ in range(3):
        accumulate(step, model, optimizer, (GOOD, 2 * GOOD))
        for batch in (GOOD, 2 * GOOD):
            plain(batch).pow(2).sum().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
