"""A graph and what a compiler has made of it, and whether that does what eager does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchguard.equivalence.copies import NotCopied, tensors_of
from torchguard.verification.comparison import Difference, differences, same
from torchguard.verification.graph import in_double, wider
from torchguard.verification.outcome import Outcome, run

__all__ = ["Case", "exact", "same_outcome"]


@dataclass(frozen=True)
class Case:
    """A graph that owns no tensors, the same graph compiled, and inputs for both."""

    graph: fx.GraphModule
    compiled: Callable[..., Any]
    inputs: list[Any]

    def differences(self, inputs: Sequence[Any]) -> list[Difference]:
        """Return what the compiled graph does otherwise with these inputs."""
        eager = run(self.graph, inputs)
        if eager.error is not None:
            return []
        found = differences(eager, run(self.compiled, inputs), lambda: exact(self.graph, inputs))
        # What eager itself does not do twice, such as reading new memory, shows nothing.
        return found if found and same_outcome(eager, run(self.graph, inputs)) else []


def exact(graph: fx.GraphModule, inputs: Sequence[Any]) -> Outcome | None:
    """Return the outcome in double precision, or None where the graph can't be run so."""
    wide = in_double(graph)
    if wide is None:
        return None
    try:
        return run(wide, inputs, cast=wider)
    except (NotCopied, torch.OutOfMemoryError):
        return None


def same_outcome(one: Outcome, other: Outcome) -> bool:
    """Whether two runs of eager came to the same."""
    if (one.error is None) != (other.error is None):
        return False
    pairs = zip(
        tensors_of([*one.outputs, *one.inputs, *(one.gradients or [])]),
        tensors_of([*other.outputs, *other.inputs, *(other.gradients or [])]),
        strict=False,
    )
    return all(a.shape == b.shape and same(a.detach(), b.detach()) for a, b in pairs)
