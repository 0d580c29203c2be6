"""pad_to_bucket and unpad: give a tensor one of a few sizes, and take it back; length_mask.

Shapes: L the length that is there, S the bucket's size, S - L what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from torchguard._public import public
from torchguard.bucketing.buckets import Buckets, as_buckets

Side: TypeAlias = Literal["left", "right"]
Fill: TypeAlias = complex | Literal["repeat-last"]
"""What padding holds: a number, or the element next to it."""


@public
class Padded(NamedTuple):
    """A tensor at its bucket's size, and how much of it is real.

    Example:
        >>> import torch
        >>> from torchguard import pad_to_bucket
        >>> padded = pad_to_bucket(torch.tensor([7, 8, 9]), 0, [4, 8])
        >>> padded.tensor, padded.length
        (tensor([7, 8, 9, 0]), 3)
    """

    tensor: torch.Tensor
    length: int
    """The length of the real part, along the padded dimension."""


@public
def pad_to_bucket(
    x: torch.Tensor,
    dim: int,
    buckets: Buckets | Sequence[int] | int,
    *,
    value: Fill = 0,
    side: Side = "right",
) -> Padded:
    """Pad one dimension to the smallest bucket that holds it.

    Equals ``torch.nn.functional.pad`` by the missing length, for a number. A tensor that fits its
    bucket exactly is returned itself, without a copy. Gradients reach ``x`` from its own part only.

    Args:
        x: a tensor of any dtype and device with at least one dimension.
        dim: the dimension to pad; negative counts from the end.
        buckets: the ladder, its sizes in a list, or the one size to pad to.
        value: what the padding holds: a number that the dtype can hold, or ``"repeat-last"``, the
            element next to the padding.
        side: where the padding goes, ``"right"`` of the data or ``"left"``.

    Returns:
        ``Padded(tensor, length)``.

    Raises:
        TypeError: ``x`` is not a tensor, or ``value`` does not fit its dtype.
        IndexError: ``x`` has no such dimension.
        ValueError: no bucket holds it, or there is nothing to repeat.

    Cost:
        One copy, or nothing if the tensor fits its bucket exactly.

    Example:
        >>> import torch
        >>> from torchguard import Buckets, pad_to_bucket
        >>> pad_to_bucket(torch.tensor([7, 8, 9]), 0, Buckets([4, 8]), value=-100)
        Padded(tensor=tensor([   7,    8,    9, -100]), length=3)
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"pad_to_bucket: x is of type {type(x).__name__}, expected a torch.Tensor")
    if not hasattr(dim, "__index__"):
        raise TypeError(
            f"pad_to_bucket: dim is {dim!r}, expected a number: pad_to_bucket(x, dim, buckets)"
        )
    length, dim = x.size(dim), dim % max(x.dim(), 1)
    missing = _size(length, dim, buckets) - length
    _check_side(side, "pad_to_bucket")
    if not missing:
        return Padded(x, length)
    if isinstance(value, np.generic):
        value = value.item()
    repeats = isinstance(value, str) and value == "repeat-last"
    number: Any = 0 if repeats else value
    check_number(number, x.dtype)
    # (0, 0) for each later dimension, then this one's left and right.
    own = (missing, 0) if side == "left" else (0, missing)
    padded = torch.constant_pad_nd(x, (0, 0) * (x.dim() - 1 - dim) + own, number)
    if repeats:
        if not length:
            raise ValueError(
                f"pad_to_bucket: value='repeat-last', but x of shape {tuple(x.shape)} has nothing "
                f"to repeat in dim {dim}"
            )
        start, last = (0, 0) if side == "left" else (length, length - 1)
        padded.narrow(dim, start, missing).copy_(x.detach().narrow(dim, last, 1))
    return Padded(padded, length)


@public
def unpad(
    x: torch.Tensor,
    dim: int,
    length: int,
    side: Side = "right",
) -> torch.Tensor:
    """Return a view of the real part of a padded tensor.

    Equals ``x.narrow(dim, 0, length)`` for padding on the right, and
    ``x.narrow(dim, x.shape[dim] - length, length)`` for padding on the left.

    Args:
        x: a padded tensor, or what a model made of one.
        dim: the padded dimension; negative counts from the end.
        length: how much of it is real.
        side: where the padding is.

    Raises:
        IndexError: ``x`` has no such dimension.
        ValueError: there is less than ``length``, or ``side`` is another word.

    Cost:
        A view: nothing is copied.

    Example:
        >>> import torch
        >>> from torchguard import unpad
        >>> unpad(torch.tensor([7, 8, 9, 0]), 0, 3)
        tensor([7, 8, 9])
    """
    size = x.size(dim)
    if not 0 <= length <= size:
        raise ValueError(
            f"unpad: length is {length}, but x of shape {tuple(x.shape)} has {size} in dim {dim}"
        )
    _check_side(side, "unpad")
    return x.narrow(dim, 0 if side == "right" else size - length, length)


@public
def length_mask(
    lengths: torch.Tensor | Sequence[int],
    size: int,
    *,
    side: Side = "right",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return a bool mask (B, S) of B sequences padded to S, True where a sequence is real.

    Equals ``torch.arange(size) < lengths[:, None]`` for padding on the right.

    Args:
        lengths: (B,) integers, 0 to ``size``.
        size: what the sequences are padded to.
        side: where the padding is.
        device: of the mask; a tensor's own when left out.

    Raises:
        TypeError: ``lengths`` are no integers.
        ValueError: not 1-D, or another ``side``. Lengths in a list have to be 0 to ``size``;
            those in a tensor are not checked, because that would wait for the GPU.

    Cost:
        One comparison, on the device of the mask.

    Example:
        >>> from torchguard import length_mask
        >>> length_mask([1, 3], 3)
        tensor([[ True, False, False],
                [ True,  True,  True]])
    """
    _check_side(side, "length_mask")
    if isinstance(lengths, str) or not hasattr(lengths, "__len__"):
        raise TypeError(f"length_mask: lengths is {lengths!r}, expected a list or a tensor of them")
    if not isinstance(size, (int, torch.SymInt)):
        raise TypeError(f"length_mask: size is {size!r}, expected an integer")
    # torch.as_tensor([]) is float32.
    dtype = None if isinstance(lengths, torch.Tensor) or len(lengths) else torch.int64
    real = torch.as_tensor(lengths, device=device, dtype=dtype)
    if real.dtype.is_floating_point or real.dtype.is_complex or real.dtype == torch.bool:
        raise TypeError(f"length_mask: lengths has dtype {real.dtype}, expected integers")
    if real.dim() != 1:
        raise ValueError(f"length_mask: lengths has shape {tuple(real.shape)}, expected (B,)")
    listed = () if isinstance(lengths, torch.Tensor) else lengths
    if len(listed) and not 0 <= min(listed) <= max(listed) <= size:
        raise ValueError(f"length_mask: lengths is {lengths!r}, expected integers from 0 to {size}")
    # Compared where the lengths are: to read them would wait for the GPU.
    positions = torch.arange(size, device=real.device)
    ends = real.long()[:, None]  # the difference may not fit a smaller dtype
    return positions < ends if side == "right" else positions >= size - ends


def _size(length: int, dim: int, buckets: Any) -> int:
    if isinstance(buckets, int) and not isinstance(buckets, bool):
        if buckets < length:
            raise ValueError(f"pad_to_bucket: x has {length} in dim {dim}, more than {buckets}")
        return buckets
    if is_dynamo_compiling() and isinstance(buckets, (Buckets, list, tuple, range)):
        # bisect and numpy are C code, which Dynamo can't follow.
        ladder: Sequence[int] = buckets.sizes if isinstance(buckets, Buckets) else sorted(buckets)
        for size in ladder:
            if length <= size:
                return size
    given = as_buckets(buckets, "pad_to_bucket: buckets", " or one size")
    if length > given.sizes[-1]:
        raise ValueError(f"pad_to_bucket: x has {length} in dim {dim}, more than {given.sizes[-1]}")
    return given.bucket_for(length)


def _check_side(side: str, operation: str) -> None:
    if side != "right" and side != "left":  # noqa: PLR1714 - a set would be built at each call
        raise ValueError(f"{operation}: side is {side!r}, expected 'right' or 'left'")


def check_number(value: Any, dtype: torch.dtype) -> None:
    """Raise unless it is a number that the dtype holds."""
    if not isinstance(value, (int, float, complex)):
        raise TypeError(f"pad_to_bucket: value is {value!r}, expected a number or 'repeat-last'")
    if value != 0 and not _fits(value, dtype):
        raise TypeError(f"pad_to_bucket: value={value!r} does not fit {dtype}")


def _fits(value: complex, dtype: torch.dtype) -> bool:
    """Whether the dtype holds the number, up to rounding; torch itself would truncate silently."""
    if isinstance(value, complex):
        return dtype.is_complex
    if dtype == torch.bool:
        return value in {0, 1}
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if not float(value).is_integer():
        return False
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max
