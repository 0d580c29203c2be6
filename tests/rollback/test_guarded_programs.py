"""Programs that are recorded inside guarded(), and programs that open many scopes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import torchguard
from torchguard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "guarded": guarded,
    "guarded(data=True)": lambda: guarded(data=True),
}


def _writes(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.add_(1)
    y[0] = 5
    torch.relu_(y)
    torch.mul(y, 2, out=y)
    torch._foreach_add_([y], 1)
    y += 1
    return y


class _Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _writes(x)


class TestPrograms:
    """Nothing of the scope may be in a program that is recorded inside it."""

    @pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
    def test_of_make_fx(self, mode: Any) -> None:
        codes = []
        for scope in (nullcontext, *SCOPES.values()):
            with scope():
                graph = make_fx(_writes, tracing_mode=mode)(torch.ones(3))
            codes.append([str(node.target) for node in graph.graph.nodes])
            assert graph(torch.ones(3)).tolist() == _writes(torch.ones(3)).tolist()
        assert codes[1] == codes[2] == codes[0]

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("strict", [False, True])
    def test_of_export(self, strict: bool) -> None:
        codes = []
        for scope in (nullcontext, *SCOPES.values()):
            torch._dynamo.reset()
            with scope():
                program = torch.export.export(_Writes(), (torch.ones(3),), strict=strict)
            codes.append([str(node.target) for node in program.graph.nodes])
        assert codes[1] == codes[2] == codes[0]

    def test_of_symbolic_trace(self) -> None:
        codes = []
        for scope in (nullcontext, *SCOPES.values()):
            with scope():
                graph = torch.fx.symbolic_trace(_scripted).graph
            codes.append([(node.op, node.target) for node in graph.nodes])
        assert codes[1] == codes[2] == codes[0]

    @pytest.mark.filterwarnings("ignore")
    def test_of_scripting(self) -> None:
        codes = []
        for scope in (nullcontext, *SCOPES.values()):
            with scope():
                scripted = torch.jit.script(_copy(_scripted))
            codes.append(scripted.code)
            assert scripted(torch.ones(2)).tolist() == [4, 4]
        assert codes[1] == codes[2] == codes[0]


def _copy(function: Any) -> Any:
    """TorchScript keeps what it has compiled with the function."""
    return type(function)(function.__code__, function.__globals__, function.__name__)


def _scripted(x: torch.Tensor) -> torch.Tensor:
    y = torch.add(x, 1)
    y.mul_(2)
    return torch.relu_(y)


class TestManyScopes:
    """A program that opens scopes in a loop keeps Tensor's guarded methods between them."""

    def open_many(self) -> None:
        for _ in range(100):
            with torchguard.guarded():
                pass

    def test_what_is_kept_does_nothing(self) -> None:
        """A failing write outside moves no version counter; in the next scope it does."""
        self.open_many()
        assert "add_" in vars(torch.Tensor)
        tensor = torch.zeros(3)

        def fail() -> int:
            before = tensor._version
            with pytest.raises(IndexError):
                tensor[[0, 9]] = 1.0
            return tensor._version - before

        assert fail() == 0
        with torchguard.guarded():
            assert fail() > 0
        assert fail() == 0

    def test_uninstall_takes_it_away(self) -> None:
        before = dict(vars(torch.Tensor))
        self.open_many()
        with torchguard.guarded():
            torchguard.uninstall()  # a scope is open, so it stays
            assert "add_" in vars(torch.Tensor)
        torchguard.uninstall()
        assert dict(vars(torch.Tensor)) == before

    def test_install_beside_it(self) -> None:
        """install() finds torch's own functions below, and undoing leaves them."""
        torchs = torch.Tensor.resize_
        self.open_many()
        tensor = torch.from_numpy(np.zeros(4))
        with torchguard.install("resize"):
            assert "resize" in torchguard.installed()
            assert torchguard.get_original("torch.Tensor.resize_") is torchs
            with pytest.raises(RuntimeError):
                tensor.resize_(5, 5)
            assert tensor.shape == (4,)
        torchguard.uninstall()
        assert torch.Tensor.resize_ is torchs

    def test_a_class_changes_rarely(self) -> None:
        """Since Python 3.13 a class that has changed 1,000 times loses the interpreter's cache."""
        self.open_many()
        methods = vars(torch.Tensor)["add_"]
        with torchguard.guarded():
            assert vars(torch.Tensor)["add_"] is methods
