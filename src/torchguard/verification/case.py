"""A graph and what a compiler has made of it, and whether that does what eager does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchguard.equivalence.compare import COMPILING, Difference, judge, same_outcome
from torchguard.equivalence.copies import why_not_copied
from torchguard.equivalence.run import Outcome, run
from torchguard.verification.graph import in_double, wider

__all__ = ["Case", "exact"]


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
        compiled = run(self.compiled, inputs)
        found = list(
            judge(eager, compiled, COMPILING, lambda: exact(self.graph, inputs)).differences
        )
        # What eager itself does not do twice, such as reading new memory, shows nothing.
        return found if found and same_outcome(eager, run(self.graph, inputs)) else []


def exact(graph: fx.GraphModule, inputs: Sequence[Any]) -> Outcome | None:
    """Return the outcome in double precision, or None where the graph can't be run so."""
    wide = in_double(graph)
    if wide is None or why_not_copied(inputs, wider) is not None:
        return None
    try:
        return run(wide, inputs, cast=wider)
    except torch.OutOfMemoryError:
        return None
