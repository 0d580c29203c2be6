"""Snapshots: what is restored, in place, and what is not touched."""

from __future__ import annotations

from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from torchguard.state.containers import Containers, copy_of_tree, walk
from torchguard.state.tensors import Elements

if TYPE_CHECKING:
    pass

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


def test_elements_are_restored_and_their_memory_is_used_again() -> None:
    tensors = [torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(2), torch.ones(1).expand(3)]
    values = [each.clone() for each in tensors]
    versions = [each._version for each in tensors]
    first = Elements(tensors)
    again = Elements(tensors, first)
    assert [c.data_ptr() for c in again.copies] == [c.data_ptr() for c in first.copies]
    assert len(again.others) == 1  # expanded
    for each in tensors[:3]:
        each.zero_()
    again.restore()
    assert all(map(torch.equal, tensors, values))
    assert [each._version for each in tensors] == versions
    tensors[2] = torch.randn(5)  # others, and other shapes, do not take the memory
    other = Elements(tensors, again)
    assert other.copies[2].shape == (5,)


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
