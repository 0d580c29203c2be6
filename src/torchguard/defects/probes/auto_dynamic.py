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

from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.decorator import bucketed
from torchguard.defects.catalog import Defect

if TYPE_CHECKING:
    from collections.abc import Callable

_STEP, _BUCKETS = 8, 20


def _double(padded: torch.Tensor) -> torch.Tensor:
    return padded * 2


def _is_symbolic(value: object) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _run(
    wrap: Callable[[Callable[..., Any]], Callable[[torch.Tensor, int], object]],
) -> str | None:
    """Call a wrapped function with 20 lengths, one per bucket; say which graphs are symbolic."""
    symbolic: list[bool] = []  # one per graph: has it a symbolic dim?

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        symbolic.append(any(_is_symbolic(value) for value in inputs))
        return graph.forward

    double = wrap(backend)
    for bucket in range(_STEP, _STEP * _BUCKETS + 1, _STEP):
        double(torch.ones(bucket - 3), bucket)
    if len(symbolic) == _BUCKETS and not any(symbolic):
        return None
    return f"{_BUCKETS} buckets gave {len(symbolic)} graphs, {sum(symbolic)} with a symbolic dim"


def probe() -> str | None:
    """Pad by hand in front of a plain ``torch.compile``."""

    def wrap(backend: Callable[..., Any]) -> Callable[[torch.Tensor, int], object]:
        double = torch.compile(_double, backend=backend)
        return lambda x, bucket: double(functional.pad(x, (0, bucket - x.shape[0])))

    return _run(wrap)


def guarded_probe() -> str | None:
    """Let ``bucketed`` pad."""

    def wrap(backend: Callable[..., Any]) -> Callable[[torch.Tensor, int], object]:
        double = bucketed(
            _double,
            dims={"padded": {0: "t"}},
            buckets=Buckets.multiples_of(_STEP, _STEP * _BUCKETS),
            compile={"backend": backend},
        )
        return lambda x, _: double(x)

    return _run(wrap)


DEFECT = Defect(
    id="auto-dynamic",
    summary="padding to buckets does not keep a plain torch.compile from a symbolic dim",
    upstream=("https://github.com/pytorch/pytorch/issues/190631",),
    family="compile",
    probe=probe,
    guards=("bucketed",),
    guarded_probe=guarded_probe,
)
