"""A fused step within a transaction is PyTorch's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchguard
from support.small_training import bits

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "Adam, no beta": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.0), fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD, lr 0": lambda p: torch.optim.SGD(p, lr=0.0, fused=True),
    "SGD, maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def parameters_of(seed: int = 0) -> list[nn.Parameter]:
    """Two groups, the second one with two dtypes: three kernels."""
    torch.manual_seed(seed)
    return [
        nn.Parameter(torch.randn(3, 2)),
        nn.Parameter(torch.randn(4)),
        nn.Parameter(torch.randn(2)),
        nn.Parameter(torch.randn(2).double()),
    ]


def made(name: str) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = parameters_of()
    return parameters, OPTIMIZERS[name]([{"params": parameters[:2]}, {"params": parameters[2:]}])


def set_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


def everything(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Any:
    return bits([[each.detach() for each in parameters], optimizer.state_dict()["state"]])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_of_the_optimizer_see_what_they_see_without_a_transaction(name: str) -> None:
    """And so does the code after the step: the same parameters, state and attributes."""
    seen: list[list[Any]] = []
    for guarded in (False, True):
        parameters, optimizer = made(name)
        found: list[Any] = []

        def look(optimizer: Any, *_: Any, found: list[Any] = found) -> None:
            found.append([len(group["params"]) for group in optimizer.param_groups])
            found.append(bits(optimizer.state_dict()["state"]))

        optimizer.register_step_post_hook(look)
        step: Any = torchguard.transaction([], optimizer) if guarded else contextlib.nullcontext()
        for _ in range(2):
            set_gradients(parameters)
            with step:
                optimizer.step()
            found.append([sorted(vars(optimizer)), len(optimizer.state)])
        seen.append(found)
    assert seen[1] == seen[0]
