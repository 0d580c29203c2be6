"""Static sizes for functions whose inputs vary: pad to a bucket, run, cut back to size."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchguard.bucketing.decorator.api import bucketed
from torchguard.bucketing.decorator.no_compiling import no_recompile

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.stats import Report, Statistics

__all__ = ["Report", "Statistics", "bucketed", "no_recompile"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.stats"), name)
