"""A loop whose steps the blocks of its transaction do not see says so within the first blocks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import torchguard
from torchguard.errors import TrainingSetupWarning

X = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


class Loop:
    """A model, its optimizer, their transaction; ``block(number)`` is one turn of a loop."""

    def __init__(self, **options: Any) -> None:
        self.model = net()
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        self.new = AdamW(self.model.parameters(), lr=0.1)
        self.step = torchguard.transaction(self.model, self.optimizer, **options)

    def backward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(X).square().mean()
        loss.backward()
        return loss

    def finish(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()


def all_outside(loop: Loop, _: int) -> None:
    with loop.step:
        loss = loop.model(X).square().mean()
    loss.backward()
    loop.finish(loop.optimizer)


def step_outside(loop: Loop, _: int) -> None:
    with loop.step:
        loop.backward()
    loop.finish(loop.optimizer)


def accumulation_stepped_outside(loop: Loop, number: int) -> None:
    with loop.step:
        loop.backward()
    if number % 2:
        loop.finish(loop.optimizer)


def inside_the_closure(loop: Loop, _: int) -> None:
    """As Lightning's automatic optimization runs ``training_step``."""

    def closure() -> Any:
        with loop.step:
            loss = loop.model(X).square().mean()
        loop.optimizer.zero_grad()
        loss.backward()
        return loss

    loop.optimizer.step(closure)


def new_outside(loop: Loop, _: int) -> None:
    with loop.step:
        loop.backward()
    loop.finish(loop.new)


def new_later(loop: Loop, number: int) -> None:
    """After a stage of the training another optimizer is made."""
    with loop.step:
        loop.backward()
        loop.finish(loop.new if number > 2 else loop.optimizer)


def new_beside(loop: Loop, _: int) -> None:
    with loop.step:
        loop.backward()
        loop.optimizer.step()
        loop.finish(loop.new)


WRONG: dict[Callable[[Loop, int], None], str] = {
    all_outside: "AdamW steps outside of the block",
    step_outside: "AdamW steps outside of the block",
    accumulation_stepped_outside: "AdamW steps outside of the block",
    inside_the_closure: "AdamW steps outside of the block",
    new_outside: "AdamW steps outside of the block",
    new_later: "AdamW, which the transaction was not given, has stepped over its parameters",
    new_beside: "AdamW, which the transaction was not given, has stepped over its parameters",
}


def said(turn: Callable[[Loop, int], object], loop: Loop, turns: int = 8) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(turns):
            turn(loop, number)
    assert {each.filename for each in caught} <= {__file__}
    return [str(each.message) for each in caught if each.category is TrainingSetupWarning]


@pytest.mark.parametrize("turn", WRONG)
def test_steps_that_no_block_sees_are_said_once(turn: Callable[[Loop, int], None]) -> None:
    (found,) = said(turn, Loop())
    assert WRONG[turn] in found
    assert said(turn, Loop(), 4), "not within the first blocks"


# ---- right loops ----


def accumulated(loop: Loop, number: int) -> None:
    with loop.step:
        loop.backward()
        if number % 4 == 3:
            loop.finish(loop.optimizer)


def evaluated_at_the_end(loop: Loop, number: int) -> None:
    with loop.step:
        if number < 3:
            loop.backward()
            loop.finish(loop.optimizer)
        else:
            loop.model(X)


def warmed_up(loop: Loop, number: int) -> None:
    if not number:
        with loop.step, torch.no_grad():
            loop.model(X)
        for _ in range(3):
            loop.backward()
            loop.finish(loop.optimizer)
    accumulated(loop, number)


def fails_at_first(loop: Loop, number: int) -> None:
    with contextlib.suppress(ZeroDivisionError), loop.step:
        loop.backward()
        if number < 3:
            raise ZeroDivisionError
        loop.finish(loop.optimizer)


class Scaled(Loop):
    """Overflows in its first steps, which the scaler skips."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        super().__init__(scaler=self.scaler)


def overflows(loop: Any, number: int) -> None:
    with loop.step:
        loss = loop.model(X).square().mean() * (float("inf") if number < 3 else 1.0)
        loop.scaler.scale(loss).backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.optimizer.zero_grad()


def overflows_in_an_accumulation(loop: Any, number: int) -> None:
    with loop.step:
        loss = loop.model(X).square().mean() * (float("inf") if number < 3 else 1.0)
        loop.scaler.scale(loss).backward()
        if number % 2:
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
            loop.optimizer.zero_grad()


class Gan(Loop):
    """A critic that steps in plain code, more often than the generator in its transaction."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(1, 1)
        self.of_critic = AdamW(self.critic.parameters())
        models = [self.model, self.critic]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingSetupWarning)
            self.step = torchguard.transaction(models, self.optimizer)


def critic_beside(loop: Any, number: int) -> None:
    with loop.step:
        loss = loop.critic(loop.model(X)).square().mean()
        loss.backward()
        if number % 3 == 2:
            loop.finish(loop.optimizer)
    loop.finish(loop.of_critic)


class Pair(Loop):
    """Each has a transaction of its own, with both models in it."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(1, 1)
        self.of_critic = AdamW(self.critic.parameters())
        models = [self.model, self.critic]
        self.step = torchguard.transaction(models, self.optimizer)
        self.step_of_critic = torchguard.transaction(models, self.of_critic)


def each_in_its_own(loop: Any, number: int) -> None:
    with loop.step_of_critic:
        loop.critic(loop.model(X).detach()).square().mean().backward()
        loop.finish(loop.of_critic)
    if number % 3 == 2:
        with loop.step:
            loop.critic(loop.model(X)).square().mean().backward()
            loop.of_critic.zero_grad()
            loop.finish(loop.optimizer)


def both_open(loop: Any, _: int) -> None:
    with loop.step, loop.step_of_critic:
        loop.critic(loop.model(X)).square().mean().backward()
        loop.finish(loop.of_critic)
        loop.finish(loop.optimizer)


def another_training_beside(loop: Loop, number: int) -> None:
    """Of another model, between blocks that accumulate."""
    accumulated(loop, number)
    other = nn.Linear(2, 1)
    optimizer = AdamW(other.parameters())
    other(X).sum().backward()
    optimizer.step()


RIGHT: dict[Callable[[Any, int], None], Callable[[], Loop]] = {
    accumulated: Loop, evaluated_at_the_end: Loop, warmed_up: Loop, fails_at_first: Loop,
    overflows: Scaled, overflows_in_an_accumulation: Scaled, critic_beside: Gan,
    each_in_its_own: Pair, both_open: Pair, another_training_beside: Loop,
}  # fmt: skip


@pytest.mark.parametrize("turn", RIGHT)
def test_right_loops_are_not_blamed(turn: Callable[[Any, int], None]) -> None:
    assert said(turn, RIGHT[turn]()) == []


# ---- what becomes of a step that could not be rolled back ----


def foreign(loop: Loop) -> None:
    loop.finish(loop.new)
    raise ZeroDivisionError


def written(loop: Loop) -> None:
    with torch.no_grad():
        next(loop.model.parameters()).mul_(0.5)
    raise ZeroDivisionError


def torn(loop: Loop) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    loop.optimizer.register_step_post_hook(fail)
    loop.optimizer.step()


def torn_and_caught(loop: Loop) -> None:
    with contextlib.suppress(ZeroDivisionError):
        torn(loop)


@pytest.mark.filterwarnings("ignore::torchguard.errors.TrainingSetupWarning")
@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (foreign, "pass every optimizer"),
        (written, "use undo='copy'"),
        (torn, "use undo='copy'"),
        (torn_and_caught, "use undo='copy'"),
    ],
)
def test_a_step_that_was_not_rolled_back_is_not_said_to_be(
    fails: Callable[[Loop], None], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    if fails in {torn, torn_and_caught}:
        loop.optimizer = AdamW(loop.model.parameters(), fused=True)
        loop.step = torchguard.transaction(loop.model, loop.optimizer)
    before = {(e.kind, e.guard, e.where): e.count for e in torchguard.events()}
    with pytest.raises(torchguard.UnrecoverableStepError, match=says), loop.step:
        loop.backward()
        fails(loop)
    assert loop.step.stats().rollbacks == {}
    counted = [e for e in torchguard.events() if e.where.startswith(__file__)]
    found = [e for e in counted if e.count != before.get((e.kind, e.guard, e.where), 0)]
    assert "rollback_failed" in {each.kind for each in found}
    assert "rolled_back" not in {each.kind for each in found if each.guard == "transaction"}
    assert "was rolled back after" not in caplog.text
