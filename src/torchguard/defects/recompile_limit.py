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

from torchguard.defects.catalog import Defect

if TYPE_CHECKING:
    from collections.abc import Callable

_LENGTHS = range(2, 18)


def _double(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def _is_other_message(record: logging.LogRecord) -> bool:
    return "torch._dynamo hit config." not in record.getMessage()


def probe() -> str | None:
    """Run 16 lengths and count those that reach the backend."""
    compiled_calls = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            nonlocal compiled_calls
            compiled_calls += 1
            return graph.forward(*inputs)

        return run

    double = torch.compile(_double, backend=backend, dynamic=False)
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


DEFECT = Defect(
    id="recompile-limit",
    summary="past 8 variants of a compiled function every new one runs eager, with one log line",
    upstream=("https://github.com/pytorch/pytorch/issues/128071",),
    family="compile",
    probe=probe,
    planned="bucketed",
    advice=(
        "Compile with fullgraph=True, which raises at the limit, or with dynamic=True, "
        "which needs one graph for all sizes."
    ),
)
