"""Masks for padded batches.

Shapes: B sequences in a batch, S the size they are padded to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchguard._public import public
from torchguard.bucketing.padding import Side


@public
def length_mask(
    lengths: torch.Tensor | Sequence[int],
    size: int,
    *,
    side: Side = "right",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return a bool mask (B, S), True where a sequence is real.

    Equals ``torch.arange(size) < lengths[:, None]`` for padding on the right.

    Args:
        lengths: (B,) integers, 0 to ``size``.
        size: what the sequences are padded to.
        side: where the padding is.
        device: of the mask; a tensor's own when left out.

    Raises:
        TypeError: ``lengths`` are no integers.
        ValueError: not 1-D. Lengths in a list are checked to be 0 to ``size``; those in a
            tensor are not, because that would wait for the GPU.
    """
    if side not in {"left", "right"}:
        raise ValueError(f"length_mask: side is {side!r}, expected 'right' or 'left'")
    if isinstance(lengths, torch.Tensor):
        real = lengths if device is None else lengths.to(device)
    else:
        for position, length in enumerate(lengths):
            if isinstance(length, bool) or not isinstance(length, int):
                raise TypeError(
                    f"length_mask: lengths[{position}] is {length!r}, expected an integer"
                )
            if not 0 <= length <= size:
                raise ValueError(
                    f"length_mask: lengths[{position}] is {length}, expected 0 to {size}"
                )
        real = torch.tensor(lengths, dtype=torch.int64, device=device)
    if real.dtype.is_floating_point or real.dtype.is_complex or real.dtype == torch.bool:
        raise TypeError(f"length_mask: lengths has dtype {real.dtype}, expected integers")
    if real.dim() != 1:
        raise ValueError(f"length_mask: lengths has shape {tuple(real.shape)}, expected (B,)")
    # Compared where the lengths are: to read them would wait for the GPU.
    positions = torch.arange(size, device=real.device)
    return positions < real[:, None] if side == "right" else positions >= size - real[:, None]
