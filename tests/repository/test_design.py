"""docs/design.md: its tree is the tree, and its walks are those that calls take."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import torchguard
from support.walk import PACKAGE, bucketed, verified, walked

PAGE = (Path(__file__).parent.parent.parent / "docs" / "design.md").read_text(encoding="utf-8")


def locked() -> torch.Tensor:
    """Return a tensor whose storage can't grow."""
    return torch.from_numpy(np.empty(0, dtype=np.float32))


def resize() -> Callable[[], None]:
    t = locked()

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            torchguard.safe_resize_(t, 100)

    return call


def out() -> Callable[[], None]:
    x, result = torch.ones(3), locked()

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
    entered = walked(make()).entered
    position = 0
    for each in listed:
        assert each in entered[position:], each
        position = entered.index(each, position) + 1


def test_tree() -> None:
    """The tree has every room and every file beside the rooms, and no other."""
    tree = PAGE.partition("src/torchguard/\n")[2].partition("```")[0]
    listed = set(re.findall(r"^  (\w+(?:/|\.py))", tree, re.MULTILINE))
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    files = {path.name for path in PACKAGE.glob("*.py")}
    assert listed == rooms | files
