"""transaction() in the loops of trainers, as docs/training/accelerate.md shows them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.document import blocks
from support.small_training import everything

PAGE = Path(__file__).parents[2] / "docs" / "training" / "accelerate.md"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("error::torchguard.errors.TrainingSetupWarning"),
]


class Accumulated:
    """Training by accelerate's ``accumulate``, as docs/training/accelerate.md shows it."""

    def __init__(self, *, also: bool, scheduled: bool = False) -> None:
        accelerate = pytest.importorskip("accelerate")
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        rows: Any = torch.arange(198.0).view(66, 3) / 99
        data: Any = torch.utils.data.DataLoader(rows, batch_size=3)
        prepare = self.accelerator.prepare
        self.model, self.optimizer, self.loader = prepare(net, optimizer, data)
        self.schedule = prepare(schedule) if scheduled else None
        self.step = torchguard.transaction(
            self.accelerator.unwrap_model(self.model),
            self.optimizer.optimizer,
            scheduler=schedule if scheduled else None,
            also=self.accelerator if also else (),
        )
        self.losses: list[float] = []
        self.boundaries: list[bool] = []
        self.calls = 0

    def micro_batch(self, batch: torch.Tensor, failing: tuple[int, str] | None) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(batch).square().mean()
            self.calls += 1

            def reach(place: str) -> None:
                if failing == (self.calls, place):
                    raise torch.OutOfMemoryError(place)

            reach("forward")
            self.accelerator.backward(loss)
            reach("backward")
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            self.optimizer.zero_grad()
            found = loss.item(), self.accelerator.sync_gradients
        self.losses.append(found[0])
        self.boundaries.append(found[1])

    def train(self, *, whole: bool, failing: tuple[int, str] | None = None) -> Any:
        """Train two epochs; a block has one micro-batch, or all of a step."""
        for _ in range(2):
            held: list[Any] = []
            for batch in self.loader:
                held.append(batch)
                if whole and len(held) < 4 and not self.loader.end_of_dataloader:
                    continue
                while True:
                    kept = len(self.losses)
                    try:
                        with self.step:
                            for each in held:
                                self.micro_batch(each, failing)
                        break
                    except torch.OutOfMemoryError:
                        del self.losses[kept:], self.boundaries[kept:]
                held.clear()
        model = self.accelerator.unwrap_model(self.model)
        return self.losses, self.boundaries, everything(model, self.optimizer.optimizer)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize(
    ("whole", "failing"),
    [*((False, each) for each in (1, 3, 4, 21, 22, 23)), *((True, each) for each in (1, 4, 21))],
)
def test_accelerate_accumulates_as_if_nothing_had_failed(
    whole: bool, failing: int, place: str, scheduled: bool
) -> None:
    right = Accumulated(also=True, scheduled=scheduled)
    expected = right.train(whole=whole)
    assert len(expected[0]) == 44
    # In the last block of an epoch both micro-batches are behind the end of the loader.
    assert sum(expected[1]) == (14 if whole else 12)
    retried = Accumulated(also=True, scheduled=scheduled)
    assert retried.train(whole=whole, failing=(failing, place)) == expected
    assert retried.calls == 44 + (1 if not whole else 1 + (failing - 1) % 22 % 4)
    assert retried.step.stats().rollbacks == {"OutOfMemoryError": 1}
    assert retried.step.stats().commits == right.step.stats().commits == 12


@pytest.mark.parametrize(("fits", "failures"), [(8, 0), (4, 6), (2, 12), (1, 3)])
def test_accelerate_as_the_page_shows_it(fits: int, failures: int) -> None:
    pytest.importorskip("accelerate")
    code = next(each.code for each in blocks(PAGE.read_text("utf-8")) if each.kind == "accumulate")

    class Model(nn.Linear):
        rows = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > fits:
                raise torch.OutOfMemoryError("out of memory")
            self.rows += len(x)
            return super().forward(x)

    model = Model(4, 2)
    names: Any = {"torch": torch, "torchguard": torchguard, "model": model}
    names["batches"] = torch.randn(6, 8, 4)
    # A micro-batch of which no piece fits is an error, and is not left out.
    error = contextlib.nullcontext() if fits > 1 else pytest.raises(torch.OutOfMemoryError)
    with error:
        exec(code, names)  # noqa: S102  a block of the page
    step = names["step"]
    assert step.stats().commits == (3 if fits > 1 else 0)
    assert step.stats().rollbacks == ({"OutOfMemoryError": failures} if failures else {})
    assert names["accelerator"].step == (6 if fits > 1 else 0)
    assert model.rows == (48 if fits > 1 else 0)  # each row once


def test_accelerate_saves_where_it_stands_in_an_accumulation() -> None:
    training = Accumulated(also=True)
    with training.step:
        training.micro_batch(torch.ones(2, 3), None)
    state = training.step.state_dict()
    assert training.accelerator.step == 1
    with training.step:
        training.micro_batch(torch.ones(2, 3), None)
    training.step.load_state_dict(state)
    assert training.accelerator.step == 1


@pytest.mark.filterwarnings("default::torchguard.errors.TrainingSetupWarning")
@pytest.mark.parametrize("whole", [False, True])
def test_accelerate_without_also_is_warned_once(whole: bool) -> None:
    training = Accumulated(also=False)
    with pytest.warns(torchguard.errors.TrainingSetupWarning, match="also=accelerator") as found:
        training.train(whole=whole, failing=(2, "forward"))
    assert len(found) == 1


def test_accelerate_without_accumulation_needs_no_also() -> None:
    """The warning is an error here."""
    accelerate = pytest.importorskip("accelerate")
    for options in ({}, {"gradient_accumulation_steps": 1}):
        training = Accumulated(also=False)
        training.accelerator = accelerate.Accelerator(cpu=True, **options)
        training.accelerator.gradient_accumulation_steps = 1
        training.train(whole=False, failing=(2, "forward"))
