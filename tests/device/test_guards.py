"""Scopes, guards and files on a device: side streams, memory that runs out, a dead context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_device as fake
import pytest
import torch
from torch import Tensor, nn

import torchguard
from support.small_training import bits


class StopHere(Exception):  # noqa: N818  no error of the program's
    """What a block raises."""


def model_on(device: str = "cuda") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).to(
        device
    )


# --- streams


def on_a_side_stream(model: nn.Module, x: Tensor) -> None:
    """PyTorch's pattern: the side stream waits, works, and is waited for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)


def in_a_transaction(model: nn.Module, x: Tensor, body: Callable[[], None]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    step = torchguard.transaction(model, optimizer)
    for _ in range(2):
        with step:
            body()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(StopHere), step:
        body()
        raise StopHere


def with_skip_nonfinite(model: nn.Module, x: Tensor, body: Callable[[], None]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torchguard.transaction(model, optimizer, skip_nonfinite=True):
        body()
        optimizer.step()


def in_rollback_on_error(model: nn.Module, x: Tensor, body: Callable[[], None]) -> None:
    with pytest.raises(StopHere), torchguard.rollback_on_error(model, data=True):
        body()
        raise StopHere


def in_every_guard(model: nn.Module, x: Tensor, body: Callable[[], None]) -> None:
    with torchguard.install("all"):
        body()
        torch.add(x, 1, out=torch.empty_like(x))


SCOPES = [in_a_transaction, with_skip_nonfinite, in_rollback_on_error, in_every_guard]


@pytest.mark.filterwarnings("ignore::torchguard.errors.TrainingSetupWarning")
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_adds_no_race_on_a_side_stream(scope: Any, where: str) -> None:
    model, x = model_on(), torch.randn(6, 4, device="cuda")
    on_a_side_stream(model, x)
    assert fake.races() == []  # of the program itself
    model.zero_grad()
    if where == "inside":
        scope(model, x, lambda: on_a_side_stream(model, x))
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            scope(model, x, lambda: model(x).sum().backward())
        torch.cuda.current_stream().wait_stream(side)  # before the memory is used for others
    assert fake.races() == []


# --- memory that runs out


def each_failure(act: Callable[[], Any], most: int = 40) -> int:
    """Let each allocation of a call fail, until none is left; return how many there were."""
    for at in range(most):
        before = fake.counts()
        try:
            with fake.failing(at, 1):
                act()
        except torch.OutOfMemoryError:
            continue
        if fake.counts().since(before).allocations <= at:
            return at
    return most


def test_a_model_is_loaded_whole_or_not_at_all() -> None:
    model = model_on()
    other = {name: each.cpu() + 1 for name, each in model.state_dict().items()}
    before = bits(model.state_dict())

    def act() -> None:
        try:
            torchguard.load_state_dict(model, other)
        except torch.OutOfMemoryError:
            assert bits(model.state_dict()) == before
            raise
        model.load_state_dict({name: each - 1 for name, each in other.items()})

    each_failure(act)
    torchguard.load_state_dict(model, other)
    assert bits(model.state_dict()) == bits(other)


def test_a_training_is_saved_and_resumed_without_memory(tmp_path: Path) -> None:
    model = model_on()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    step = torchguard.transaction(model, optimizer)
    batch = torch.randn(6, 4, device="cuda")
    step.run(lambda b: model(b).square().mean(), batch)
    expected = bits([model.state_dict(), optimizer.state_dict()])
    path = tmp_path / "state.pt"

    def save() -> None:
        torchguard.save(step.state_dict(), path)

    save()
    first = path.read_bytes()
    each_failure(save)
    assert path.read_bytes() == first
    step.run(lambda b: model(b).square().mean(), batch)
    moved = bits([model.state_dict(), optimizer.state_dict()])

    def resume() -> None:
        try:
            step.load_state_dict(torchguard.load(path, map_location="cuda"))
        except torch.OutOfMemoryError:
            assert bits([model.state_dict(), optimizer.state_dict()]) == moved
            raise

    with fake.failing(3), pytest.raises(torch.OutOfMemoryError):
        resume()
    step.load_state_dict(torchguard.load(path))
    assert bits([model.state_dict(), optimizer.state_dict()]) == expected


def test_a_folder_keeps_its_checkpoint_if_memory_runs_out(tmp_path: Path) -> None:
    model = model_on()
    with torchguard.checkpoint_folder(tmp_path / "run") as folder:
        torch.save(model.state_dict(), folder / "model.pt")
    with (
        pytest.raises(torch.OutOfMemoryError),
        torchguard.checkpoint_folder(tmp_path / "run") as folder,
    ):
        with fake.failing(0):
            torch.save({n: e + 1 for n, e in model.state_dict().items()}, folder / "model.pt")
    found = torchguard.load(next((tmp_path / "run").rglob("model.pt")), map_location="cuda")
    assert bits(found) == bits(model.state_dict())


# --- guards


def test_a_checked_call_does_not_end_the_context() -> None:
    embedding, bad = nn.Embedding(4, 2).cuda(), torch.tensor([9], device="cuda")
    with fake.asserting(), torchguard.guarded("checks"):
        out = embedding(bad)
        with pytest.raises(
            torchguard.errors.IndexOutOfRangeError, match="expected 0 to 3, got 9 to 9"
        ):
            out.sum().item()
        assert embedding.weight.sum().isfinite()


def test_a_context_that_has_ended_is_named_by_a_rollback() -> None:
    model = model_on()
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), 0.1))
    x, bad = torch.randn(6, 4, device="cuda"), torch.tensor([9], device="cuda")
    with fake.asserting():
        with (
            pytest.raises(torchguard.UnrecoverableStepError, match="device-side assert triggered"),
            step,
        ):
            model(x)[bad].sum().backward()
    with torchguard.guarded("checks"):  # and nothing waits to be read
        assert bits(torch.ones(1, device="cuda").cpu())


@pytest.mark.parametrize("use", ["safe_checkpoint", "install"])
def test_recomputation_draws_the_same_numbers_on_two_devices(use: str) -> None:
    first, second = nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 4).to("cuda:1")

    def both(x: Tensor) -> Tensor:
        x = nn.functional.dropout(first(x), 0.5)
        return nn.functional.dropout(second(x.to("cuda:1")), 0.5)

    def gradients(call: Callable[..., Tensor]) -> Any:
        for index in range(2):
            torch.cuda.default_generators[index].manual_seed(5)
        x = torch.ones(6, 4, device="cuda:0", requires_grad=True)
        call(x).sum().backward()
        return bits([x.grad, first.weight.grad, second.weight.grad])

    plain = gradients(both)
    for each in (first, second):
        each.zero_grad()
    if use == "safe_checkpoint":
        assert gradients(lambda x: torchguard.safe_checkpoint(both, x)) == plain
    else:
        checkpoint = torch.utils.checkpoint.checkpoint
        with torchguard.install("recompute"):
            assert gradients(lambda x: checkpoint(both, x, use_reentrant=False)) == plain
