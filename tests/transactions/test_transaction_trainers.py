"""transaction() in the loops of trainers, as docs/training/trainers.md shows them."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.small_training import everything

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("error::torchguard.errors.TrainingSetupWarning"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def failing_loss(model: nn.Module, at: int | None) -> Any:
    """A loss that raises in one call, after BatchNorm has counted the batch."""
    calls = itertools.count()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        if next(calls) == at:
            raise torch.OutOfMemoryError("out of memory")
        return loss

    return loss_of


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    ends = []
    for failing in (None, 0):
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        model, wrapped = accelerator.prepare(net, optimizer)
        step = torchguard.transaction(accelerator.unwrap_model(model), wrapped.optimizer)
        loss_of = failing_loss(model, failing)
        while not step.stats().commits:
            with contextlib.suppress(torch.OutOfMemoryError), step:
                accelerator.backward(loss_of(torch.ones(4, 3)))
                wrapped.step()
                wrapped.zero_grad()
        ends.append(everything(net, wrapped.optimizer))
    assert step.stats().rollbacks == {"OutOfMemoryError": 1}
    assert ends[0] == ends[1]


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", torch.compile)  # Lightning replaces it
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, failing: int | None) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = network()
            self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)
            self.step = torchguard.transaction(self.net, self.optimizer)
            self.loss_of = failing_loss(self.net, failing)

        def configure_optimizers(self) -> Any:
            return self.optimizer

        def training_step(self, batch: Any, _: int) -> None:
            committed = self.step.stats().commits
            while self.step.stats().commits == committed:
                with contextlib.suppress(torch.OutOfMemoryError), self.step:
                    self.manual_backward(self.loss_of(batch))
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    ends = []
    rows: Any = torch.ones(8, 3)
    for failing in (None, 0):
        module = Module(failing)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        ends.append((everything(module.net, module.optimizer), module.step.stats().commits))
    assert ends[0] == ends[1]
    assert ends[1][1] == 2
    assert module.step.stats().rollbacks == {"OutOfMemoryError": 1}
