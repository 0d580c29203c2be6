"""install("save"): what other packages write is replaced whole, without a line changed."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchguard


@pytest.fixture(autouse=True)
def compile_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning replaces ``torch.compile`` when it is imported."""
    monkeypatch.setattr(torch, "compile", torch.compile)


def replaced(folder: Path, save: Callable[[], object]) -> dict[str, bool]:
    """Save twice; for each file, whether the second time it was replaced and not written over."""
    save()
    files = {each: each.stat().st_ino for each in sorted(folder.rglob("*")) if each.is_file()}
    held = [each.open("rb") for each in files]  # so that no number is used again
    save()
    for file in held:
        file.close()
    return {each.name: each.stat().st_ino != number for each, number in files.items()}


def test_torch_save(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for guarded in (False, True):
        with torchguard.install("save") if guarded else contextlib.nullcontext():
            found = replaced(tmp_path, lambda: torch.save(torch.ones(3), path))
        assert found == {"model.pt": guarded}
    assert torch.load(path).tolist() == [1, 1, 1]


def test_safetensors(tmp_path: Path) -> None:
    """save_file, save_model, and a save_file that was imported before the guard."""
    safetensors = pytest.importorskip("safetensors.torch")
    imported, module = safetensors.save_file, torch.nn.Linear(2, 2)

    def save() -> None:
        safetensors.save_file({"a": torch.ones(3)}, tmp_path / "a")
        safetensors.save_model(module, str(tmp_path / "b"))
        imported({"a": torch.ones(3)}, tmp_path / "c")

    with torchguard.install("save"):
        assert replaced(tmp_path, save) == {"a": True, "b": True, "c": True}
    assert safetensors.load_file(tmp_path / "a")["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "refused",
    [
        lambda write: write({"a": {"b": torch.ones(3)}}, "new"),
        lambda write: write({"a": torch.ones(4)}, "new", {"format": 3}),
        lambda write: write({"a": torch.ones(4)}, 3),
    ],
)
def test_what_safetensors_refuses_it_refuses_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[[Any], object]
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as plain:  # noqa: PT011
        refused(safetensors.save_file)
    with torchguard.install("save"), pytest.raises(plain.type) as guarded:
        refused(safetensors.save_file)
    assert str(guarded.value) == str(plain.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_hugging_faces_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 2

    def train() -> None:
        options = transformers.TrainingArguments(
            str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
        )
        transformers.Trainer(model=model, args=options, train_dataset=rows).train()

    with torchguard.install("save"):
        found = replaced(tmp_path, train)
    written = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert {name: found[name] for name in written} == dict.fromkeys(written, True)


@pytest.mark.slow
def test_lightning_on_another_file_system(tmp_path: Path) -> None:
    """fsspec writes to the temporary folder and copies onto the target if that is elsewhere."""
    shared = Path("/dev/shm")  # noqa: S108
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    lightning = pytest.importorskip("lightning")
    pytest.importorskip("fsspec.implementations.local")
    demos = importlib.import_module("lightning.pytorch.demos.boring_classes")
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = demos.BoringModel()
    trainer.strategy.connect(module)
    path, before = tmp_path / "model.ckpt", tempfile.tempdir
    tempfile.tempdir = str(shared)
    try:
        with torchguard.install("save"):
            found = replaced(tmp_path, lambda: trainer.save_checkpoint(path))
    finally:
        tempfile.tempdir = before
    assert found == {"model.ckpt": True}
    assert "state_dict" in torch.load(path, weights_only=False)
    assert [each.name for each in tmp_path.iterdir()] == ["model.ckpt"]
