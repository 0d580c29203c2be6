"""``RetryMixin`` in Lightning's ``Trainer``: a step that fails is rolled back and run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch")

from torchguard.integrations.lightning import RetryMixin  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def compile_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning replaces ``torch.compile`` when it is imported."""
    monkeypatch.setattr(torch, "compile", torch.compile)


class Fails:
    """Raises at given calls of one place, each once."""

    def __init__(
        self, where: str = "", *at: int, error: type[BaseException] = RuntimeError
    ) -> None:
        self.where, self.at, self.error = where, at, error
        self.calls = self.raised = 0

    def __call__(self, where: str, *_: Any) -> None:
        if where == self.where:
            self.calls += 1
            if self.calls in self.at:
                self.raised += 1
                raise self.error("CUDA out of memory")


class FailingAdam(torch.optim.Adam):
    """Adam that can fail between two parameters."""

    fails = Fails()

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        group = self.param_groups[0]
        whole = group["params"]
        group["params"] = whole[:2]
        try:
            super().step()
            self.fails("step")
            group["params"] = whole[2:]
            super().step()
        finally:
            group["params"] = whole
        return loss


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)
    return nn.Sequential(*layers)


def module_with(base: tuple[type, ...], fails: Fails) -> Any:
    class Module(*base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(batch[0]).square().mean()
            fails("forward")
            loss.register_hook(lambda _: fails("backward"))
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            FailingAdam.fails = fails
            optimizer = FailingAdam(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    return Module()


class Manual(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Two optimizers, as a GAN has them."""

    fails = Fails()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = net(), net()

    def training_step(self, batch: Any, _: int) -> None:
        for part, optimizer in zip((self.one, self.two), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(part(batch[0]).square().mean())
            optimizer.step()
            self.fails("between")

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.one, self.two)]


def fitted(module: Any, folder: Path, **options: Any) -> Any:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(2)))
    settings: dict[str, Any] = {
        "max_steps": 6, "accelerator": "cpu", "logger": False, "default_root_dir": folder,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    checkpoints = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    settings["callbacks"] = [checkpoints]
    trainer = lightning.Trainer(**{**settings, **options})
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True))
    return trainer


def end_of(module: Any, trainer: Any, folder: Path) -> dict[str, Any]:
    """Give what has to be the same: weights, statistics, counters, checkpoints."""
    return {
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "step": trainer.global_step,
        "schedule": [each.scheduler.last_epoch for each in trainer.lr_scheduler_configs],
        "files": sorted(each.name for each in folder.iterdir()),
        "progress": trainer.fit_loop.epoch_loop.state_dict()[
            "automatic_optimization.optim_progress"
        ],
    }


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("where", "at"),
    [("", ()), ("forward", (3,)), ("backward", (3,)), ("backward", (1, 7)), ("step", (2,))],
    ids=["nothing", "forward", "backward", "two batches", "step"],
)
def test_automatic_optimization(
    where: str, at: tuple[int, ...], accumulation: int, tmp_path: Path
) -> None:
    """With the mixin and failures, the training is that of a plain module without them."""
    ends = []
    options = {"accumulate_grad_batches": accumulation, "max_steps": 6 // min(accumulation, 2)}
    for base, fails, name in (
        ((lightning.LightningModule,), Fails(), "plain"),
        ((RetryMixin, lightning.LightningModule), Fails(where, *at), "retried"),
    ):
        module = module_with(base, fails)
        trainer = fitted(module, tmp_path / name, **options)
        ends.append(end_of(module, trainer, tmp_path / name))
        assert fails.raised == len(fails.at)
    assert ends[0] == ends[1]


def test_manual_optimization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure between two optimizers is undone in the first one too."""

    class Retried(RetryMixin, Manual):
        pass

    ends = []
    for kind, fails in ((Manual, Fails()), (Retried, Fails("between", 3))):
        monkeypatch.setattr(Manual, "fails", fails)
        module = kind()
        trainer = fitted(module, tmp_path / kind.__name__, max_steps=12)
        ends.append(end_of(module, trainer, tmp_path / kind.__name__))
    assert ends[0] == ends[1]


def test_a_batch_that_fails_again_raises(tmp_path: Path) -> None:
    module = module_with((RetryMixin, lightning.LightningModule), Fails("backward", 1, 2))
    before = [each.tolist() for each in module.parameters()]
    with pytest.raises(RuntimeError, match="out of memory"):
        fitted(module, tmp_path)
    assert [each.tolist() for each in module.parameters()] == before
    assert all(each.grad is None for each in module.parameters())


def test_ctrl_c_is_rolled_back_and_not_run_again(tmp_path: Path) -> None:
    fails = Fails("backward", 3, error=KeyboardInterrupt)
    module = module_with((RetryMixin, lightning.LightningModule), fails)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fitted(module, tmp_path)
    assert fails.calls == 3
    assert module.net[1].num_batches_tracked == 2


def test_another_lightning_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.loops.optimization import automatic  # noqa: PLC0415

    monkeypatch.delattr(automatic._AutomaticOptimization, "_make_closure")
    module = module_with((RetryMixin, lightning.LightningModule), Fails())
    with pytest.raises(RuntimeError, match="other names in its loops"):
        fitted(module, tmp_path)
