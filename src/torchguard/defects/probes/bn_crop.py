"""BatchNorm, flatten and a cropping ``F.pad`` return uninitialised memory, compiled.

In the flattened loop a per-channel value is read at ``i // pixels``. Inductor's C++
backend splits such a loop into ``size // pixels`` blocks of ``pixels`` elements
(``CppScheduling.try_loop_split``) and drops the remainder, which a crop within a channel
leaves: those elements of the result are never written. Slicing does it as well as the
negative pad, and any other per-channel value as well as BatchNorm's.

https://github.com/pytorch/pytorch/issues/195582
"""

from __future__ import annotations

import torch
from torch.nn import functional

from torchguard.defects.catalog import Defect

# N images, C channels, P pixels
_N, _C, _P = 2, 4, 9
_KEEP = 20  # two channels, and 2 pixels of the third


def probe() -> str | None:
    """Compare the compiled crop with the eager one."""
    norm = torch.nn.BatchNorm1d(_C).eval().requires_grad_(requires_grad=False)

    def crop(images: torch.Tensor) -> torch.Tensor:  # (N, C, P) -> (N, KEEP)
        return functional.pad(norm(images).flatten(1), (0, _KEEP - _C * _P))

    images = torch.randn(_N, _C, _P, generator=torch.Generator().manual_seed(0))
    # Compiled first: no memory that eager has freed can hold the right values by chance.
    compiled = torch.compile(crop)(images)
    wrong = ~torch.isclose(compiled, crop(images))
    if not wrong.any():
        return None
    return f"{int(wrong.sum())} of {wrong.numel()} elements are uninitialised memory"


DEFECT = Defect(
    id="bn-crop",
    summary="compiled on CPU: BatchNorm, flatten and a cropping F.pad leave memory unwritten",
    upstream=("https://github.com/pytorch/pytorch/issues/195582",),
    family="compile",
    probe=probe,
    guards=("verify",),
    advice="Crop outside the compiled function, or to a whole number of channels.",
)
