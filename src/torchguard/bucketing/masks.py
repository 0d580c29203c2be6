"""Masks and positions for padded batches.

Shapes: B sequences in a batch, S the size they are padded to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchguard.bucketing.padding import Side

__all__ = ["attention_mask", "length_mask", "position_ids"]


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
    starts, ends = _edges(lengths, size, side, device, "length_mask")
    positions = torch.arange(size, device=ends.device)
    return positions < ends if starts is None else positions >= starts


def attention_mask(
    lengths: torch.Tensor | Sequence[int],
    size: int,
    *,
    causal: bool = False,
    side: Side = "right",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return a bool mask (B, 1, S, S) for ``scaled_dot_product_attention``.

    True where a query may look at a key: the key is real and, with ``causal``, not after the
    query. Every query may look at itself, padding too: a row of nothing but False makes
    NaN, which spreads through the gradients.

    Args:
        lengths: (B,) integers, 0 to ``size``.
        size: what the sequences are padded to.
        causal: keep queries from looking ahead.
        side: where the padding is.
        device: of the mask; a tensor's own when left out.

    Raises:
        TypeError, ValueError: as :func:`length_mask`.
    """
    keys = length_mask(lengths, size, side=side, device=device)[:, None, None, :]
    itself = torch.eye(size, dtype=torch.bool, device=keys.device)
    if causal:
        keys = keys & torch.ones_like(itself).tril()
    return keys | itself


def position_ids(
    lengths: torch.Tensor | Sequence[int],
    size: int,
    *,
    side: Side = "right",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the positions (B, S): 0, 1, 2, ... from each sequence's first real element.

    Padding on the left has position 0; on the right it goes on counting.

    Args:
        lengths: (B,) integers, 0 to ``size``.
        size: what the sequences are padded to.
        side: where the padding is.
        device: of the result; a tensor's own when left out.

    Raises:
        TypeError, ValueError: as :func:`length_mask`.
    """
    starts, ends = _edges(lengths, size, side, device, "position_ids")
    positions = torch.arange(size, device=ends.device)
    if starts is None:
        return positions.expand(ends.shape[0], size)
    return (positions - starts).clamp_(min=0)


def _edges(
    lengths: torch.Tensor | Sequence[int],
    size: int,
    side: Side,
    device: torch.device | str | None,
    operation: str,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Where the real parts begin, None for 0, and end: (B, 1) each."""
    if side not in {"left", "right"}:
        raise ValueError(f"{operation}: side is {side!r}, expected 'right' or 'left'")
    if isinstance(lengths, torch.Tensor):
        ends = lengths if device is None else lengths.to(device)
    else:
        for position, length in enumerate(lengths):
            if isinstance(length, bool) or not isinstance(length, int):
                raise TypeError(
                    f"{operation}: lengths[{position}] is {length!r}, expected an integer"
                )
            if not 0 <= length <= size:
                raise ValueError(
                    f"{operation}: lengths[{position}] is {length}, expected 0 to {size}"
                )
        ends = torch.tensor(lengths, dtype=torch.int64, device=device)
    if ends.dtype.is_floating_point or ends.dtype.is_complex or ends.dtype == torch.bool:
        raise TypeError(f"{operation}: lengths has dtype {ends.dtype}, expected integers")
    if ends.dim() != 1:
        raise ValueError(f"{operation}: lengths has shape {tuple(ends.shape)}, expected (B,)")
    ends = ends[:, None]
    return (size - ends, ends) if side == "left" else (None, ends)
