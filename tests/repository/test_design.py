"""design.md: its tree is the tree, its walks are those that calls take, and none is longer."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import torchguard
from support.walk import PACKAGE, bucketed, verified, walked, walks

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "project" / "design.md").read_text(encoding="utf-8")
counted = functools.lru_cache(walks)

# Files and changes of file, the most of torch 2.8 to 2.15.
AT_MOST = {
    "bucketed, first call": (12, 74),
    "bucketed, warm call": (5, 4),
    "verified, first call": (12, 46),
}
# torch 2.6 has no function in C that says whether saved-tensors hooks are on: each isolated run
# goes to this one and comes back.
FALLBACK = "_torch/eager.py:_saved_tensors_hooks_cannot_be_disabled"
# Dynamo of torch 2.15 compares the backend of a call with those of its graphs, in a row.
COMPARED = "verification/backend.py:__eq__"


def resize() -> Callable[[], None]:
    t = torch.from_numpy(np.empty(0, dtype=np.float32))  # can't grow

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            torchguard.safe_resize_(t, 100)

    return call


def out() -> Callable[[], None]:
    x, result = torch.ones(3), torch.from_numpy(np.empty(0, dtype=np.float32))

    def call() -> None:
        with torchguard.guarded(), contextlib.suppress(RuntimeError):
            torch.mul(x, 2, out=result)

    return call


@pytest.mark.parametrize(
    ("title", "make"),
    [
        ("`safe_resize_(t, 100)`", resize),
        ("`torch.mul(x, 2, out=out)`", out),
        ("The first call of `bucketed(f)`", bucketed),
        ("The first call of `verified(f)`", verified),
    ],
)
def test_walks(title: str, make: Callable[[], Callable[[], object]]) -> None:
    """The functions listed for a call are entered in that order."""
    section = PAGE.partition(f"### {title}")[2].partition("###")[0]
    listed = [
        f"{file}:{name}" for file, name in re.findall(r"^(\S+\.py) +(\w+)", section, re.MULTILINE)
    ]
    assert len(listed) >= 5
    make()()  # the imports
    entered = iter(walked(make()).entered)
    assert [each for each in listed if each not in entered] == []  # what is found is used up


def test_tree() -> None:
    """The tree has every room and every file beside the rooms, and no other."""
    tree = PAGE.partition("src/torchguard/\n")[2].partition("```")[0]
    listed = set(re.findall(r"^  (\w+(?:/|\.py))", tree, re.MULTILINE))
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert listed == rooms | {path.name for path in PACKAGE.glob("*.py")}


@pytest.mark.parametrize("name", AT_MOST)
def test_the_walk_of_a_call_is_not_longer_than_it_was(name: str) -> None:
    """Files entered and changes of file, as ``python tests/support/walk.py`` prints them."""
    walk = counted()[name]
    files, changes = AT_MOST[name]
    detours = walk.entered.count(FALLBACK)
    assert 0 < len(walk.files) <= files + bool(detours), walk.files
    assert walk.changes <= changes + 2 * (detours + (COMPARED in walk.entered)), walk.entered


def test_a_first_call_of_bucketed_goes_through_its_pipeline() -> None:
    """Six files of its folder, and how often it goes from one of them to another."""
    folder = "bucketing/decorator/"
    files = [each.partition(":")[0] for each in counted()["bucketed, first call"].entered]
    own = [each for each in files if each.startswith(folder)]
    assert len({*own}) <= 6
    assert sum(one != other for one, other in itertools.pairwise(own)) <= 25
