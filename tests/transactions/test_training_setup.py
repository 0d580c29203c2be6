"""A training that is set up wrong says so when its transaction is made, and in two steps."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from torchguard.errors import TrainingSetupWarning


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def replaced_head() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[1] = nn.Linear(2, 3)
    torchguard.transaction(model, optimizer)


def half_of_a_gan() -> None:
    """Both models are given, and of one of them a part is not in its optimizer."""
    generator, discriminator = net(), net()
    optimizers = [
        torch.optim.Adam(generator[0].parameters()), torch.optim.Adam(discriminator.parameters())
    ]  # fmt: skip
    torchguard.transaction([generator, discriminator], optimizers)


def for_replicas() -> None:
    model = net()
    torchguard.replicas_agree(model, torch.optim.SGD(model[1].parameters(), lr=0.1))


WRONG: dict[str, tuple[Callable[[], None], str]] = {
    "replaced head": (replaced_head, r"2 trainable parameters of the model: 1.weight, 1.bias; and"),
    "half of a GAN": (half_of_a_gan, "no optimizer has 2 trainable parameters"),
    "replicas": (for_replicas, "replicas_agree: no optimizer has 2 trainable"),
}


@pytest.mark.parametrize("case", WRONG)
def test_parameters_that_no_optimizer_has_are_named(case: str) -> None:
    make, message = WRONG[case]
    before = len(torchguard.events())
    with pytest.warns(TrainingSetupWarning, match=message) as raised:
        make()
    assert raised[0].filename == __file__  # the line of the program
    assert [each.kind for each in torchguard.events()[before:]] in ([], ["training_setup"])


def gan() -> None:
    """The generator adds to gradients of the discriminator, which clears them before it steps."""
    models = generator, discriminator = net(), nn.Linear(1, 1)
    g, d = (torch.optim.Adam(each.parameters()) for each in models)
    for optimizer in (g, d):  # for each alone: the other model belongs to the other one
        torchguard.transaction(models, optimizer)
    step = torchguard.transaction(models, [g, d])
    for _ in range(4):
        with step:
            d.zero_grad()
            made = generator(X)
            (discriminator(made.detach()) - discriminator(X[:, :1])).mean().backward()
            d.step()
            g.zero_grad()
            (-discriminator(made).square().mean()).backward()
            g.step()


def average_of_the_weights() -> None:
    """It is no part of the model."""
    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    step = torchguard.transaction(model, optimizer, also=average)
    for _ in range(4):
        clears_nothing(model, optimizer, step)
        average.update_parameters(model)
        optimizer.zero_grad()


def lora() -> None:
    """The base is frozen, the adapters are trained."""
    model, adapter = net().requires_grad_(False), nn.Linear(2, 2)
    model[0].register_module("adapter", adapter)
    torchguard.transaction(model, torch.optim.AdamW(adapter.parameters()))


def own_train() -> None:
    """None of the program's code is called to look at the model: it may do anything."""

    class Own(nn.Linear):
        def train(self, mode: bool = True) -> Any:
            raise AssertionError("train() was called")

    model = Own(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    step = torchguard.transaction(model, optimizer)
    for _ in range(3):
        clears_nothing(model, optimizer, step)
        optimizer.zero_grad()


@pytest.mark.parametrize("make", [gan, average_of_the_weights, lora, own_train])
def test_right_trainings_give_no_warning(make: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()


X = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
Loop = Callable[[Any, Any, Any], None]


def clears_nothing(model: Any, optimizer: Any, step: Any) -> None:
    with step:
        model(X).square().mean().backward()
        optimizer.step()


def clears_one_of_two(model: Any, optimizer: Any, step: Any) -> None:
    """A parameter that ``model.zero_grad()`` does not know."""
    with step:
        model.zero_grad()
        (model(X).square().mean() * model.scale[0]).backward()
        optimizer.step()


def clipped(model: Any, optimizer: Any, step: Any) -> None:
    with step:
        for _ in range(2):
            model(X).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def cleared(at_the_end: bool, to_none: bool, parts: int) -> Loop:
    def loop(model: Any, optimizer: Any, step: Any) -> None:
        with step:
            loss = model(X).square().mean()
            if not at_the_end:
                optimizer.zero_grad(to_none)
            loss.backward()
            for _ in range(parts - 1):
                model(X).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if at_the_end:
                optimizer.zero_grad(to_none)

    return loop


def over_blocks(model: Any, optimizer: Any, step: Any) -> None:
    for part in range(3):
        with step:
            model(X).square().mean().backward()
            if part == 2:
                optimizer.step()
                optimizer.zero_grad()


def made_by_hand(model: Any, optimizer: Any, step: Any) -> None:
    with step:
        parameters = list(model.parameters())
        grads = torch.autograd.grad(model(X).square().mean(), parameters)
        for parameter, gradient in zip(parameters, grads, strict=True):
            parameter.grad = gradient
        optimizer.step()


def penalty_by_hand(model: Any, optimizer: Any, step: Any) -> None:
    with step:
        for parameter in model.parameters():
            parameter.grad = 0.01 * parameter.detach()
        model(X).square().mean().backward()
        optimizer.step()


def after_an_exception(model: Any, optimizer: Any, step: Any) -> None:
    with contextlib.suppress(ZeroDivisionError), step:
        model(X).square().mean().backward()
        optimizer.step()
        raise ZeroDivisionError


LOOPS: dict[str, tuple[Loop, str | None]] = {
    "nothing": (clears_nothing, "were not cleared"),
    "clipped": (clipped, "were not cleared"),
    "one of two": (clears_one_of_two, "were not cleared"),
    **{
        f"cleared at {'end' if end else 'start'} to {'None' if to_none else 'zero'}, {parts} parts":
        (cleared(end, to_none, parts), None)
        for end in (True, False) for to_none in (True, False) for parts in (1, 2)
    },
    **{
        each.__name__: (each, None)
        for each in (over_blocks, made_by_hand, penalty_by_hand, after_an_exception)
    },
}  # fmt: skip


def said(loop: Callable[[], object], times: int = 4) -> list[str]:
    """Return the warnings of some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            loop()
    assert {each.filename for each in caught} <= {__file__}
    return [str(each.message) for each in caught if each.category is TrainingSetupWarning]


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_gradients_that_nobody_clears_are_said_once(name: str, flags: Any) -> None:
    loop, message = LOOPS[name]
    model: Any = net()
    model.scale = [nn.Parameter(torch.ones(1))]  # in a list: in no model
    parameters = [*model.parameters(), *model.scale[: name == "one of two"]]
    optimizer = torch.optim.AdamW(parameters, **flags)
    step = torchguard.transaction(model, optimizer)
    before = sum(each.count for each in torchguard.events() if each.kind == "training_setup")
    found = said(lambda: loop(model, optimizer, step))
    assert len(found) == (message is not None), found
    assert all(str(message) in each for each in found)
    after = sum(each.count for each in torchguard.events() if each.kind == "training_setup")
    assert after - before == len(found)
    assert step._guarded.first_steps == {}  # nothing looks any more
    assert not any(each._backward_hooks for each in parameters)


class Updates(torch.optim.Optimizer):
    """An optimizer of one's own, which leaves some parameters alone."""

    def __init__(self, parameters: Any, leaves: str, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.leaves, self.steps = leaves, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                skipped = {"vectors": each.dim() < 2, "first step": self.steps == 1}[self.leaves]
                if each.grad is not None and not skipped:
                    each.data.sub_(each.grad, alpha=group["lr"])


def experts(_: Any) -> Any:
    """A layer of experts of which a batch uses the first."""
    model: Any = nn.ModuleList(nn.Linear(2, 1) for _ in range(4))
    return model, model[0]


def adapters(_: Any) -> Any:
    """LoRA: the gradient of A is zero as long as B is."""
    model: Any = nn.ParameterList([torch.randn(2, 2), torch.zeros(2, 1)])
    return model, lambda x: x @ model[0] @ model[1] + x.sum(1, keepdim=True)


def half_precision(_: Any) -> Any:
    """A weight of 1 is not moved by 1e-4 in bfloat16."""
    model = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 1)).bfloat16()
    return model, lambda x: model(x.bfloat16()).float()


def backbone(_: Any) -> Any:
    model = net()
    model[0].requires_grad_(False)
    return model, model


def plain(_: Any) -> Any:
    model = net()
    return model, model


STEPS: dict[str, tuple[Any, Any, list[str]]] = {
    "vectors are left out": (
        plain, lambda p: Updates(p, "vectors"),
        ["Updates.step() did not move 2 trainable parameters of the model: 0.bias, 1.bias"],
    ),
    "experts": (
        experts, torch.optim.AdamW,
        ["the first step of AdamW had no gradient for 6 trainable parameters"],
    ),
    "moves from the second step on": (plain, lambda p: Updates(p, "first step"), []),
    "lr 0": (plain, lambda p: torch.optim.SGD(p, lr=0.0), []),
    "relative lr": (plain, torch.optim.Adafactor, []),
    "tensor lr": (plain, lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)), []),
    "frozen backbone": (backbone, torch.optim.AdamW, []),
    "adapters": (adapters, torch.optim.AdamW, []),
    "half precision": (half_precision, lambda p: torch.optim.AdamW(p, lr=1e-4), []),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_parameters_that_a_step_does_not_move_are_said_once(case: str) -> None:
    make, optimizer_of, expected = STEPS[case]
    torch.manual_seed(0)
    model, forward = make(None)
    step = torchguard.transaction(model, optimizer_of(model.parameters()))
    found = said(lambda: step.run(lambda x: forward(x).square().mean(), X))
    assert len(found) == len(expected), found
    assert all(text in each for text, each in zip(expected, found, strict=True))


def test_a_step_that_is_skipped_is_not_the_first() -> None:
    """By a GradScaler, in a fused kernel, or by skip_nonfinite."""
    for gate in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = None if gate else torch.amp.GradScaler("cpu", init_scale=1.0)
        step = torchguard.transaction(model, optimizer, scaler=scaler, skip_nonfinite=gate)
        losses = iter([float("inf"), float("inf"), 1.0, 1.0, 1.0])

        def loss_of(x: Any, model: Any = model, losses: Any = losses) -> Any:
            return model(x).square().mean() * next(losses)

        assert said(lambda step=step, loss_of=loss_of: step.run(loss_of, X), 2) == []  # type: ignore[misc]
        assert step._guarded.first_steps != {}
        assert said(lambda step=step, loss_of=loss_of: step.run(loss_of, X), 3) == []  # type: ignore[misc]
        assert step._guarded.first_steps == {}


def scaled(scaler: Any, loss: Any, optimizer: Any) -> None:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def not_scaled(_: Any, loss: Any, optimizer: Any) -> None:
    loss.backward()
    optimizer.step()


def unscaled_by_hand(scaler: Any, loss: Any, optimizer: Any) -> None:
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    optimizer.step()
    scaler.update()


@pytest.mark.parametrize(
    ("way", "options", "is_said"),
    [
        (not_scaled, {}, True),
        (not_scaled, {"enabled": False}, False),
        (scaled, {}, False),
        (scaled, {"enabled": False}, False),
        (unscaled_by_hand, {}, False),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_scales_no_loss_is_said_once(
    way: Any, options: Any, is_said: bool, fused: bool
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, **options)
    step = torchguard.transaction(model, optimizer, scaler)

    def train() -> None:
        with step:
            way(scaler, model(X).square().mean(), optimizer)
            optimizer.zero_grad()

    found = said(train)
    assert len(found) == is_said, found
    assert all("the GradScaler has scaled no loss" in each for each in found)
