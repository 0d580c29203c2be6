"""Backends that are right but for one planted defect, and a function to compile with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchguard
from torchguard.verification.backend import Options, VerifiedBackend
from torchguard.verification.report import GraphRecord

# --- planted defects: a backend that is right but for one thing


def spoiling(spoil: Callable[[Any, list[Any]], Any], *, after: bool = True) -> Any:
    """Make a backend that runs the graph and then spoils its outputs or inputs."""

    def planted(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        def run(*inputs: Any) -> Any:
            return spoil(list(graph(*inputs)) if after else graph, list(inputs))

        return run

    return planted


right = spoiling(lambda outputs, _: outputs)
wrong = spoiling(lambda outputs, _: [outputs[0] + 1, *outputs[1:]])


def one_value(outputs: list[Any], _: list[Any]) -> Any:
    outputs[0] = outputs[0].clone()
    outputs[0].view(-1)[3] += 0.01
    return outputs


def workload(x: torch.Tensor, state: torch.Tensor) -> Any:
    """Two floats, a whole number, a copy of the state, a view of it, and a write."""
    y = (x * 2).sin()
    state.mul_(0.5)
    return y, torch.argmax(state), state.clone(), x.exp(), state[1:]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)


def stats(checked: Any) -> torchguard.VerificationReport:
    report: torchguard.VerificationReport = checked.stats()
    return report


def against(function: Any, backend: Any = "eager", **options: Any) -> Any:
    """Compile a function or a module, and compare its calls with Python."""
    return torchguard.verified(against="python", backend=backend, **options)(function)


def row(compiled: Any) -> GraphRecord:
    """Return the row of the comparison with Python in the report; the others are graphs."""
    (found,) = [each for each in stats(compiled).graphs if not each.nodes]
    return found


def verified_backend(
    inner: Any = "inductor", *, mode: str | None = None, options: Any = None, **checks: Any
) -> VerifiedBackend:
    """Return the backend that ``verified()`` compiles with, to be given to ``torch.compile``."""
    return VerifiedBackend(Options(**checks, backend=inner, mode=mode, options=options))
