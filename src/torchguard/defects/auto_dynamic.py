"""Padding to buckets does not keep dynamic dims out of a plain ``torch.compile``.

Dynamo compares the sizes of a recompilation with those it saw before and marks every
dim that changed as dynamic (``automatic_dynamic_shapes``). It can't know that the sizes
are few: the second bucket makes the dim symbolic, and the graph with the symbolic dim
then serves all the other buckets.

https://github.com/pytorch/pytorch/issues/190631
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from torchguard.defects.catalog import Defect

if TYPE_CHECKING:
    from collections.abc import Callable

_STEP, _BUCKETS = 8, 20


def _double(padded: torch.Tensor) -> torch.Tensor:
    return padded * 2


def _is_symbolic(value: object) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def probe() -> str | None:
    """Run 20 buckets through a backend that notes which graphs have a symbolic dim."""
    symbolic: list[bool] = []  # one per graph: has it a symbolic dim?

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        symbolic.append(any(_is_symbolic(value) for value in inputs))
        return graph.forward

    double = torch.compile(_double, backend=backend)
    for bucket in range(_STEP, _STEP * _BUCKETS + 1, _STEP):
        length = bucket - 3
        double(functional.pad(torch.ones(length), (0, bucket - length)))
    if not any(symbolic):
        return None
    return f"{_BUCKETS} buckets gave {len(symbolic)} graphs, {sum(symbolic)} with a symbolic dim"


DEFECT = Defect(
    id="auto-dynamic",
    summary="padding to buckets does not keep a plain torch.compile from a symbolic dim",
    upstream=("https://github.com/pytorch/pytorch/issues/190631",),
    family="compile",
    probe=probe,
    planned="bucketed",
    advice=(
        "Compile with dynamic=False and give each compiled function at most 8 buckets; "
        "past 8 the recompile limit sends the rest to eager."
    ),
)
