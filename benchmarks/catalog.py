"""Every benchmark, in the order in which the page tells of them.

A new one is a file ``bench_NAME.py`` with its ``BENCHMARK``, whose ``tables`` say how its results
are shown, and its name in this list.
"""

from __future__ import annotations

import importlib

from benchmarks.program import Benchmark

_NAMES = (
    "end_to_end", "resize", "transaction", "verified", "buckets", "sampler", "pairs", "assign",
    "recompute", "checkpoint", "import",
)  # fmt: skip

BENCHMARKS: dict[str, Benchmark] = {
    name: importlib.import_module(f"benchmarks.bench_{name}").BENCHMARK for name in _NAMES
}
"""By name; ``python -m benchmarks run NAME``."""
