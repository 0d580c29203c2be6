"""transaction(skip_nonfinite=True): a step that is not finite changes nothing."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.small_training import everything
from support.training import Failure, fail

INFINITY, NAN = float("inf"), float("nan")
FUSED = {
    "Adam": {"lr": 0.1},
    "AdamW": {"lr": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.1},
}


def training(name: str, **flags: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    options = FUSED.get(name, {"lr": 0.1})
    optimizer = getattr(torch.optim, name)(model.parameters(), **options, **flags)
    return model, optimizer, torchguard.transaction(model, optimizer, skip_nonfinite=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any, *scales: float) -> None:
    """One step, whose gradient is that of several micro-batches, a block for each."""
    for number, scale in enumerate(scales or (1.0,)):
        with step or contextlib.nullcontext():
            (model(torch.randn(4, 3) * scale).square().mean()).backward()
            if number == len(scales or (1.0,)) - 1:
                optimizer.step()
                optimizer.zero_grad()


OTHERS = itertools.product(("NAdam", "RMSprop", "AdamW"), ({"foreach": True}, {"foreach": False}))


@pytest.mark.parametrize("scale", [NAN, INFINITY])
@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize(("name", "flags"), [*((name, {"fused": True}) for name in FUSED), *OTHERS])
def test_it_goes_on_as_if_the_batch_had_not_been(
    name: str, flags: dict[str, bool], skipped: int, scale: float
) -> None:
    """In the first step and later; finite steps are those of PyTorch, over two micro-batches."""
    ends = []
    for guarded in (False, True):
        model, optimizer, step = training(name, **flags)
        torch.manual_seed(1)
        for number in range(3):
            if guarded and number == skipped:
                before = everything(model, optimizer), torch.get_rng_state()
                train(model, optimizer, step, scale)
                torch.set_rng_state(before[1])
                now = everything(model, optimizer)
                assert now == before[0]
            train(model, optimizer, step if guarded else None, 1.0, 2.0)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]
    assert step.stats().skipped == 1


BLOCKS = [(NAN, 1.0), (1.0, NAN, 1.0), (1.0, 1.0, NAN), (NAN,)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scales", BLOCKS)
def test_buffers_go_back_to_where_the_accumulation_began(
    scales: tuple[float, ...], fused: bool
) -> None:
    model, optimizer, step = training("AdamW", fused=fused)
    train(model, optimizer, step, 1.0, 1.0)
    before = everything(model, optimizer)
    train(model, optimizer, step, *scales)
    assert step.stats().skipped == 1
    assert everything(model, optimizer) == before


def test_an_accumulation_that_was_given_up_does_not_count() -> None:
    """Its gradients are gone when the next one begins, whose first block says where to go back."""
    model, optimizer, step = training("AdamW", foreach=False)
    with step:
        model(torch.randn(4, 3)).square().mean().backward()
    optimizer.zero_grad()
    before = everything(model, optimizer)
    train(model, optimizer, step, 1.0, NAN)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}])
def test_a_skipped_step_that_fails_afterwards_is_undone(flags: dict[str, bool]) -> None:
    model, optimizer, step = training("AdamW", **flags)
    train(model, optimizer, step)
    before = everything(model, optimizer)
    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(Failure), step:
        (model(torch.randn(4, 3)).mean() * NAN).backward()
        optimizer.step()
    handle.remove()
    assert everything(model, optimizer)[0] == before[0]
    train(model, optimizer, step)


def test_large_gradients_are_finite_and_a_loss_that_is_not_is_enough_in_run() -> None:
    model, optimizer, step = training("AdamW", fused=True)
    before = everything(model, optimizer)[0]
    with step:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3e38)  # the sum of squares overflows
        optimizer.step()
        optimizer.zero_grad()
    assert everything(model, optimizer)[0] != before
    assert step.stats().skipped == 0
    before = everything(model, optimizer)[0]
    step.run(lambda x: model(x).mean() + INFINITY, torch.randn(4, 3))  # its gradient is finite
    assert everything(model, optimizer)[0] == before
    assert step.stats().skipped == 1
    step.run(lambda x: model(x).mean(), torch.randn(4, 3))
    assert step.stats().skipped == 1


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float) -> Any:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.full((4, 3), scale)).square().mean()
        loss.backward()
        return loss.item()

    return closure


@pytest.mark.parametrize("way", ["by place", "by name", "does nothing"])
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": False}])
def test_gradients_that_a_closure_makes_are_looked_at(flags: Any, way: str) -> None:
    """Lightning always passes one; it does nothing where the gradients are there already."""
    ends = []
    for scales in ((1.0, 2.0), (NAN, 1.0, NAN, NAN, 2.0)):
        model, optimizer, step = training("AdamW", **flags)
        for scale in scales:
            closure = closure_of(model, optimizer, scale)
            with step:
                if way == "by place":
                    assert isinstance(optimizer.step(closure), float)
                elif way == "by name":
                    assert isinstance(optimizer.step(closure=closure), float)
                else:
                    closure()
                    optimizer.step(lambda: 0.0)
        ends.append(everything(model, optimizer))
    assert step.stats().skipped == 3
    assert ends[0] == ends[1]


class Moving(nn.Module):
    """Assigns one buffer anew in each forward, and grows and shrinks others in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("longer", torch.zeros(1))
        self.register_buffer("shorter", torch.zeros(9))
        self.last = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.get_buffer("mean") + 0.1 * x.detach().mean(0)
        for name, change in (("longer", 1), ("shorter", -1)):
            buffer = self.get_buffer(name)
            buffer.resize_(len(buffer) + change)[-1] = x.detach().sum()
        out: torch.Tensor = self.last(x - self.mean)
        return out


@pytest.mark.parametrize("fused", [False, True])
def test_buffers_that_forward_assigns_or_resizes_go_back(fused: bool) -> None:
    ends = []
    for scales in ((1.0, 2.0, 3.0), (NAN, 1.0, NAN, NAN, 2.0, 3.0)):
        torch.manual_seed(0)
        model = Moving()
        optimizer = torch.optim.Adam(model.parameters(), fused=fused)
        step = torchguard.transaction(model, optimizer, skip_nonfinite=True)
        for scale in scales:
            with step:
                model(torch.full((3, 2), scale)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(everything(model, optimizer))
    assert step.stats().skipped == 3
    assert ends[0] == ends[1]


def two_models() -> tuple[list[nn.Module], list[torch.optim.Optimizer], list[nn.Module]]:
    models: list[Any] = [
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)) for _ in range(2)
    ]
    return models, [torch.optim.Adam(m.parameters()) for m in models], [m[1] for m in models]


def two_parts() -> tuple[list[nn.Module], list[torch.optim.Optimizer], list[nn.Module]]:
    """Of one model; a norm has no parameters of its own."""
    parts: list[Any] = [
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=i > 0), nn.Linear(3, 1))
        for i in range(2)
    ]
    whole = nn.ModuleList(parts)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(part.parameters(), lr=0.1) for part in parts
    ]
    whole.register_buffer("seen", torch.zeros(()))
    return parts, optimizers, [part[1] for part in parts]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1), ()])
@pytest.mark.parametrize("make", [two_models, two_parts])
def test_statistics_go_back_with_the_weights_that_were_not_moved(
    make: Any, bad: tuple[int, ...], order: tuple[int, int]
) -> None:
    """Whichever steps first, and whether both run forward before the first step."""
    for together in (False, True):
        torch.manual_seed(0)
        models, optimizers, norms = make()
        step = torchguard.transaction(models, optimizers, skip_nonfinite=True)
        before = [model[0].weight.detach().clone() for model in models]
        losses: dict[int, Any] = {}

        def forward(i: int, models: Any = models, losses: Any = losses) -> None:
            losses[i] = models[i](torch.randn(6, 3)).square().mean() * (NAN if i in bad else 1.0)

        with step:
            for i in order if together else ():
                forward(i)
            for i in order:
                if not together:
                    forward(i)
                losses[i].backward()
                optimizers[i].step()
                optimizers[i].zero_grad()
        moved = [not torch.equal(b, m[0].weight) for b, m in zip(before, models, strict=True)]
        assert moved == [i not in bad for i in range(2)]
        assert [bool(norm.num_batches_tracked) for norm in norms] == moved
        assert step.stats().skipped == len(bad)


def test_a_model_that_two_optimizers_share_goes_back_if_both_are_skipped() -> None:
    """As Muon and AdamW share one."""
    for bad in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))
        matrices = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], lr=0.1)
        rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2])
        step = torchguard.transaction(model, [matrices, rest], skip_nonfinite=True)
        with step:
            (model(torch.randn(4, 3)).square().mean() * NAN).backward()
            if not bad:
                for each in rest.param_groups[0]["params"]:
                    each.grad = torch.ones_like(each)
            matrices.step()
            rest.step()
        assert bool(model.get_buffer("1.num_batches_tracked")) is not bad


def test_autograd_sees_what_forward_has_written_to_a_buffer() -> None:
    model, optimizer, step = training("SGD")
    buffer = model.get_buffer("1.running_mean")
    other = torch.ones(3, requires_grad=True)
    with step:
        product = (other * buffer).sum()
        model(torch.randn(4, 3)).sum().backward()
        buffer.mul_(5)
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_gradients_stay_and_a_buffer_that_is_not_contiguous_goes_back_too() -> None:
    model, optimizer, _ = training("AdamW", foreach=False)
    model.register_buffer("odd", torch.zeros(2, 6)[:, ::2])
    step = torchguard.transaction(model, optimizer, skip_nonfinite=True)
    with step:
        model.get_buffer("odd").add_(1)
        (model(torch.randn(4, 3)).mean() * NAN).backward()
        gradients = [id(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        assert [id(parameter.grad) for parameter in model.parameters()] == gradients
    assert not model.get_buffer("odd").any()


class TakesAModel(torch.optim.SGD):
    def step(self, closure: Any = None, *, model: Any = None) -> Any:
        assert isinstance(model, nn.Module)
        return super().step(closure)


def test_a_callable_that_is_no_closure_is_handed_on() -> None:
    model = nn.Linear(3, 1)
    optimizer = TakesAModel(model.parameters(), lr=1.0)
    step = torchguard.transaction(model, optimizer, skip_nonfinite=True)
    before = everything(model, optimizer)
    with step:
        (model(torch.ones(1, 3)).sum() * NAN).backward()
        optimizer.step(model=model)
    assert step.stats().skipped == 1
    assert everything(model, optimizer) == before
