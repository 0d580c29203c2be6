"""Past 8 variants of a compiled function every new one runs eager, without an exception.

Dynamo keeps at most ``recompile_limit`` compiled variants for a code object. When a call
fits none of them and the list is full, it logs one warning and runs the original bytecode,
unless ``fullgraph=True`` asked for an error.

https://github.com/pytorch/pytorch/issues/128071
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.decorator import bucketed
from torchguard.defects.catalog import Defect

if TYPE_CHECKING:
    from collections.abc import Callable

_LENGTHS = range(2, 18)


def _double(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def _is_other_message(record: logging.LogRecord) -> bool:
    return "torch._dynamo hit config." not in record.getMessage()


def _run(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> str | None:
    """Call a wrapped function with 16 lengths and count those that reach the backend."""
    compiled_calls = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            nonlocal compiled_calls
            compiled_calls += 1
            return graph.forward(*inputs)

        return run

    double = wrap(backend)
    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.addFilter(_is_other_message)  # the one line torch says about it is expected here
    try:
        for length in _LENGTHS:
            double(torch.ones(length))
    finally:
        logger.removeFilter(_is_other_message)
    if compiled_calls == len(_LENGTHS):
        return None
    eager_calls = len(_LENGTHS) - compiled_calls
    return f"{eager_calls} of {len(_LENGTHS)} lengths ran eager, with no exception"


def probe() -> str | None:
    """Compile one variant per length."""
    return _run(lambda backend: torch.compile(_double, backend=backend, dynamic=False))


def guarded_probe() -> str | None:
    """Give every length a bucket of its own."""

    def wrap(backend: Callable[..., Any]) -> Callable[..., Any]:
        wrapped: Callable[..., Any] = bucketed(
            _double,
            dims={"values": {0: "t"}},
            buckets=Buckets(_LENGTHS),
            compile={"backend": backend},
        )
        return wrapped

    return _run(wrap)


DEFECT = Defect(
    id="recompile-limit",
    summary="past 8 variants of a compiled function every new one runs eager, with one log line",
    upstream=("https://github.com/pytorch/pytorch/issues/128071",),
    family="compile",
    probe=probe,
    guards=("bucketed",),
    guarded_probe=guarded_probe,
)
