"""``mode="reduce-overhead"`` records a CUDA graph for every input size it meets.

A CUDA graph replays fixed addresses and sizes, so ``deferred_cudagraphify``
(``torch/_inductor/cudagraph_trees.py``) keeps one per combination of symbolic sizes,
without a limit. With batches padded to their longest sequence nearly every step is a
warm-up or a recording, slower than no CUDA graph at all, and each recording keeps its
memory. Torch warns at the ninth size (up to 2.9 at the fifty-first) and goes on.

https://github.com/pytorch/pytorch/issues/188150
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.decorator import bucketed
from torchguard.defects.catalog import Defect, NotRunHere

_LENGTHS = range(16, 25)


def _model(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + 1


def _recorded() -> int:
    from torch._dynamo.utils import counters  # noqa: PLC0415  importing it imports the compiler

    # Rises by the number of inputs with every graph that is recorded; nothing public tells.
    return counters["inductor"]["cudagraph_recorded_non_static_inputs"]


def _count_recordings(device: str, run: Callable[[torch.Tensor], object]) -> int:
    """Call a compiled model with each length; return for how many a CUDA graph was recorded."""
    recordings = 0
    for length in _LENGTHS:
        x = torch.ones(length, 4, device=device)
        before = _recorded()
        for _ in range(2):  # the first call with a new size warms up, the second records
            torch.compiler.cudagraph_mark_step_begin()
            run(x)
        recordings += _recorded() > before
    return recordings


def _told(run: Callable[[torch.Tensor], object]) -> str | None:
    if not torch.cuda.is_available():
        raise NotRunHere("needs a CUDA GPU")
    recordings = _count_recordings("cuda", run)
    if recordings == 0:
        raise NotRunHere("torch records no CUDA graph here")
    if recordings < len(_LENGTHS):
        return None
    return f"{len(_LENGTHS)} input lengths: {recordings} CUDA graphs recorded"


def probe() -> str | None:
    """Count the CUDA graphs recorded for one model and nine lengths."""
    compiled = torch.compile(_model, mode="reduce-overhead")

    def run(x: torch.Tensor) -> None:
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x)

    return _told(run)


def guarded_probe() -> str | None:
    """Count those for nine lengths in two buckets."""
    buckets = Buckets([_LENGTHS[0], _LENGTHS[-1]])
    mode = {"mode": "reduce-overhead"}
    return _told(bucketed(_model, dims={"x": {0: "t"}}, buckets=buckets, compile=mode))


DEFECT = Defect(
    id="cudagraph-shapes",
    summary='mode="reduce-overhead", GPU: one CUDA graph recorded for every input size',
    upstream=("https://github.com/pytorch/pytorch/issues/188150",),
    family="compile",
    probe=probe,
    guards=("bucketed",),
    guarded_probe=guarded_probe,
)
