"""Callbacks in real trainers: guards on while they run, broken tensors stop a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchguard
from support.install import resize_is_safe
from torchguard import InconsistentTensorError, _events
from torchguard.integrations import Session

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROWS = 8


@pytest.fixture(autouse=True)
def compile_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning replaces ``torch.compile`` when it is imported."""
    monkeypatch.setattr(torch, "compile", torch.compile)


def buckets() -> dict[str, Any]:
    """Return a bucketed function that has been called, by the name it is logged by."""

    @torchguard.bucketed(dims={"x": {0: "t"}}, buckets=torchguard.Buckets([8]))
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    for length in (4, 4, 8):
        double(torch.ones(length))
    return {"encoder": double}


METRICS = {"torchguard/encoder/calls": 3, "torchguard/encoder/waste": 0.5}


def test_a_flag_is_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_events, "_events", {})  # what other tests have made happen
    names = [each.rpartition("/")[2] for each in Session(buckets=buckets())._metrics()]
    assert sorted(names) == ["calls", "compile_seconds", "graphs", "waste", "waste_given"]


@pytest.mark.parametrize("how", ["with buckets", "breaks"])
def test_lightning(how: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from torchguard.integrations.lightning import GuardCallback  # noqa: PLC0415

    safe: list[bool] = []
    logged: list[dict[str, float]] = []

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            safe.append(resize_is_safe())
            return self.layer(batch[0]).square().mean()

        def on_train_epoch_end(self) -> None:
            if how == "breaks":
                self.layer.weight.untyped_storage().resize_(0)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    class Logger(lightning.loggers.logger.DummyLogger):  # type: ignore[misc,name-defined]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged.append(metrics)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=[Logger(), Logger()], log_every_n_steps=2,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[GuardCallback(buckets=buckets())],
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.randn(ROWS, 3)), batch_size=2)
    if how == "breaks":  # a checkpoint of a broken tensor is refused
        with pytest.raises(InconsistentTensorError, match=r"obj\[0\]\.layer\.weight"):
            trainer.fit(Model(), loader)
    else:
        trainer.fit(Model(), loader)
    assert safe == [True] * 4  # the guards are installed while the trainer trains
    assert torchguard.installed() == ()
    assert not resize_is_safe()
    assert sum(entry.items() >= METRICS.items() for entry in logged) == 2 * 2  # of two loggers


@pytest.mark.parametrize("how", ["with buckets", "breaks"])
def test_transformers(how: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from torchguard.integrations.transformers import GuardCallback  # noqa: PLC0415

    safe: list[bool] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            safe.append(resize_is_safe())
            return {"loss": self.layer(x).square().mean()}

    class Breaking(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_optimizer_step(self, _: Any, state: Any, *args: Any, **kwargs: Any) -> None:
            if how == "breaks" and state.global_step == 3:  # the last one
                kwargs["model"].layer.weight.untyped_storage().resize_(0)

    trainer = transformers.Trainer(
        model=Model(),
        args=transformers.TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=2, use_cpu=True,
            logging_steps=2, save_steps=4, report_to=[], disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=[{"x": row} for row in torch.randn(ROWS, 3)],
        callbacks=[Breaking()],
    )  # fmt: skip
    GuardCallback(buckets=buckets()).attach(trainer)
    if how == "breaks":
        with pytest.raises(InconsistentTensorError, match=r"\.layer\.weight"):
            trainer.train()
        # This trainer tells a callback nothing of exceptions.
        assert torchguard.installed() == ("resize",)
        torchguard.uninstall()
        return
    trainer.train()
    assert safe == [True] * 4
    assert torchguard.installed() == ()
    assert not resize_is_safe()
    with_loss = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(with_loss) == 2
    assert all(entry.items() >= METRICS.items() for entry in with_loss)


def test_a_trainer_compiles_verified(tmp_path: Path) -> None:
    """Its enum of backends does not know ours: ``install("verified")`` reaches what it compiles."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from support.inductor_without_code import inductor_without_code  # noqa: PLC0415

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.dropout(self.layer(x), 0.1).square().mean()}

    def train(**options: Any) -> None:
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
            disable_tqdm=True, remove_unused_columns=False, torch_compile=True, **options,
        )  # fmt: skip
        rows = [{"x": row} for row in torch.randn(ROWS, 3)]
        transformers.Trainer(model=Model(), args=args, train_dataset=rows).train()

    before = len(torchguard.verification_report().graphs)
    with inductor_without_code(), torchguard.install("verified"):
        with pytest.raises(ValueError, match=r"torchguard|TORCHGUARD"):
            train(torch_compile_backend="torchguard")
        assert len(torchguard.verification_report().graphs) == before
        train()
    graphs = torchguard.verification_report().graphs[before:]
    assert graphs
    assert {graph.status for graph in graphs} == {"verified"}
