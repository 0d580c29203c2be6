"""install() and uninstall() between calls of compiled code, before and after Dynamo's import."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch

from support.child_process import output_of
from support.compiled import Counting, square
from torchguard import install

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo")]


# --- installing and uninstalling between calls


def test_what_was_compiled_before_is_guarded_between_its_graphs_and_not_compiled_again() -> None:
    """``resize_`` is a method: nothing has to be compiled again."""

    def grows(x: torch.Tensor, locked: torch.Tensor) -> torch.Tensor:
        y = x + 1
        with contextlib.suppress(RuntimeError):
            locked.resize_(50)
        y.resize_(2)
        return y

    counting = Counting("eager")
    compiled = torch.compile(grows, backend=counting)
    graphs = []
    for installed in (False, True, False):
        locked = torch.from_numpy(np.ones(2, dtype=np.float32))
        with install() if installed else contextlib.nullcontext():
            assert compiled(torch.ones(2), locked).tolist() == [2, 2]
        graphs.append(len(counting.graphs))
        assert (tuple(locked.shape) == (2,)) == installed
        locked.set_(torch.empty(0))  # type: ignore[call-overload]
    assert len(set(graphs)) == 1


# --- the order of importing Dynamo and installing


ORDER = """
import sys
import torch, torchguard

def install(): torchguard.install("resize", "out")
def uninstall(): torchguard.uninstall()
def dynamo(): import torch._dynamo

graphs = []

def backend(module, inputs):
    targets = [getattr(node.target, "__qualname__", node.target) for node in module.graph.nodes]
    graphs.append(targets)
    return module.forward

def first(x):
    return torch.add(x, 1)

def second(x):
    return torch.resize_as_(torch.zeros(2, 2), x) + torch.norm(x) + torch.nn.functional.gelu(x)

def third(x):
    out = torch.empty(2, 2)
    torch.linalg.inv(x + torch.eye(2), out=out)
    return torch.max(out, 1).values

def fourth(x):
    y = x + 1
    y.resize_(2)
    return torch.mul(y, 2)

def show():
    from torch._dynamo.utils import counters
    rows = []
    for function in (first, second, third, fourth):
        torch._dynamo.reset()
        counters.clear()
        graphs.clear()
        try:
            compiled = torch.compile(function, backend=backend, fullgraph=function is not fourth)
            value = [compiled(torch.ones(2, 2)).tolist() for _ in range(2)]
        except Exception as error:
            value = type(error).__name__ + str(error)[:60]
        breaks = sum(counters["graph_break"].values())
        rows.append([function.__name__, value, list(graphs), breaks, dict(counters["frames"])])
    print(bool(torchguard.installed()), rows)

for step in sys.argv[1:]:
    globals()[step]()
"""


@pytest.mark.parametrize(
    "steps",
    [
        "install dynamo show uninstall show",
        "install uninstall dynamo show install show",
    ],
)
def test_the_order_of_importing_dynamo_and_installing_does_not_matter(steps: str) -> None:
    printed = output_of(ORDER, *steps.split()).splitlines()
    installed, _, rows = zip(*(line.partition(" ") for line in printed), strict=True)
    is_first = steps.startswith("install dynamo")
    assert installed == (("True", "False") if is_first else ("False", "True"))
    assert rows[0] == rows[1]
    assert "Error" not in rows[0]


def test_a_compiled_function_is_compiled_anew_when_another_function_stands_there() -> None:
    def one(x: torch.Tensor) -> torch.Tensor:
        return current(x, x)

    (x,) = square()
    torch._dynamo.reset()
    compiled = torch.compile(one, backend="eager")
    with install("out"):
        for current in (torch.add, torch.mul, torch.sub):
            assert torch.equal(compiled(x), current(x, x))
    current = torch.add
    assert torch.equal(compiled(x), x + x)


LATER = """
import pathlib, sys, torch, torchguard
from torch._dynamo.testing import CompileCounter

path = pathlib.Path(sys.argv[1], "y.pt")

def frames():
    def function(x):
        y = x + 1
        torch.save(y, path)  # a graph break
        return y * 2

    counter = CompileCounter()
    torch.compile(function, backend=counter)(torch.ones(3))
    return counter.frame_count

bare = frames()
with torchguard.guarded():
    pass
with torchguard.install("save", only_if_needed=False):
    print(bare, frames())
"""


def test_modules_imported_after_the_first_patch_are_no_frames_of_dynamos(tmp_path: Path) -> None:
    assert output_of(LATER, str(tmp_path)).split() == ["2", "2"]
