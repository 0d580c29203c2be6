"""Snapshots: what is restored, in place, and what is not touched."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchguard.state.containers import Containers, copy_of_tree
from torchguard.state.process import named_generators, same_state
from torchguard.state.tensors import Elements
from torchguard.state.walk import walk

# ---- containers ----


def test_each_kind_of_container_is_restored_in_place() -> None:
    inner = torch.zeros(2)
    held = SimpleNamespace(count=1)
    things: dict[str, Any] = {
        "dict": {"a": 1, "b": inner},
        "ordered": OrderedDict(a=1, b=2),
        "list": [1, [2, inner]],
        "deque": deque([1, 2], maxlen=3),
        "set": {1, 2},
        "tuple": (inner, [1]),
        "array": np.arange(3),
        "object": held,
    }
    before = copy_of_tree({**things, "object": vars(held)})
    saved = Containers([things], into=lambda node: isinstance(node, SimpleNamespace))
    objects = {name: id(each) for name, each in things.items()}
    things["dict"].pop("a")
    things["ordered"]["a"] = things["ordered"].pop("a")  # the order is another one
    things["list"][1].append(3)
    things["deque"].append(5)
    things["set"].add(3)
    things["tuple"][1].clear()
    things["array"][0] = 7
    inner.add_(1)
    held.count += 1
    things["new"] = 1
    saved.restore()
    assert {name: id(each) for name, each in things.items()} == objects
    now = copy_of_tree({**things, "object": vars(held)})
    assert [*now["ordered"]] == ["a", "b"]
    assert repr(now) == repr(before)


def test_what_contains_itself_is_walked_copied_and_restored_once() -> None:
    tree: dict[str, Any] = {"x": torch.ones(1)}
    tree["self"], tree["list"] = tree, [tree]
    assert len(list(walk([tree]))) == 3
    copied = copy_of_tree(tree)
    assert copied["self"] is copied
    assert copied["list"][0] is copied
    assert copied["x"] is not tree["x"]
    saved = Containers([tree])
    tree["x"].add_(1)
    tree["list"].clear()
    saved.restore()
    assert tree["x"].item() == 1
    assert tree["list"] == [tree]


def test_a_dict_is_restored_one_entry_at_a_time() -> None:
    """Another thread may be reading: at no time is it empty, and what is unchanged is not set."""

    class Watched(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            sets.append(key)
            super().__setitem__(key, value)

        def clear(self) -> None:
            raise AssertionError("cleared")

    sets: list[str] = []
    watched = Watched(a=1, b=2)
    saved = Containers([watched])
    watched["b"], watched["c"] = 3, 4
    sets.clear()
    saved.restore()
    assert watched == {"a": 1, "b": 2}
    assert sets == ["b"]


# ---- tensors ----


class Registry(OrderedDict[str, type]):
    """Makes an object when asked, as transformers' table of activations does."""

    def __getitem__(self, key: str) -> object:  # type: ignore[override]
        return super().__getitem__(key)("needed")

    def __delitem__(self, key: str) -> None:
        raise AssertionError("nobody calls it")


@pytest.mark.parametrize("change", ["replaced", "added", "moved", "nothing"])
def test_a_dict_is_copied_and_restored_as_it_stores(change: str) -> None:
    """A class may make something else of it, and raise where it can't."""

    class Needs:
        def __init__(self) -> None:
            raise AssertionError("made")

    registry = Registry(one=Needs, two=int)
    saved = Containers([registry])
    if change == "replaced":
        registry["one"] = int
    elif change == "added":
        registry["three"] = int
    elif change == "moved":
        registry.move_to_end("one")
    saved.restore()
    assert list(OrderedDict.items(registry)) == [("one", Needs), ("two", int)]


# ---- many tensors at once ----


def of_every_layout() -> list[Tensor]:
    """Tensors whose memory is copied in bulk, and others."""
    torch.manual_seed(0)
    base = torch.randn(64, 8)
    return [
        torch.randn(()), torch.randn(0), torch.randn(5), torch.randn(3, 4), torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(9)[2:6],
        base[:, :3], base[:, 3:], torch.randn(3, 1).expand(3, 4), torch.randn(40_000),
        torch.randn(100, 200), torch.randn(3, 3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).imag, torch.arange(7), torch.ones(3).bool(),
        torch.randn(6).to(torch.float8_e4m3fn), torch.randn(2, 3).to(torch.float8_e5m2),
        torch.arange(3).to(torch.uint16), torch.randn(4).bfloat16(),
    ]  # fmt: skip


def test_elements_of_every_layout_are_restored_whichever_memory_is_used_again() -> None:
    tensors = of_every_layout()
    elements: Elements | None = None
    for _ in range(3):
        before = [each.clone() for each in tensors]
        versions = [each._version for each in tensors]
        reused = None if elements is None else elements.for_reuse()
        elements = Elements(tensors, reused)
        assert reused is None or elements._copies is reused._copies
        for each in tensors:
            torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage()).fill_(7)
        tensors[2].add_(1)
        elements.restore()
        pairs = zip(tensors, before, strict=True)
        assert all(torch.equal(now.resolve_conj(), old.resolve_conj()) for now, old in pairs)
        assert [each._version for each in tensors] == versions
        tensors[3].mul_(2.0)


@pytest.mark.parametrize(
    "change", [Tensor.t, Tensor.double, Tensor.clone, lambda x: x[:1], lambda x: x.view(-1)]
)
def test_copies_are_not_used_again_for_a_tensor_that_leads_elsewhere(change: Any) -> None:
    tensor = torch.randn(3, 4)
    elements = Elements([tensor])
    tensor.data = change(tensor.data)
    before = tensor.clone()
    again = Elements([tensor], elements.for_reuse())
    tensor.add_(1.0)
    again.restore()
    assert torch.equal(tensor, before)


def test_a_state_that_is_read_again_only_after_a_draw_is_always_that_of_now() -> None:
    shared: Any = np.random  # the types leave out what swaps the generator

    def numpy_state() -> Any:
        return shared.get_state(legacy=False)

    def draws() -> Iterator[Callable[[], object]]:
        yield from (random.random, lambda: random.gauss(0.0, 1.0), lambda: random.seed(3))
        yield from (shared.random, shared.randn, shared.randn, lambda: shared.seed(3))
        yield lambda: shared.random(624)  # all numbers are others, the position is the same
        yield lambda: shared.set_state({**numpy_state(), "has_gauss": 1, "gauss": 2.0})
        yield lambda: shared.set_bit_generator(np.random.PCG64(1))
        yield from (shared.random, shared.randn)
        yield lambda: shared.set_bit_generator(own)

    own, saved = shared.get_bit_generator(), numpy_state()
    try:
        for draw in draws():
            for _ in range(2):
                draw()
                for name, read in (("python", random.getstate), ("numpy", numpy_state)):
                    get_state, _ = named_generators()[name]
                    assert get_state() is get_state() or own is not shared.get_bit_generator()
                    assert same_state(get_state(), read())
    finally:
        shared.set_bit_generator(own)
        shared.set_state(saved)
