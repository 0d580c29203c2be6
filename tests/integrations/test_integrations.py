"""Callbacks in real trainers: guards on while they run, broken tensors stop a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchguard
from torchguard import InconsistentTensorError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROWS = 8


@pytest.fixture(autouse=True)
def compile_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning replaces ``torch.compile`` when it is imported."""
    monkeypatch.setattr(torch, "compile", torch.compile)


def failed_resize() -> tuple[int, ...]:
    """Return the shape that a resize which failed leaves behind."""
    tensor = torch.from_numpy(np.zeros(4))
    with pytest.raises(RuntimeError):
        tensor.resize_(5, 5)
    return tuple(tensor.shape)


def bucketed_function() -> Any:
    """Return a bucketed function that has been called."""

    @torchguard.bucketed(dims={"x": {0: "t"}}, buckets=torchguard.Buckets([8]))
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    for length in (4, 4, 8):
        double(torch.ones(length))
    return double


METRICS = {"torchguard/encoder/calls": 3, "torchguard/encoder/waste": 0.5}


class TestLightning:
    @pytest.fixture
    def lightning(self) -> Any:
        return pytest.importorskip("lightning.pytorch")

    def fit(self, lightning: Any, folder: Path, *, breaks: bool = False, **options: Any) -> Any:
        from torchguard.integrations.lightning import GuardCallback  # noqa: PLC0415

        shapes: list[tuple[int, ...]] = []
        logged: list[dict[str, float]] = []

        class Model(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 1)

            def training_step(self, batch: Any, _: int) -> Any:
                shapes.append(failed_resize())
                return self.layer(batch[0]).square().mean()

            def on_train_epoch_end(self) -> None:
                if breaks:
                    self.layer.weight.untyped_storage().resize_(0)

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters())

        class Logger(lightning.loggers.logger.DummyLogger):  # type: ignore[misc]
            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                logged.append(metrics)

        callback = GuardCallback(**options)
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=Logger(),
            log_every_n_steps=2,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )
        loader = DataLoader(TensorDataset(torch.randn(ROWS, 3)), batch_size=2)
        trainer.fit(Model(), loader)
        return shapes, logged

    def test_install(self, lightning: Any, tmp_path: Path) -> None:
        """The guards are installed while the trainer trains."""
        shapes, _ = self.fit(lightning, tmp_path)
        assert shapes == [(4,)] * 4
        assert torchguard.installed() == ()
        assert failed_resize() == (5, 5)

    def test_check(self, lightning: Any, tmp_path: Path) -> None:
        """A checkpoint of a broken tensor is refused."""
        with pytest.raises(InconsistentTensorError, match=r"obj\[0\]\.layer\.weight"):
            self.fit(lightning, tmp_path, breaks=True)
        assert torchguard.installed() == ()

    def test_log(self, lightning: Any, tmp_path: Path) -> None:
        """The buckets are logged."""
        _, logged = self.fit(lightning, tmp_path, buckets={"encoder": bucketed_function()})
        assert sum(entry.items() >= METRICS.items() for entry in logged) == 2


class TestTransformers:
    @pytest.fixture
    def transformers(self) -> Any:
        pytest.importorskip("accelerate")
        return pytest.importorskip("transformers")

    def train(
        self, transformers: Any, folder: Path, *, breaks: bool = False, **options: Any
    ) -> Any:
        from torchguard.integrations.transformers import GuardCallback  # noqa: PLC0415

        shapes: list[tuple[int, ...]] = []

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 1)

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                shapes.append(failed_resize())
                return {"loss": self.layer(x).square().mean()}

        class Breaking(transformers.TrainerCallback):  # type: ignore[misc]
            def on_optimizer_step(self, _: Any, state: Any, *args: Any, **kwargs: Any) -> None:
                if breaks and state.global_step == 3:  # the last one
                    kwargs["model"].layer.weight.untyped_storage().resize_(0)

        trainer = transformers.Trainer(
            model=Model(),
            args=transformers.TrainingArguments(
                output_dir=str(folder),
                max_steps=4,
                per_device_train_batch_size=2,
                use_cpu=True,
                logging_steps=2,
                save_steps=4,
                report_to=[],
                disable_tqdm=True,
                remove_unused_columns=False,
            ),
            train_dataset=[{"x": row} for row in torch.randn(ROWS, 3)],
            callbacks=[Breaking()],
        )
        GuardCallback(**options).attach(trainer)
        trainer.train()
        return shapes, trainer.state.log_history

    def test_install(self, transformers: Any, tmp_path: Path) -> None:
        """The guards are installed while the trainer trains."""
        shapes, _ = self.train(transformers, tmp_path)
        assert shapes == [(4,)] * 4
        assert torchguard.installed() == ()
        assert failed_resize() == (5, 5)

    def test_check(self, transformers: Any, tmp_path: Path) -> None:
        """A checkpoint of a broken tensor is refused."""
        with pytest.raises(InconsistentTensorError, match=r"\.layer\.weight"):
            self.train(transformers, tmp_path, breaks=True)
        # This trainer tells a callback nothing of exceptions.
        assert torchguard.installed() == ("resize",)
        torchguard.uninstall()

    def test_log(self, transformers: Any, tmp_path: Path) -> None:
        """The buckets are logged."""
        _, history = self.train(transformers, tmp_path, buckets={"encoder": bucketed_function()})
        with_loss = [entry for entry in history if "loss" in entry]
        assert len(with_loss) == 2
        assert all(entry.items() >= METRICS.items() for entry in with_loss)
