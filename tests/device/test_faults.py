"""What goes wrong on a device and on no CPU: each of these once did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_device as fake
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import torchguard
from support.small_training import Case, Training, bits
from torchguard._torch import eager
from torchguard.errors import TorchGuardWarning


class StopHere(Exception):  # noqa: N818  no error of the program's
    """What a block raises."""


def training(
    device: str = "cuda", **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any, Callable[[Any], Tensor], tuple[Tensor, Tensor]]:
    """A model with statistics and dropout, and what one step of it takes."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, foreach=True)
    step = torchguard.transaction(model, optimizer, **options)
    batch = torch.randn(6, 4, device=device), torch.randint(3, (6,), device=device)
    return model, optimizer, step, lambda b: F.cross_entropy(model(b[0]), b[1]), batch


def test_a_checkpoint_is_resumed_with_map_location(tmp_path: Path) -> None:
    model, _, step, loss_of, batch = training()
    step.run(loss_of, batch)
    torchguard.save(step.state_dict(), tmp_path / "state.pt")
    expected = [bits([step.run(loss_of, batch), model.state_dict()]) for _ in range(2)]
    model, _, step, loss_of, batch = training()
    step.load_state_dict(torchguard.load(tmp_path / "state.pt", map_location="cuda"))
    found = [bits([step.run(loss_of, batch), model.state_dict()]) for _ in range(2)]
    assert found == expected


class TestResumeWithAnotherNumberOfDevices:
    def state(self) -> Any:
        """The state of a training on cuda:0, in a process that sees cuda:1 too."""
        _, _, step, loss_of, batch = training()
        step.run(loss_of, batch)
        return step.state_dict()

    def test_fewer_were_visible(self) -> None:
        state = self.state()
        del state["random"]["cuda:1"]
        _, _, step, _, _ = training()
        with pytest.warns(TorchGuardWarning, match="no state of the generator cuda:1"):
            step.load_state_dict(state)

    def test_more_were_visible(self) -> None:
        state = self.state()
        state["random"]["cuda:7"] = state["random"]["cuda:1"]
        _, _, step, _, _ = training()
        with pytest.warns(TorchGuardWarning, match="generator cuda:7"):
            step.load_state_dict(state)

    def test_that_of_the_training_is_required(self) -> None:
        state = self.state()
        del state["random"]["cuda:0"]
        _, _, step, _, _ = training()
        with pytest.raises(ValueError, match="no generator cuda:0"):
            step.load_state_dict(state)

    def test_a_device_that_held_the_training_is_required(self) -> None:
        state = self.state()
        state["random"]["cuda:7"] = state["random"].pop("cuda:1")
        state["devices"] = "cuda:7"
        _, _, step, _, _ = training()
        with pytest.raises(ValueError, match="cuda:7"):
            step.load_state_dict(state)

    def test_of_a_state_without_the_names_of_its_devices(self) -> None:
        state = self.state()
        del state["devices"]
        training()[2].load_state_dict(state)


@pytest.mark.parametrize("undo", ["auto", "copy"])
def test_a_replayed_graph_is_rolled_back(undo: Any) -> None:
    model, _, _, loss_of, batch = training()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def whole_step() -> None:
        loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    whole_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        whole_step()
    step = torchguard.transaction(model, optimizer, undo=undo)
    before = bits([model.state_dict(), optimizer.state_dict(), torch.cuda.get_rng_state()])
    with pytest.raises(StopHere), step:
        graph.replay()
        raise StopHere
    assert bits([model.state_dict(), optimizer.state_dict(), torch.cuda.get_rng_state()]) == before
    with step:
        graph.replay()
    assert bits(model.state_dict()) != before[0]


@pytest.mark.parametrize("calls", [1, 600])
def test_calls_in_a_captured_graph_are_not_checked(calls: int) -> None:
    with torchguard.install("checks"):
        embedding, index = nn.Embedding(4, 2).cuda(), torch.tensor([1, 3], device="cuda")
        graph = torch.cuda.CUDAGraph()
        embedding(index)  # waits to be read, when the capture begins
        with torch.cuda.graph(graph):
            for _ in range(calls):
                out = embedding(index)
        graph.replay()
        assert index.sum().item() == 4
        assert torch.equal(out, embedding(index))


def test_a_loss_on_the_device_is_looked_at_when_it_has_arrived() -> None:
    host, head = nn.Linear(4, 4), nn.Linear(4, 3).cuda().requires_grad_(False)
    x, y = torch.randn(6, 4), torch.randint(3, (6,), device="cuda")
    step = torchguard.transaction(
        nn.ModuleList([host, head]), torch.optim.SGD(host.parameters(), 0.1), skip_nonfinite=True
    )
    for _ in range(3):
        step.run(
            lambda b: F.cross_entropy(head(host(b[0]).to("cuda")), b[1]) + float("nan"), (x, y)
        )
    assert step.stats().skipped == 3


def test_a_rollback_waits_for_side_streams() -> None:
    _, _, step, loss_of, batch = training()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    fake.races()
    with pytest.raises(StopHere), step:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss_of(batch).backward()
            raise StopHere  # before anything waits for the stream
    assert fake.races() == []
    tensor = torch.ones(3, device="cuda")
    with (
        contextlib.suppress(StopHere),
        torchguard.rollback_on_error(tensor, data=True),
    ):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.mul_(3)
            raise StopHere
    assert fake.races() == []
    assert tensor.tolist() == [1, 1, 1]


def test_flags_of_checks_are_read_behind_the_stream_that_makes_them() -> None:
    with torchguard.install("checks"):
        embedding, index = nn.Embedding(5, 2).cuda(), torch.tensor([1, 2], device="cuda")
        other = torch.zeros(3, device="cuda")
        torch.cuda.synchronize()
        fake.races()
        with torch.cuda.stream(torch.cuda.Stream()):
            embedding(index)
        other.sum().item()
        assert fake.races() == []


def test_trainings_on_a_gpu_are_made_after_torch_has_frozen_its_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ``torch.testing._internal`` does when it is imported."""
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    Training(Case("SGD", device="cuda"))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_buffers_of_every_dtype_are_restored(dtype: torch.dtype) -> None:
    model, _, step, loss_of, batch = training()
    model.register_buffer("odd", torch.zeros(3, device="cuda").to(dtype))
    odd = [each for each in model.buffers() if each.dtype is dtype]
    before = bits([each.view(torch.uint8) for each in odd])
    with pytest.raises(StopHere), step:
        loss_of(batch)
        model.odd.copy_(torch.ones(3, device="cuda"))  # type: ignore[operator]
        raise StopHere
    assert bits([each.view(torch.uint8) for each in odd]) == before


def test_a_device_without_room_for_copies_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []
    model, _, step, loss_of, batch = training()
    weights = {each.data_ptr() for each in model.parameters()}
    concatenate: Any = eager._cat

    def concatenate_on(tensors: list[Tensor], **options: Any) -> Any:
        if not tensors[0].is_cpu and not weights.isdisjoint(map(Tensor.data_ptr, tensors)):
            asked.append(tensors[0].device)
            raise torch.OutOfMemoryError
        return concatenate(tensors, **options)

    for _ in range(2):  # the checks of a training's first steps wait
        step.run(loss_of, batch)
    monkeypatch.setattr(eager, "_cat", concatenate_on)
    for _ in range(3):
        before = fake.counts()
        step.run(loss_of, batch)
        assert fake.counts().since(before).waits == 1
    assert len(asked) == 1
    expected = bits(model.state_dict())
    with pytest.raises(StopHere), step:
        loss_of(batch).backward()
        with contextlib.suppress(torch.OutOfMemoryError), fake.failing(2):
            step._guarded.training.optimizers[0].step()
        raise StopHere
    assert bits(model.state_dict()) == expected
    assert fake.races() == []


def test_one_tensor_on_the_host_does_not_make_the_copies_a_loop() -> None:
    """AdamW keeps ``step`` on the host."""
    _, _, step, loss_of, batch = training()
    for _ in range(3):
        step.run(loss_of, batch)
    launches: list[str] = []
    with fake.noting(launches):
        step.run(loss_of, batch)
    assert launches.count("aten::cat") == 3  # weights and moments; buffers of two dtypes
    assert not {"aten::copy_", "aten::_foreach_copy_"}.intersection(launches)
