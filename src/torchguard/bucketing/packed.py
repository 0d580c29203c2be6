"""packed(): the options of bucketed() for sequences one behind the other, with cu_seqlens.

Shapes: T tokens of all sequences together, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch

from torchguard._public import public
from torchguard.bucketing.buckets import Buckets, as_buckets
from torchguard.bucketing.pairs import PairBuckets, in_order

_TOKENS, _OFFSETS = "tokens", "cu_seqlens"


class PackedOptions(TypedDict):
    """What :func:`packed` makes: options of :func:`bucketed`."""

    dims: dict[str, dict[int, str]]
    buckets: Any
    fill: dict[str, Any]


@public
def packed(
    inputs: Mapping[str, int] | Sequence[str],
    *,
    tokens: Buckets | PairBuckets | Sequence[int],
    sequences: Buckets | Sequence[int] | None = None,
    cu_seqlens: str | Sequence[str] = "cu_seqlens",
    positions: str = "position_ids",
    fill: Mapping[str, Any] | None = None,
) -> PackedOptions:
    """Return the options of :func:`bucketed` for a packed batch: ``bucketed(f, **packed(...))``.

    Equals ``dims={input: {dim: "tokens"}, "cu_seqlens": {0: "cu_seqlens"}}`` with the buckets of
    both, and the fill values below. Padding belongs to no sequence: ``cu_seqlens`` repeats its
    last entry, T, so it names empty sequences at the end, and the tokens behind are in none. With
    ``torch.searchsorted(cu_seqlens, torch.arange(T), right=True)`` as the number of a token's
    sequence they have one of their own, above all others: no real token attends to them, and they
    attend to each other, so no row of a softmax is empty. That is checked, as all padding is.

    Args:
        inputs: the arguments with an entry per token, and which of their dims that is:
            ``{"input_ids": 1, "labels": 1}``; a list where it is dim 0.
        tokens: buckets for T. :class:`PairBuckets` of (T, N) for tokens and sequences together.
        sequences: buckets for N; left out, ``cu_seqlens`` is no argument.
        cu_seqlens: the argument of shape (N + 1,) that holds 0 and the end of each sequence, or
            several such.
        positions: the one of ``inputs`` that holds each token's position in its sequence. In the
            padding it begins at 0 again, and stays within the positions that are there.
        fill: what padding holds in others of ``inputs``, such as ``{"labels": -100}``.

    Returns:
        A dict with ``dims``, ``buckets`` and ``fill``. In buckets and statistics the axis
        ``"cu_seqlens"`` has the size N + 1.

    Raises:
        TypeError: no buckets, or ``sequences`` besides pairs.
        ValueError: a fill for something that is not in ``inputs``.

    Example:
        >>> from torchguard import packed
        >>> packed(["ids"], tokens=[512, 1024], sequences=[8])["buckets"]
        {('tokens',): Buckets([512, 1024]), ('cu_seqlens',): Buckets([9])}
    """
    by_dim = dict(inputs) if isinstance(inputs, Mapping) else dict.fromkeys(inputs, 0)
    unknown = [name for name in fill or () if name not in by_dim]
    if unknown:
        raise ValueError(
            f"packed: fill names {unknown[0]!r}, but inputs are {', '.join(by_dim) or 'none'}"
        )
    dims = {name: {dim: _TOKENS} for name, dim in by_dim.items()}
    buckets: dict[tuple[str, ...], Buckets | PairBuckets]
    if isinstance(tokens, PairBuckets):
        if sequences is not None:
            raise TypeError("packed: tokens are pairs (tokens, sequences): leave sequences out")
        buckets = {(_TOKENS, _OFFSETS): in_order((total, count + 1) for total, count in tokens)}
    else:
        buckets = {(_TOKENS,): as_buckets(tokens, "packed: tokens", " or PairBuckets")}
        if sequences is not None:
            counts = as_buckets(sequences, "packed: sequences")
            # N sequences have N + 1 offsets: 0 and the end of each.
            buckets[(_OFFSETS,)] = Buckets(count + 1 for count in counts)
    fills: dict[str, Any] = {positions: _restarted} if positions in by_dim else {}
    if len(buckets) > 1 or isinstance(tokens, PairBuckets):
        for name in [cu_seqlens] if isinstance(cu_seqlens, str) else cu_seqlens:
            dims[name] = {0: _OFFSETS}
            fills[name] = "repeat-last"
    return {"dims": dims, "buckets": buckets, "fill": {**fills, **(fill or {})}}


def _restarted(positions: torch.Tensor, missing: int) -> torch.Tensor:
    """Return positions for the padding: from 0 on, and again where the longest sequence ends."""
    # Counting on from T would index past a table of positions, which on a GPU ends the process.
    longest = positions.amax() + 1 if positions.numel() else 1
    counted = torch.arange(missing, device=positions.device)
    return (counted % longest).to(positions.dtype)
