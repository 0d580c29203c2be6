"""Static sizes for functions whose inputs vary: pad to a bucket, run, cut back to size."""

from torchguard.bucketed.no_compiling import no_recompile
from torchguard.bucketed.statistics import Report, Statistics
from torchguard.bucketed.wrapping import bucketed

__all__ = ["Report", "Statistics", "bucketed", "no_recompile"]
