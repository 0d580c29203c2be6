"""An optimizer's state goes to the parameters of the same names, where both sides have names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchguard

Load = Callable[[torch.optim.Optimizer, Any], Any]


def called(optimizer: torch.optim.Optimizer, state: Any) -> None:
    torchguard.load_state_dict(optimizer, state)


def installed(optimizer: torch.optim.Optimizer, state: Any) -> None:
    with torchguard.install("load"):
        optimizer.load_state_dict(state)


WAYS = pytest.mark.parametrize("load", [called, installed])


def parameters() -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(2)) for name in "abc"}


def saved(named: dict[str, torch.nn.Parameter], *, names: bool = True) -> dict[str, Any]:
    """Train a step, so that each has moments of its own."""
    optimizer = torch.optim.Adam(list(named.items()) if names else list(named.values()))
    for number, each in enumerate(named.values()):
        each.grad = torch.full((2,), float(number + 1))
    optimizer.step()
    return optimizer.state_dict()


def moments(optimizer: torch.optim.Optimizer, named: dict[str, torch.nn.Parameter]) -> list[float]:
    return [float(optimizer.state[each]["exp_avg"][0]) for each in named.values()]


@WAYS
@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_names_say_what_belongs_to_what(load: Load, order: str) -> None:
    named = parameters()
    state = saved(named)
    optimizer = torch.optim.Adam([(name, named[name]) for name in order])
    load(optimizer, state)
    assert moments(optimizer, named) == pytest.approx([0.1, 0.2, 0.3])
    assert optimizer.param_groups[0]["param_names"] == list(order)


@WAYS
@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [
        ((("a", "b"), ("a", "b")), (("b", "a"), ("a", "b")), False),
        ((("a", "b", "a", "b"),), (("a", "b", "a", "b"),), True),
        ((("a", "b", "a", "b"),), (("a", "b", "b", "a"),), False),
        ((("a", "b"), ("a", "b")), (("b", "a"), ("b", "c")), False),
        ((("a",), ("b", "a")), (("b", "a"), ("a",)), False),
        ((("a", "b"),), (("a", "b", "b"),), False),
    ],
)
def test_names_that_occur_twice_are_matched_in_the_same_order_alone(
    load: Load, theirs: Any, ours: Any, fits: bool
) -> None:
    """Each keeps its own state, or nothing is loaded."""

    def made(names: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [(name, torch.nn.Parameter(torch.ones(2))) for name in each]}
            for each in names
        ]
        return torch.optim.SGD(groups, momentum=0.9)

    def held(optimizer: torch.optim.Optimizer) -> list[list[tuple[str, float]]]:
        """What each group has, in an order that does not depend on that of its parameters."""
        return [
            sorted(
                (name, float(optimizer.state[each]["momentum_buffer"][0]))
                for name, each in zip(group["param_names"], group["params"], strict=True)
            )
            for group in optimizer.param_groups
        ]

    first, second = made(theirs), made(ours)
    for number, each in enumerate(p for group in first.param_groups for p in group["params"]):
        each.grad = torch.full((2,), float(number + 1))
    first.step()
    if fits:
        load(second, first.state_dict())
        assert held(second) == held(first)
    else:
        with pytest.raises(ValueError, match="load_state_dict: "):
            load(second, first.state_dict())
        assert not second.state


@WAYS
def test_names_that_are_not_there_are_refused(load: Load) -> None:
    named = parameters()
    state = saved(named)
    optimizer = torch.optim.Adam([(f"new.{name}", each) for name, each in named.items()])
    with pytest.raises(ValueError, match=r"it lacks new.a, new.b, new.c and has a, b, c besides"):
        load(optimizer, state)
    assert not optimizer.state


@WAYS
@pytest.mark.parametrize("names", [True, False])
def test_names_on_one_side_are_said(load: Load, names: bool) -> None:
    named = parameters()
    state = saved(named, names=names)
    optimizer = torch.optim.Adam(list(named.values()) if names else list(named.items()))
    with pytest.warns(UserWarning, match="by their order") as caught:
        load(optimizer, state)
    assert caught[0].filename == __file__
    assert moments(optimizer, named) == pytest.approx([0.1, 0.2, 0.3])


@WAYS
@pytest.mark.parametrize("names", [True, False])
def test_without_names_or_with_a_hook_of_the_users_it_goes_by_position_in_silence(
    load: Load, names: bool
) -> None:
    """torch's documentation shows a hook that maps names itself."""
    named = parameters()
    state = saved(named, names=names)
    optimizer = torch.optim.Adam(list(named.values()))
    if names:
        optimizer = torch.optim.Adam([(f"new.{name}", each) for name, each in named.items()])
        optimizer.register_load_state_dict_pre_hook(lambda _, given: given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(optimizer, state)
    assert moments(optimizer, named) == pytest.approx([0.1, 0.2, 0.3])
