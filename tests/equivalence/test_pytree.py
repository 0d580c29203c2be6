"""Trees of tensors are flattened and rebuilt, whatever their containers are."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Iterator, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from torchguard._pytree import children, flatten, key_paths, keystr, replace, unflatten
from torchguard.state.walk import reachable


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataclass that refuses to be written."""

    logits: Any
    loss: Any = None


class Encoding(UserDict):  # type: ignore[type-arg]  # as transformers' BatchEncoding
    """A mapping that holds more than its items."""

    def __init__(self, data: Any, said: str) -> None:
        super().__init__(data)
        self.said = said


class Batch(MutableMapping):  # type: ignore[type-arg]
    """A mapping that keeps its items in an attribute, which copy.copy shares."""

    def __init__(self, **items: Any) -> None:
        self._data = items

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._data[key] = value

    def __delitem__(self, key: str) -> None:
        del self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


@dataclasses.dataclass
class Net(torch.nn.Module):
    """A module that is a dataclass."""

    size: int

    def __post_init__(self) -> None:
        super().__init__()


TREES = [
    [1, (2, None)],
    {"a": 1, "b": {"c": [2]}},
    OrderedDict(a=1, b=2),
    Pair(1, [2, 3]),
    Frozen(1, {"a": 2}),
    Encoding({"a": 1, "b": (2,)}, "said"),
    Batch(a=1, b=[2]),
    MappingProxyType({"a": 1, "b": [2]}),
    [],
    {"a": {}},
    torch.ones(2, 2).max(0),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_unflatten_is_the_inverse_of_flatten(tree: Any) -> None:
    """New leaves lie where the old ones were, and the tree given is unchanged."""
    leaves, treedef = flatten(tree)
    assert unflatten(leaves, tree) is tree
    marks: list[Any] = [f"leaf {index}" for index in range(len(leaves))]
    if isinstance(tree, torch.return_types.max):
        marks = [torch.zeros(2), torch.ones(2)]  # it takes nothing but tensors
    made = unflatten(marks, tree)
    again, same = flatten(made)
    assert all(a is b for a, b in zip(again, marks, strict=True))
    assert same == treedef
    assert type(made) is type(tree)
    assert all(a is b for a, b in zip(flatten(tree)[0], leaves, strict=True))


def test_unflatten_copies_a_container_that_changes_and_leaves_others_alone() -> None:
    """What a container holds besides its items is kept."""
    assert unflatten([5], Encoding({"a": 1}, "said")).said == "said"
    inner = {"b": 2}
    made = unflatten([5, 2], [1, inner])
    assert made == [5, {"b": 2}]
    assert made[1] is inner
    with pytest.raises(ValueError, match="too many"):
        unflatten([1, 2], [1])


def test_treedef_tells_structures_apart_and_can_be_hashed() -> None:
    """It depends on types and keys, and on no leaf."""
    of = {tree_type: flatten(tree)[1] for tree_type, tree in enumerate(TREES)}
    assert len(set(of.values())) == len(TREES)
    assert flatten({"a": torch.ones(2)})[1] == flatten({"a": torch.zeros(3)})[1]
    assert flatten({"a": 1})[1] != flatten({"b": 1})[1]


def test_tensors_sizes_and_modules_are_leaves() -> None:
    """A shape is one value, and a module that is a dataclass is a module."""
    for leaf in (torch.ones(2), torch.Size([2, 3]), Net(2), "text", Frozen, None):
        assert children(leaf) is None


def test_key_paths_and_keystr_name_each_leaf() -> None:
    """In the order of the leaves, as one would type them."""
    tree = {"out": Frozen(1, Pair([2], 3))}
    paths = key_paths(flatten(tree)[1])
    assert [keystr("x", path, tree) for path in paths] == [
        "x['out'].logits",
        "x['out'].loss[0][0]",
        "x['out'].loss[1]",
    ]


def test_replace_puts_parts_at_paths_and_copies_what_is_on_the_way() -> None:
    """A part may be a container, and what lies beside it is the same object."""
    tree = {"out": Frozen([1, 2], Pair(3, 4)), "rest": [5]}
    made = replace(tree, {("out", "logits"): 6, ("out", "loss", 1): [7]})
    assert made == {"out": Frozen(6, Pair(3, [7])), "rest": [5]}
    assert made["rest"] is tree["rest"]
    assert tree == {"out": Frozen([1, 2], Pair(3, 4)), "rest": [5]}
    assert replace(tree, {(): 8}) == 8


LINEAR = torch.nn.Linear(1, 1)
FORWARD = LINEAR.forward


def test_a_function_reaches_the_object_of_a_global_method_of_another_module() -> None:
    assert any(each is LINEAR for each in reachable(lambda x: FORWARD(x) + 1, []))


class Unsized(list):  # type: ignore[type-arg]
    """A collection that does not know how many items it has."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        raise NotImplementedError


def test_what_a_function_reaches_need_not_have_a_length() -> None:
    """A 0-d array, a range that is too long for ``len`` and an object whose ``__len__`` raises."""
    array, numbers, unsized = np.array(0.5), range(10**30), Unsized(torch.zeros(1))
    found = reachable(lambda x: (x, array), [numbers, unsized])
    assert all(any(each is one for one in found) for each in (array, numbers, unsized))
    assert any(each is unsized.held for each in found)
