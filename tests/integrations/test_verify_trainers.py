"""``verify_checkpoint`` on what Trainer and accelerate write: each file is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchguard

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def by_trainer(folder: Path, retried: bool) -> Path:
    transformers = pytest.importorskip("transformers")
    from torchguard.integrations.transformers import RetryTrainer  # noqa: PLC0415

    args = transformers.TrainingArguments(
        str(folder), max_steps=1, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    kind: Any = RetryTrainer if retried else transformers.Trainer
    kind(Model(), args, train_dataset=[{"x": row} for row in torch.randn(8, 4)]).train()
    return folder / "checkpoint-1"


def by_accelerate(folder: Path, safe: bool) -> Path:
    accelerate = pytest.importorskip("accelerate")
    accelerator, model = accelerate.Accelerator(cpu=True), Model()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    accelerator.prepare(model, optimizer, schedule)
    accelerator.save_state(str(folder), safe_serialization=safe)
    return folder


@pytest.mark.parametrize("write", [by_trainer, by_accelerate])
@pytest.mark.parametrize("option", [True, False])
def test_each_file_is_known_and_each_one_that_is_cut_is_found(
    write: Any, option: bool, tmp_path: Path
) -> None:
    folder = write(tmp_path / "run", option)
    found = torchguard.verify_checkpoint(folder)
    assert found, str(found)
    assert "was not read" not in str(found)
    for path in folder.rglob("*.*"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert not torchguard.verify_checkpoint(folder), path
        path.write_bytes(whole)
    assert torchguard.verify_checkpoint(folder)
