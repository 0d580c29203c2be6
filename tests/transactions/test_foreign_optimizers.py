"""Optimizers that are not torch's keep whatever they like in their state and attributes."""

from __future__ import annotations

import contextlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

import torchguard
from support.small_training import bits


class Counter:
    def __init__(self) -> None:
        self.steps = 0


class Foreign(Optimizer):
    """Writes each kind of state, then parameters; fails on demand in between."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "step": 0, "seen": [0]})
        self.total = 0
        self.history: list[int] = []
        self.counter = Counter()
        self.mean = torch.zeros(2)
        self.fails = False

    def _init(self) -> None:
        self.state["k"] = torch.tensor([0])  # type: ignore[index]  # as MADGRAD does
        self.state["count"] = 0  # type: ignore[index]  # as SPAM does
        self.state["rng"] = torch.Generator().manual_seed(0)  # type: ignore[index]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "past": deque([p.detach().clone()], maxlen=3),  # as AdaShift does
                    "list": [torch.zeros_like(p), {"deep": torch.zeros_like(p)}],
                    "pair": (torch.zeros_like(p), torch.zeros_like(p)),
                    "set": {0},
                    "chosen": {torch.zeros_like(p)},
                    "array": np.zeros(2),
                    "table": np.broadcast_to(0.0, 2),  # read-only: it needs no copy
                    "own": SimpleNamespace(moment=torch.zeros_like(p), steps=0),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.state:
            self._init()
        self.total += 1
        self.history.append(self.total)
        self.counter.steps += 1
        self.mean += 1
        self.state["k"] += 1  # type: ignore[index]
        self.state["count"] += 1  # type: ignore[index]
        for group in self.param_groups:
            group["step"] += 1
            group["seen"].append(group["step"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                torch.rand((), generator=self.state["rng"])  # type: ignore[index]
                state["past"].append(p.grad.clone())
                state["past"][0].add_(1)
                state["list"][0].add_(p.grad)
                state["list"][1]["deep"].sub_(p.grad)
                state["list"].append(len(state["list"]))
                state["pair"][1].add_(p.grad)
                state["set"].add(group["step"])
                next(iter(state["chosen"])).add_(1)
                state["array"] += 1
                state["own"].moment.add_(p.grad)
                state["own"].steps += 1
                p.sub_(group["lr"] * state["list"][0])
                if self.fails:
                    raise KeyError("in the middle of a step")


def everything(model: torch.nn.Module, optimizer: Foreign) -> Any:
    """All that a step changes, in a form that can be compared."""
    names = ("state", "total", "history", "mean", "counter")
    groups = [dict(group, params=None) for group in optimizer.param_groups]
    return _comparable([getattr(optimizer, name) for name in names] + [groups, model.state_dict()])


def _comparable(node: Any) -> Any:
    if isinstance(node, (torch.Tensor, np.ndarray)):
        return bits(node)
    if isinstance(node, torch.Generator):
        return bits(node.get_state())
    if isinstance(node, (SimpleNamespace, Counter)):
        node = vars(node)
    if isinstance(node, dict):
        return [(key if isinstance(key, str) else "", _comparable(node[key])) for key in node]
    if isinstance(node, (list, tuple, deque, set)):
        return [_comparable(value) for value in node]
    return node


def trained(steps: int) -> tuple[torch.nn.Module, Foreign]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = Foreign(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("way", ["transaction", "caught in the block"])
def test_a_failed_step_is_undone_wholly(way: str, steps: int) -> None:
    model, optimizer = trained(steps)
    guard: Any = torchguard.transaction(model, optimizer)
    assert guard.guarantee.startswith("strong: an exception")
    before = everything(model, optimizer)
    optimizer.fails = True
    with contextlib.suppress(KeyError), guard:
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(KeyError):
            optimizer.step()
        if way == "transaction":
            raise KeyError
    assert everything(model, optimizer) == before


def test_steps_that_go_through_are_those_of_plain_torch_and_skipped_ones_do_not_count() -> None:
    """A step that is skipped is called without gradients, and an own optimizer counts it."""
    model, optimizer = trained(0)
    step = torchguard.transaction(model, optimizer, skip_nonfinite=True)
    for scale in (1.0, float("nan"), 1.0, 1.0):
        with step:
            model(torch.ones(1, 2) * scale).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert step.stats().skipped == 1
    assert everything(model, optimizer) == everything(*trained(3))


def test_an_attribute_of_another_package_stays_as_it_is() -> None:
    model, optimizer = trained(1)
    optimizer.logger = SimpleNamespace(lines=[])  # type: ignore[attr-defined]
    step = torchguard.transaction(model, optimizer)
    with pytest.raises(KeyError), step:
        optimizer.logger.lines.append("began")  # type: ignore[attr-defined]
        raise KeyError
    assert optimizer.logger.lines == ["began"]  # type: ignore[attr-defined]


class Lookahead(Optimizer):
    """Steps another optimizer and keeps slow weights, as the wrappers of this name do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.state = optimizer, {}  # type: ignore[assignment]
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        (p,) = self.param_groups[0]["params"]
        p.copy_(self.state.setdefault(p, p.clone()).lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"slow": list(self.state.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (p,) = self.param_groups[0]["params"]
        self.state.clear()
        self.state.update(zip([p], state["slow"], strict=False))


def test_a_wrapper_with_a_state_of_its_own_is_named_by_also() -> None:
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    first, last = (torch.optim.SGD(each.parameters(), lr=0.1) for each in models)
    outer = Lookahead(first)
    with pytest.raises(TypeError, match="Lookahead keeps state besides that of the SGD in it"):
        torchguard.transaction(models[0], outer)
    shares = Lookahead(first)
    shares.state = first.state
    torchguard.transaction(models[0], shares)
    step = torchguard.transaction(models, [outer.optimizer, last], also=outer)
    for fails in (False, False, True):
        weights = [*(each.weight for each in models), *outer.state.values()]
        before = bits(weights)
        with contextlib.suppress(KeyError), step:
            models[1](models[0](torch.ones(1, 1))).sum().backward()
            outer.step()
            if fails:
                raise KeyError
            last.step()
    assert bits([*(each.weight for each in models), *outer.state.values()]) == before


class Decayed(torch.optim.SGD):
    """Calls its base class, whose step has hooks of its own, between writes of its own."""

    fails = ""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        parameter.mul_(0.5)
        if self.fails == "and goes on":
            with contextlib.suppress(TypeError):
                super().step(closure=3)
        super().step()
        parameter.sub_(0.1)
        if self.fails == "afterwards":
            raise RuntimeError


@pytest.mark.parametrize("undo", ["auto", "copy", "none"])
@pytest.mark.parametrize("fails", ["", "and goes on", "afterwards"])
def test_a_step_that_calls_its_base_class_is_one_step(undo: Any, fails: str) -> None:
    torch.optim.SGD([torch.zeros(1)])  # the hooks of a class come with its first optimizer
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = Decayed(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.fails = fails
    step = torchguard.transaction(model, optimizer, undo=undo)
    before = 1.0 if undo != "none" else None
    with contextlib.suppress(RuntimeError), step:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    if fails != "afterwards":
        assert model.weight.item() == pytest.approx(0.3)
        assert step.stats().commits == 1
    elif before is not None:
        assert model.weight.item() == before
        assert not optimizer.state
