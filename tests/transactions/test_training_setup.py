"""A training that is set up wrong says so when its transaction is made."""

from __future__ import annotations

import copy
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


def forgotten_layer() -> None:
    model = net()
    torchguard.transaction(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


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
    "forgotten layer": (forgotten_layer, "Freeze them with requires_grad_.False."),
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
    generator, discriminator = net(), net()
    optimizers = [torch.optim.Adam(each.parameters()) for each in (generator, discriminator)]
    torchguard.transaction([generator, discriminator], optimizers)
    # A transaction for each: the other model belongs to the other one.
    for optimizer in optimizers:
        torchguard.transaction([generator, discriminator], optimizer)


def lora() -> None:
    """The base is frozen, the adapters are trained."""
    model, adapter = net().requires_grad_(False), nn.Linear(2, 2)
    model[0].register_module("adapter", adapter)
    torchguard.transaction(model, torch.optim.AdamW(adapter.parameters()))


def average() -> None:
    model = net()
    ema = copy.deepcopy(model)
    torchguard.transaction(model, torch.optim.AdamW(model.parameters()), also=ema)


def shared() -> None:
    first, second = net(), net()
    second[0] = first[0]
    parameters = {*first.parameters(), *second.parameters()}
    torchguard.transaction([first, second], torch.optim.AdamW(list(parameters)))


def temperature() -> None:
    """A parameter of the loss, in no model."""
    model, scale = net(), nn.Parameter(torch.ones(()))
    torchguard.transaction(model, torch.optim.AdamW([*model.parameters(), scale]))


def layer_wise_rates() -> None:
    model = net()
    groups: list[Any] = [{"params": each.parameters(), "lr": 0.1 / n} for n, each in
                         enumerate(model, 1)]  # fmt: skip
    torchguard.transaction(model, torch.optim.AdamW(groups))


def frozen_backbone() -> None:
    model = net()
    model[0].requires_grad_(False)
    parameters = [each for each in model.parameters() if each.requires_grad]
    torchguard.transaction(model, torch.optim.AdamW(parameters))


@pytest.mark.parametrize(
    "make", [gan, lora, average, shared, temperature, layer_wise_rates, frozen_backbone]
)
def test_right_trainings_give_no_warning(make: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()
