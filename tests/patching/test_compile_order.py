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


# --- Dynamo, which is imported under guards


UNDER_GUARDS = """
import torch, torchguard
torchguard.install("resize", "out")
import torch._dynamo

def function(x):
    out = torch.empty(2, 2)
    torch.linalg.inv(x + torch.eye(2), out=out)
    return torch.add(out, torch.norm(x)) + torch.nn.functional.gelu(x)

def backend(module, inputs):
    print([getattr(node.target, "__qualname__", node.target) for node in module.graph.nodes])
    print([type(node.target) for node in module.graph.nodes])
    return module.forward

def show():
    torch._dynamo.reset()
    print(torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2, 2)).tolist())

show()
torchguard.uninstall()
show()
"""


def test_graphs_are_the_same_if_dynamo_is_imported_under_guards() -> None:
    printed = output_of(UNDER_GUARDS).splitlines()
    assert len(printed) == 6
    assert printed[:3] == printed[3:]


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
