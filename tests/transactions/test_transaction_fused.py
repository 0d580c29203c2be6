"""A fused step within a transaction is PyTorch's, whatever changes between steps."""

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


def move_to_the_other_group(_: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop())
    optimizer.param_groups[1]["lr"] = 0.7


CHANGES: list[Callable[..., Any]] = [
    lambda p, o: o.param_groups[0].update(lr=0.5),
    lambda p, o: o.param_groups[0].update(amsgrad=True),
    lambda p, o: o.state[p[0]].update(exp_avg=torch.ones_like(p[0])),
    lambda p, o: setattr(p[1], "grad", None),
    lambda p, o: setattr(p[0], "grad", torch.ones(2, 3).cumsum(0).t()),
    lambda p, o: o.load_state_dict(o.state_dict()),
    lambda p, o: o.add_param_group({"params": [p.pop()]}),
    lambda p, o: setattr(p[0], "data", torch.ones(2, 3).cumsum(0).t()),
    move_to_the_other_group,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_reaches_the_kernel(change: Callable[..., Any]) -> None:
    """The bits are those of the same steps without a transaction."""
    results = []
    for guarded in (False, True):
        parameters = parameters_of()
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
        parameters.append(nn.Parameter(torch.ones(2)))  # of no group yet
        step = torchguard.transaction([], optimizer)
        for number in range(4):
            torch.manual_seed(number)
            for each in parameters:
                each.grad = torch.randn(each.shape, dtype=each.dtype)
            with step if guarded else contextlib.nullcontext():
                if number == 1:
                    for each in parameters[:4]:  # amsgrad itself can't begin in the middle
                        optimizer.state[each]["max_exp_avg_sq"] = torch.zeros_like(each)
                if number == 3:
                    change(parameters, optimizer)
                optimizer.step()
        results.append([each.detach().contiguous() for each in parameters])
    assert all(map(torch.equal, results[1], results[0]))
