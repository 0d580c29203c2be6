"""step.state_dict() and step.load_state_dict(): resumed bit for bit, or not at all."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch import nn
from torch.utils.data import DataLoader

import torchguard
from support.small_training import bits, everything
from torchguard.state.process import named_generators, same_state
from torchguard.state.walk import walk

dcp: Any = torch.distributed.checkpoint  # whose types leave out what it exports
STEPS, SAVED_AFTER = 6, 3


class Position:
    """A position in the data, as samplers and loaders have one."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Training:
    """Dropout, BatchNorm, three kinds of random numbers, a scaler, a schedule, an average."""

    def __init__(self, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  what users draw from
        self.model = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.named_parameters(), lr=0.1, **options)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.position, self.total = Position(), torch.zeros(2)
        self.generator = torch.Generator().manual_seed(seed)
        self.step = torchguard.transaction(
            self.model, self.optimizer, self.scaler, self.scheduler,
            also=(self.position, self.total, self.generator, self.average),
        )  # fmt: skip

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        noise = random.gauss(0, 1) + float(np.random.randn())  # noqa: NPY002
        return self.model(x * noise).square().mean()  # type: ignore[no-any-return]

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(4, 3, generator=self.generator) + self.position.number
            losses.append(self.step.run(self.loss_of, x, parts=2).item())
            self.average.update_parameters(self.model)
            self.position.number += 1
            self.total += 1
        return losses

    def state(self) -> Any:
        rest = [self.scaler.get_scale(), self.scheduler.get_last_lr(), self.total.tolist()]
        drawn = [torch.get_rng_state().tolist(), random.getstate(), self.generator.get_state()]
        average = dict(self.average.state_dict())
        return [everything(self.model, self.optimizer), rest, bits(drawn), bits(average)]


def by_torchguard(state: Any, folder: Path) -> Callable[[Training], Any]:
    torchguard.save(state, folder / "state.pt")
    return lambda _: torchguard.load(folder / "state.pt")


def by_torch(state: Any, folder: Path) -> Callable[[Training], Any]:
    torch.save(state, folder / "state.pt")
    return lambda _: torch.load(folder / "state.pt", weights_only=True)


def by_dcp(state: Any, folder: Path) -> Callable[[Training], Any]:
    """Which loads into a state that is there, so the new training has made a step."""
    dcp.save(state, checkpoint_id=folder)

    def load(training: Training) -> Any:
        training.train(1)
        found = training.step.state_dict()
        dcp.load(found, checkpoint_id=folder)
        return found

    return load


@pytest.mark.filterwarnings("ignore:.*(checkpoint|TypedStorage)")
@pytest.mark.parametrize("save", [by_torchguard, by_torch, by_dcp])
@pytest.mark.parametrize("fused", [False, True])
def test_a_training_goes_on_as_if_it_had_not_been_stopped(
    save: Any, fused: bool, tmp_path: Path
) -> None:
    whole = Training(0, fused=fused)
    expected = whole.train(STEPS)
    stopped = Training(0, fused=fused)
    assert stopped.train(SAVED_AFTER) == expected[:SAVED_AFTER]
    load = save(stopped.step.state_dict(), tmp_path)
    resumed = Training(7, fused=fused)  # another seed: everything comes from the state
    resumed.step.load_state_dict(load(resumed))
    assert resumed.step.stats().commits == SAVED_AFTER
    assert resumed.train(STEPS - SAVED_AFTER) == expected[SAVED_AFTER:]
    assert resumed.state() == whole.state()


def other_optimizers(state: dict[str, Any]) -> None:
    state["optimizers"]["1"] = state["optimizers"]["0"]


def other_shapes(state: dict[str, Any]) -> None:
    """The last model of the state does not fit, when the first parts have been loaded."""
    state["also"]["1"] = torch.zeros(5)


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "optimizers": (other_optimizers, "the state has 2 optimizers, the transaction has 1"),
    "shape": (other_shapes, r"a tensor of also= has shape \(2,\), the state has \(5,\)"),
    "generator": (lambda s: s["random"].pop("numpy"), "no generator numpy, which is in use"),
    "device": (
        lambda s: (
            s["random"].update({"cuda:98": s["random"]["cpu"]}),
            s.update(devices="cuda:98"),
        ),
        "the training was on cuda:98, which this machine does not have",
    ),
    "keys": (lambda s: s.pop("commits"), "expected what step.state_dict.. returned"),
    "model": (lambda s: s["models"]["0"].pop("0.weight"), "Missing key"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_that_does_not_fit_changes_nothing_and_says_why(wrong: str) -> None:
    change, message = WRONG[wrong]
    training = Training(0)
    training.train(2)
    state = copy.deepcopy(training.step.state_dict())
    change(state)
    training.train(1)
    before = training.state()
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        training.step.load_state_dict(state)
    assert training.state() == before
    assert training.step.stats().commits == 3


def test_moments_go_to_the_parameters_of_the_same_names() -> None:
    saved, loaded = Training(0), Training(1)
    saved.train(2)
    order = list(reversed(list(loaded.model.named_parameters())))
    optimizer = torch.optim.AdamW(order, lr=0.1)
    if "param_names" not in optimizer.param_groups[0]:
        pytest.skip("optimizers know no names in this torch")
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    also = (loaded.position, loaded.total, loaded.generator, loaded.average)
    step = torchguard.transaction(loaded.model, optimizer, loaded.scaler, scheduler, also=also)
    step.load_state_dict(copy.deepcopy(saved.step.state_dict()))
    for ours, theirs in zip(loaded.model.parameters(), saved.model.parameters(), strict=True):
        moment = saved.optimizer.state[theirs]["exp_avg"]
        assert torch.equal(optimizer.state[ours]["exp_avg"], moment)


def of_buckets(items: list[torch.Tensor]) -> torchguard.BucketBatchSampler:
    lengths = [1 + 7 * number % 20 for number in range(len(items))]
    return torchguard.BucketBatchSampler(lengths, [5, 10, 20], batch_size=4)


def step_over(
    items: list[torch.Tensor], workers: int
) -> tuple[Any, DataLoader[Any], Callable[[torch.Tensor], torch.Tensor]]:
    sampler, model = of_buckets(items), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = torchguard.transaction(model, optimizer, also=sampler)
    own = torch.Generator()  # else a loader draws a seed from PyTorch's when a pass begins
    data: Any = items
    loader: DataLoader[Any] = DataLoader(
        data, batch_sampler=sampler, num_workers=workers, generator=own
    )
    return step, loader, lambda x: model(x).square().mean()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [15, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 19))])
def test_a_sampler_of_buckets_goes_on_in_the_middle_of_an_epoch(workers: int, stop: int) -> None:
    """Whatever workers have fetched ahead, and though steps were rolled back before and after."""
    items = list(torch.arange(60.0).view(60, 1))
    sampler = of_buckets(items)
    expected = [*sampler, *sampler]  # two epochs, in two orders

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError

    def train(step: Any, loader: Any, loss_of: Any, last: int) -> list[list[int]]:
        seen: list[list[int]] = []
        while True:
            for x in loader:
                if len(seen) % 3 == 2:
                    with pytest.raises(ArithmeticError):
                        step.run(fail, x)
                step.run(loss_of, x)
                seen.append(x.flatten().int().tolist())
                if step.stats().commits == last:
                    return seen

    step, loader, loss_of = step_over(items, workers)
    assert train(step, loader, loss_of, stop) == expected[:stop]
    state = copy.deepcopy(step.state_dict())
    assert state["also"]["0"]["steps"] == (stop if stop <= 15 else stop - 15)
    step, loader, loss_of = step_over(items, workers)
    step.load_state_dict(state)
    assert train(step, loader, loss_of, 30) == expected[stop:]


def test_a_plateau_steps_with_the_metric() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    optimizer.param_groups[0]["lr"] = 1.0
    step = torchguard.transaction(model, optimizer, scheduler=plateau)
    seen: list[torch.Tensor] = []

    def metric(loss: torch.Tensor) -> float:
        seen.append(loss)
        return 1.0

    losses = [step.run(lambda x: model(x).mean(), torch.ones(1, 1), metric=metric) for _ in "abc"]
    assert [each.item() for each in seen] == [each.item() for each in losses]
    assert optimizer.param_groups[0]["lr"] == 0.25


class Held:
    """A sampler whose state has numbers and arrays of numpy."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "order": np.arange(3),
            "none": np.zeros((0, 2)),
            "at": np.int64(0),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"state": dict(self.state), "list": [np.float32(0.1)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_numbers_of_numpy_are_saved_readably_and_loaded_as_such(kind: Any, tmp_path: Path) -> None:
    """A learning rate that is one is multiplied in its precision."""
    beta: Any = kind if issubclass(kind, float) else float  # AdamW takes floats

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=kind(0.1), betas=(beta(0.8), 0.9), weight_decay=kind(0.1)
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, kind(0.7))
        held = Held()
        step = torchguard.transaction(model, optimizer, scheduler=scheduler, also=held)
        return model, optimizer, held, step

    def train(model: Any, optimizer: Any, held: Held, step: Any) -> Any:
        for _ in range(3):
            step.run(lambda x: model(x).square().mean(), torch.ones(2, 3))
            held.state["order"] = held.state["order"] + 1
        return [
            *(p.tolist() for p in model.parameters()),
            *(type(optimizer.param_groups[0][name]) for name in ("lr", "weight_decay")),
            optimizer.param_groups[0]["lr"],
            optimizer.param_groups[0]["betas"],
            [(type(each), each.dtype, each.tolist()) for each in held.state.values()],
        ]

    first, second = make(), make()
    train(*first)
    torch.save(first[-1].state_dict(), tmp_path / "state.pt")
    expected = train(*first)
    second[-1].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert train(*second) == expected


@pytest.mark.filterwarnings("ignore:.*(checkpoint|TypedStorage)")
@pytest.mark.parametrize("way", ["dcp.load", "load_sharded"])
def test_a_new_process_does_not_lose_the_moments(way: str, tmp_path: Path) -> None:
    """Its optimizer has none, so DCP reads none: said, with a way that works."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: PLC0415

    first, second = Training(0), Training(1)
    first.train(SAVED_AFTER)
    dcp.save(first.step.state_dict(), checkpoint_id=tmp_path / "dcp")
    expected = first.train(2)
    found = second.step.state_dict()
    if way == "dcp.load":
        dcp.load(found, checkpoint_id=tmp_path / "dcp")
    else:
        torchguard.load_sharded(found, tmp_path / "dcp", extra=True)
    before = second.state()
    with pytest.raises(ValueError, match=r"optimizers\.0\.state of AdamW has 0 parameters"):
        second.step.load_state_dict(found)
    assert len(second.state()) == len(before)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "state.pt")
    second.step.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.train(2) == expected


def test_the_state_of_an_optimizer_may_contain_itself() -> None:
    """In a dict, in a list, or through the optimizer: steps commit and fail as others do."""
    for loop in (
        lambda entry, _: entry.update(me=entry),
        lambda entry, _: entry.update(me=[entry]),
        lambda entry, _: entry.update(me={"a": (entry,)}),
        lambda entry, optimizer: entry.update(me=optimizer),
        lambda entry, optimizer: optimizer.param_groups[0].update(me=entry),
        lambda _, optimizer: optimizer.param_groups[0].update(me=optimizer.param_groups[0]),
    ):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop(optimizer.state[model.weight], optimizer)
        step = torchguard.transaction(model, optimizer)
        for _ in range(2):
            step.run(model, torch.ones(1, 2))
        before = model.weight.tolist()
        with pytest.raises(KeyError), step:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.state[model.weight]["more"] = 1
            raise KeyError
        assert "more" not in optimizer.state[model.weight]
        assert (model.weight.tolist(), step.stats().commits) == (before, 2)
        step.state_dict()


def test_what_is_written_into_a_state_reaches_no_generator() -> None:
    """A block compares the generators with states that it keeps."""
    model = nn.Linear(2, 1)
    step = torchguard.transaction(model, torch.optim.SGD(model.parameters(), 0.1))
    generators = named_generators().values()
    before = [copy.deepcopy(read()) for read, _ in generators]
    for each in list(walk([step.state_dict()["random"]])):
        if isinstance(each, torch.Tensor):
            each.zero_()
        elif isinstance(each, dict):
            each.clear()
    with pytest.raises(ZeroDivisionError), step:
        drawn = random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002, S311
        raise ZeroDivisionError(drawn)
    now = [read() for read, _ in generators]
    assert all(map(same_state, now, before))
