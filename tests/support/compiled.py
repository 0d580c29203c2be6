"""How a call of a compiled function ends, and what has compiled it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend


class Counting:
    """A backend that counts graphs and notes their operators, and compiles with another."""

    def __init__(self, name: str) -> None:
        self.graphs: list[list[str]] = []
        self._compile: Callable[..., Any] = lookup_backend(name)

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs.append([f"{node.op} {node.target}" for node in module.graph.nodes])
        return self._compile(module, inputs)


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.add(torch.norm(x), torch.special.erf(x)) + torch.nn.functional.gelu(x)


def many(x: torch.Tensor) -> torch.Tensor:
    total = torch.full((4, 4), 2.0) + torch.cat([x, x])[:4] + torch.arange(4.0)
    total = total + torch.linalg.norm(x) + torch.max(x, 1).values + torch.fft.fft(x).real
    total = total + torch.tensordot(x, x, dims=1) + torch.nn.functional.normalize(x)
    return total + torch.resize_as_(torch.zeros(4, 4), x)  # type: ignore[no-any-return]


def with_out(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.mul(x, 3, out=out)
    values, indices = torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.max(x, 1, out=(values, indices))
    return torch.add(out, values + indices)


def resizes(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.resize_(2, 2)
    return y * 2


def square() -> tuple[Any, ...]:
    return (torch.arange(16.0).view(4, 4) / 7,)
