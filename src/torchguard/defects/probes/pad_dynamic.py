"""Padding a dynamic dim to a multiple (``-n % 16``) reads and writes out of bounds.

Torch bounds every symbolic size. Up to 2.9 it bounded Python's ``%`` with C's rule
(``torch/utils/_sympy/interp.py``: ``PythonMod: "mod",  # TODO: this is wrong``), so it took
``-n % 16`` to lie in [-15, 0], where it lies in [0, 15], and the padded size to be no more
than ``n``. Inductor then leaves out the test for the end of the input, reading whatever
lies behind (2.6), or carries out the padding in place, in a buffer that is too small (2.8
and 2.9). The report, made on a GPU, has the autotuner fail on a kernel that updates one
buffer in place and takes the size: what 2.9 generates for this program, CPU or GPU.

https://github.com/pytorch/pytorch/issues/169760
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from torchguard.bucketing.buckets import Buckets
from torchguard.bucketing.decorator import bucketed
from torchguard.defects.catalog import Defect

# T time, padded from 3 to 4; F features: 2 in, 1 out. So little that what is written behind
# the 12 bytes of the last tensor stays in the space that malloc leaves there.


def _pad(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad ``x`` (T, F), and a product of it, to an even T."""
    missing = -x.shape[0] % 2
    padding = (0, 0, 0, missing)
    return functional.pad(x, padding), functional.pad(torch.relu(x @ weight), padding)


def _compare(run: Callable[[torch.Tensor, torch.Tensor], Any]) -> str | None:
    """Compare on the CPU, and on a GPU where there is one: inductor writes other code for it."""
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        seen = _compare_on(device, run)
        if seen is not None:
            return seen if device == "cpu" else f"on the GPU: {seen}"
    return None


def _compare_on(device: str, run: Callable[[torch.Tensor, torch.Tensor], Any]) -> str | None:
    """Compare the padding with eager, and the result's size with that of its memory."""
    memory = torch.ones(4, 2, device=device)
    x, weight = memory[:3], torch.ones(2, 1, device=device)
    eager, _ = _pad(x, weight)
    padded, product = run(x, weight)
    if not torch.equal(padded, eager):
        return "F.pad(x, (0, 0, 0, -n % 2)) filled in what lies behind x in memory"
    if product.untyped_storage().nbytes() < product.numel() * product.element_size():
        return "F.pad(y, (0, 0, 0, -n % 2)) wrote behind the end of the memory of y"
    return None


def probe() -> str | None:
    """Compile with a dim that is marked dynamic."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> Any:
        torch._dynamo.mark_dynamic(x, 0)
        return torch.compile(_pad)(x, weight)

    return _compare(run)


def guarded_probe() -> str | None:
    """Keep the dim static."""
    # The program pads with zeros too, so what is behind x has to be zeros.
    zeros = {"x": 0}
    pad = bucketed(_pad, dims={"x": {0: "t"}}, buckets=Buckets([4, 8]), fill=zeros, compile=True)
    return _compare(pad)


DEFECT = Defect(
    id="pad-dynamic",
    summary="compiled: padding a dynamic dim by -n % 16 reads or writes out of bounds",
    upstream=("https://github.com/pytorch/pytorch/issues/169760",),
    family="compile",
    probe=probe,
    guards=("bucketed",),
    guarded_probe=guarded_probe,
)
