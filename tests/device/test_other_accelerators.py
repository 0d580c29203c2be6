"""An accelerator that torch does not know by name: ``FAKE_DEVICE=private``."""

from __future__ import annotations

import fake_device as fake
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import torchguard
from support.small_training import bits
from torchguard.state.process import ThreadModes, named_generators

DEVICE = torch.get_device_module(fake.NAME) if fake.is_loaded() else None


def training() -> tuple[nn.Module, torchguard.Transaction, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
    model = nn.Sequential(*layers).to(fake.NAME)
    step = torchguard.transaction(model, torch.optim.AdamW(model.parameters(), 0.1, foreach=True))
    batch = torch.randn(6, 4, device=fake.NAME), torch.randint(3, (6,), device=fake.NAME)
    return model, step, batch


def test_its_generators_are_those_of_the_process() -> None:
    assert [name for name in named_generators() if name.startswith(fake.NAME)] == [
        f"{fake.NAME}:0",
        f"{fake.NAME}:1",
    ]


def test_its_autocast_is_restored() -> None:
    before = ThreadModes.capture()
    torch.set_autocast_enabled(fake.NAME, True)
    before.restore()
    assert not torch.is_autocast_enabled(fake.NAME)


def test_a_step_is_rolled_back_and_run_again_bit_for_bit() -> None:
    def after(at: int | None) -> tuple[list[object], int]:
        model, step, batch = training()
        before = fake.counts()
        for _ in range(2):
            while True:
                try:
                    with fake.failing(at or 0, int(at is not None)):
                        step.run(lambda b: F.cross_entropy(model(b[0]), b[1]), batch)
                    break
                except torch.OutOfMemoryError:
                    at = None
        found = fake.counts().since(before).allocations
        return bits([model.state_dict(), torch.rand(3, device=fake.NAME)]), found

    expected, allocations = after(None)
    for at in range(0, allocations // 2, 7):
        assert after(at)[0] == expected, at


def test_its_cache_is_emptied_before_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step, batch = training()
    emptied: list[int] = []
    monkeypatch.setattr(DEVICE, "empty_cache", lambda: emptied.append(1))
    with fake.failing(5, 1), pytest.warns(UserWarning, match="ran out of memory"):
        step.run(lambda b: F.cross_entropy(model(b[0]), b[1]), batch, retry="halve")
    assert emptied


def test_a_training_is_resumed() -> None:
    model, step, batch = training()

    def loss() -> object:
        return bits(step.run(lambda b: F.cross_entropy(model(b[0]), b[1]), batch))

    loss()
    state = torch.utils._pytree.tree_map(lambda each: each, step.state_dict())
    assert f"{fake.NAME}:0" in state["random"]
    state = {**state, "models": {"0": {k: v.clone() for k, v in state["models"]["0"].items()}}}
    expected = loss()
    DEVICE.manual_seed_all(5)  # type: ignore[union-attr]
    step.load_state_dict(state)
    assert len(str(expected)) == len(str(loss()))
