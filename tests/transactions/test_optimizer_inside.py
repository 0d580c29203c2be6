"""An optimizer that holds another one: both are rolled back, wherever the inner one is."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import torchguard

_ELSEWHERE: dict[int, Optimizer] = {}


class Masters(Optimizer):
    """Steps float32 copies of bfloat16 weights with an optimizer of its own."""

    fails = False

    def __init__(self, params: Any, place: str, kind: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self._place, self._kind = place, kind
        if place != "made in the first step":
            self._make()

    def _make(self) -> None:
        own = self.param_groups[0]["params"]
        inner = self._kind([p.detach().float() for p in own])
        places: dict[str, tuple[str, Any]] = {
            "a list of lists": ("those", [[inner]]),
            "a dict": ("by_name", {"a": inner}),
            "an object": ("holder", SimpleNamespace(inner=inner)),
            "an object in an object": ("holder", SimpleNamespace(one=SimpleNamespace(inner=inner))),
            "a bound method": ("call", inner.step),
            "a closure": ("call", lambda: inner.step() or 0),
            "a weak reference": ("reference", weakref.ref(inner)),
        }
        name, value = places.get(self._place, ("optimizer", inner))
        if self._place == "an option":
            self.param_groups[0]["inner"] = inner
        elif self._place == "the state":
            self.state["inner"] = inner  # type: ignore[index]
        elif self._place != "a global":
            setattr(self, name, value)
        _ELSEWHERE[id(self)] = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if id(self) not in _ELSEWHERE:
            self._make()
        inner = _ELSEWHERE[id(self)]
        pairs = list(zip(inner.param_groups[0]["params"], self.param_groups[0]["params"]))  # noqa: B905
        for master, p in pairs:
            master.grad = p.grad.float()
        inner.step()
        for master, p in pairs:
            p.copy_(master)
            if self.fails:
                raise torch.OutOfMemoryError("in the copy")


def fail_if(fails: bool) -> None:
    if fails:
        raise torch.OutOfMemoryError


PLACES = (
    *("an attribute", "a list of lists", "a dict", "an object", "an object in an object"),
    *("a bound method", "a closure", "a weak reference", "an option", "the state", "a global"),
    "made in the first step",
)


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    _ELSEWHERE.clear()


@pytest.mark.parametrize("undo", ["auto", "copy"])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_and_is_run_again_gives_the_same_weights(place: str, undo: Any) -> None:
    def train(fails_in: int | None, outside: bool = False) -> Any:
        _ELSEWHERE.clear()  # by ids, which are used again
        torch.manual_seed(0)
        net = nn.Linear(3, 2).bfloat16()
        kind = lambda ps: torch.optim.Adam(ps, lr=0.1)  # noqa: E731
        optimizer = Masters(net.parameters(), place, kind)
        step = torchguard.transaction(net, optimizer, undo=undo)
        for number in range(4):
            for fails in (True, False) if number == fails_in else (False,):
                optimizer.fails = fails and not outside
                try:
                    with step:
                        x = torch.ones(2, 3, dtype=torch.bfloat16) * (number + 1)
                        net(x).float().square().mean().backward()
                        fail_if(fails and outside)
                        optimizer.step()
                        optimizer.zero_grad()
                except torch.OutOfMemoryError:
                    assert fails
        assert step.stats().commits == 4
        inner = _ELSEWHERE[id(optimizer)]
        state = [each for entry in inner.state.values() for each in entry.values()]
        return [t.tolist() for t in (*net.parameters(), *inner.param_groups[0]["params"], *state)]

    expected = train(None)
    assert train(2) == expected
    assert train(0) == expected
    assert train(2, outside=True) == expected


def test_masters_are_saved_and_loaded() -> None:
    """The state dict of such an optimizer has neither them nor their moments."""

    def make() -> Any:
        torch.manual_seed(0)
        net = nn.Linear(3, 2).bfloat16()
        optimizer = Masters(net.parameters(), "a dict", lambda ps: torch.optim.Adam(ps, lr=0.1))
        return net, optimizer, torchguard.transaction(net, optimizer)

    def train(net: Any, optimizer: Any, step: Any) -> Any:
        with step:
            net(torch.ones(2, 3, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.tolist() for p in (*net.parameters(), *_masters(optimizer))]

    def _masters(optimizer: Any) -> Any:
        return optimizer.by_name["a"].param_groups[0]["params"]

    first = make()
    train(*first)
    state = first[2].state_dict()
    saved = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, state)
    expected = train(*first)
    again = make()
    again[2].load_state_dict(saved)
    assert train(*again) == expected


class SAM(Optimizer):
    """Two steps of its own, as in the popular code; the base optimizer shares its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()


def test_sam_steps_by_the_optimizer_in_it() -> None:
    def train(fails_in: int | None) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = SAM(net.parameters())
        step = torchguard.transaction(net, optimizer, undo="copy")
        for number in range(3):
            for fails in (True, False) if number == fails_in else (False,):
                try:
                    with step:
                        net(torch.ones(2, 3)).square().mean().backward()
                        optimizer.first_step()
                        optimizer.zero_grad()
                        net(torch.ones(2, 3)).square().mean().backward()
                        fail_if(fails)
                        optimizer.second_step()
                        optimizer.zero_grad()
                except torch.OutOfMemoryError:
                    assert fails
        assert step.stats().commits == 3
        return [p.tolist() for p in net.parameters()]

    assert train(1) == train(None)


class Outer(Optimizer):
    """Steps another optimizer, which the transaction is given too."""

    def __init__(self, params: Any, other: Optimizer) -> None:
        super().__init__(params, {"lr": 0.1})
        self.other = other

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.other.step()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)


def test_an_optimizer_that_is_given_and_inside_of_another_steps_with_it() -> None:
    nets = nn.Linear(2, 2), nn.Linear(2, 2)
    inner = torch.optim.SGD(nets[0].parameters(), lr=0.1, momentum=0.9)
    outer = Outer(nets[1].parameters(), inner)
    step = torchguard.transaction(nets, [outer, inner])
    with step:
        nets[1](nets[0](torch.ones(1, 2))).sum().backward()
        outer.step()
    assert step.committed


class Unhooked(Optimizer):
    def __init__(self, optimizer: Optimizer) -> None:
        self.original_optimizer = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.original_optimizer.step()


def test_the_message_for_a_wrapper_without_hooks_names_what_to_pass() -> None:
    """As the DPOptimizer of opacus is one."""
    net = nn.Linear(2, 2)
    outer = Unhooked(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"SGD in it can: pass optimizer\.original_opt"):
        torchguard.transaction(net, outer)
    step = torchguard.transaction(net, outer.original_optimizer)
    with step:
        net(torch.ones(1, 2)).sum().backward()
        outer.step()
    assert step.committed
