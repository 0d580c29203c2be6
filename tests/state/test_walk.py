"""One walk: what each kind of object holds, and what a walk opens."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, deque
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from torchguard.state.walk import CALL, DATA, MOST, STATE, TRAINING, optimizers_in, reachable, walk


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Record:
    held: Any


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self) -> Any:
        return self.held


def closure(held: Any) -> Any:
    return lambda: held


def default(held: Any) -> Any:
    def function(x: Any = held) -> Any:
        return x

    return function


def wrapping(held: Any) -> Any:
    return functools.wraps(closure(held))(lambda: None)


def module(held: Any) -> nn.Module:
    made = nn.Module()
    made.held = held
    return made


def optimizer(held: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    made.held = held  # type: ignore[attr-defined]
    return made


EVERY, NOT_STATE = {"STATE", "DATA", "TRAINING", "CALL"}, {"TRAINING", "CALL"}
# What holds an object, and the walks by which it is found there.
HOLDERS: dict[str, tuple[Any, set[str]]] = {
    "dict": (lambda x: {"a": [x]}, EVERY),
    "ordered": (lambda x: OrderedDict(a=x), EVERY),
    "read-only mapping": (lambda x: MappingProxyType({"a": x}), EVERY),
    "list": (lambda x: [1, x], EVERY),
    "tuple": (lambda x: (1, (x,)), EVERY),
    "named tuple": (Pair, EVERY),
    "deque": (lambda x: deque([x]), EVERY),
    "set": (lambda x: {x}, EVERY),
    "frozenset": (lambda x: frozenset({x}), EVERY),
    "data class": (Record, EVERY),
    "a long list": (lambda x: [x, *range(MOST)], {"STATE"}),
    "object": (Holder, NOT_STATE),
    "object in a list": (lambda x: [Holder(x)], NOT_STATE),
    "list in an object": (lambda x: Holder([x]), NOT_STATE),
    "object in an object": (lambda x: Holder(Holder(x)), set()),
    "bound method": (lambda x: Holder(x).method, NOT_STATE),
    "bound method in an object": (lambda x: Holder(Holder(x).method), {"CALL"}),
    "partial": (lambda x: functools.partial(print, end=x), NOT_STATE),
    "closure": (closure, {"CALL"}),
    "closure in an object": (lambda x: Holder(closure(Holder(x))), {"CALL"}),
    "default": (default, {"CALL"}),
    "wrapped": (wrapping, {"CALL"}),
    "optimizer": (optimizer, NOT_STATE),
    "object in an optimizer": (lambda x: optimizer(Holder(x)), {"TRAINING"}),
    "class": (lambda x: type("Kind", (), {"held": x}), set()),
    "module": (module, set()),
}
REACHES = {"STATE": STATE, "DATA": DATA, "TRAINING": TRAINING, "CALL": CALL}


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("name", HOLDERS)
def test_a_walk_opens_its_kinds_and_no_others(name: str, reach: str) -> None:
    hold, opened_by = HOLDERS[name]
    held = object()
    found = any(each is held for each in walk([hold(held)], REACHES[reach]))
    assert found == (reach in opened_by)


def test_what_is_held_twice_or_by_itself_is_found_once() -> None:
    tensor, ring = torch.zeros(1), SimpleNamespace()
    ring.itself, ring.more = ring, [ring, tensor, tensor]
    found = list(walk([ring, tensor], CALL))
    assert sum(each is ring for each in found) == sum(each is tensor for each in found) == 1


class Broken(dict[str, Any]):
    def items(self) -> Any:
        raise LookupError("not to be listed")


def test_what_can_not_be_listed_ends_the_walk_of_a_state_alone() -> None:
    """What a call reaches may be anything; of a state nothing is left out in silence."""
    broken = Broken(a=1)
    broken.held = held = object()  # type: ignore[attr-defined]
    assert any(each is held for each in reachable(None, [broken]))
    with pytest.raises(LookupError):
        list(walk([broken]))


def test_optimizers_are_found_in_others_through_methods_and_objects() -> None:
    inner = optimizer(1)
    outer = optimizer({"steps": [inner.step], "more": SimpleNamespace(of=Holder(optimizer(2)))})
    assert optimizers_in(outer) == [inner]
