"""``@guarded``, ``@verified`` and ``@no_recompile`` with and without parentheses, and on what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchguard import guarded, no_recompile, verified
from torchguard.errors import RecompileError


def grow(out: torch.Tensor) -> torch.Tensor:
    """Torch spoils the shape of ``out`` before it raises."""
    return torch.add(torch.ones(3), 1, out=out)


@pytest.mark.parametrize("decorate", [guarded, guarded(), guarded(data=True)])
def test_guarded(decorate: Any) -> None:
    out = torch.from_numpy(np.empty(0, dtype=np.float32))
    decorated = decorate(grow)
    assert decorated.__name__ == "grow"
    with pytest.raises(RuntimeError):
        decorated(out)
    assert out.shape == (0,)


def test_guarded_in_a_class() -> None:
    class Adder:
        @guarded
        def add(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    assert Adder().add(torch.ones(2)).sum() == 4


def test_guarded_refuses_what_has_no_operations() -> None:
    class Adder:
        """A class."""

    for decorate in (guarded, guarded()):
        wrong: Any = decorate
        with pytest.raises(TypeError, match=r"function is the class .*Adder, expected a function"):
            wrong(Adder)
        with pytest.raises(TypeError, match="function is 3, expected a function"):
            wrong(3)


@pytest.mark.parametrize("decorate", [no_recompile, no_recompile()])
def test_no_recompile(decorate: Any) -> None:
    torch.compiler.reset()
    compile_: Any = torch.compile
    compiled = compile_(lambda x: 2 * x, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    warm = decorate(compiled)
    for _ in range(2):
        assert warm(torch.ones(3)).sum() == 6
    with pytest.raises(RecompileError, match=r"x of shape \(4,\)"):
        warm(torch.ones(4))
    compiled(torch.ones(4))
    assert warm(torch.ones(4)).sum() == 8


def test_verified() -> None:
    torch.compiler.reset()

    @verified
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    again = verified(lambda x: 2 * x, backend="aot_eager")
    assert double.__name__ == "double"
    assert again(torch.ones(3)).sum() == 6
    assert again.stats().verified == 1
    layer: torch.nn.Module = verified(torch.nn.Linear(2, 2), backend="aot_eager")
    assert type(layer) is torch.nn.Linear
    assert layer(torch.ones(1, 2)).shape == (1, 2)
