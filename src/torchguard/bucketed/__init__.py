"""Static sizes for functions whose inputs vary: pad to a bucket, run, cut back to size."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchguard.bucketed.no_compiling import no_recompile
from torchguard.bucketed.wrapping import bucketed

if TYPE_CHECKING:
    from torchguard.bucketed.statistics import Report, Statistics

__all__ = ["Report", "Statistics", "bucketed", "no_recompile"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.statistics"), name)
