"""pad_to_bucket and unpad: give a tensor one of a few sizes, and take it back; length_mask.

Shapes: L the length that is there, S the bucket's size, S - L what is missing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from torchguard._public import public
from torchguard.bucketing.buckets import Buckets, as_buckets

Side: TypeAlias = Literal["left", "right"]
Fill: TypeAlias = (
    complex
    | Literal["repeat-last", "arange"]
    | Callable[[torch.Tensor, int], "torch.Tensor | complex"]
)
"""What padding holds: a number, a rule, or a function of the tensor and the missing length."""

# From here on writing each byte once (cat) beats one operator less (constant_pad_nd writes the
# real part twice). Measured by benchmarks/bench_padding.py.
_CAT_FROM_BYTES = 1 << 19
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# cat of more dimensions is one kernel per input on a GPU (CAT_ARRAY_MAX_INPUT_DIMS).
# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Shape.cu
_CAT_DIMENSIONS = 4


@public
class Padded(NamedTuple):
    """A tensor at its bucket's size, and how much of it is real."""

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
    out: torch.Tensor | None = None,
) -> Padded:
    """Pad one dimension to the smallest bucket that holds it.

    Equals ``torch.nn.functional.pad`` by the missing length, for a number, with one kernel
    and in the same memory format (pinned memory stays pinned). A tensor that fits its bucket
    exactly is returned itself, without a copy. Gradients reach ``x`` from its own part only.

    Args:
        x: a tensor of any dtype and device with at least one dimension.
        dim: the dimension to pad; negative counts from the end.
        buckets: the ladder, its sizes in a list, or the one size to pad to.
        value: what the padding holds. A number that the dtype can hold; ``"repeat-last"``, the
            element next to the padding; ``"arange"``, each position's index along ``dim``,
            so that position numbers continue; or a function of ``x`` and the missing length, which
            returns a number or a tensor that broadcasts to the padding's shape.
        side: where the padding goes, ``"right"`` of the data or ``"left"``.
        out: a buffer of the padded shape to write into, all of it, and to return even when
            ``x`` fits exactly. It takes part in no gradient, so neither may ``x``.

    Returns:
        ``Padded(tensor, length)``.

    Raises:
        TypeError: ``x`` is not a tensor, or ``value`` does not fit its dtype.
        IndexError: ``x`` has no such dimension.
        ValueError: no bucket holds it, nothing to repeat, a buffer of another shape.

    Example:
        >>> import torch
        >>> from torchguard import Buckets, pad_to_bucket
        >>> pad_to_bucket(torch.tensor([7, 8, 9]), 0, Buckets([4, 8]), value=-100)
        Padded(tensor=tensor([   7,    8,    9, -100]), length=3)
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"pad_to_bucket: x is of type {type(x).__name__}, expected a torch.Tensor")
    dim = _dimension(x, dim, "pad_to_bucket")
    length = x.shape[dim]
    size = _size(length, dim, buckets)
    missing = size - length
    if side != "right" and side != "left":  # noqa: PLR1714 - a set would be built at each call
        raise ValueError(f"pad_to_bucket: side is {side!r}, expected 'right' or 'left'")
    if out is not None:
        _check_buffer(x, dim, size, out)
    elif not missing:
        return Padded(x, length)
    if isinstance(value, np.generic):
        value = value.item()
    if missing and isinstance(value, (int, float, complex)):
        check_number(value, x.dtype)
        if out is None and _one_operator_is_best(x):
            # (0, 0) for each later dimension, then this one's left and right.
            own = (missing, 0) if side == "left" else (0, missing)
            pads = (0, 0) * (x.dim() - 1 - dim) + own
            return Padded(torch.constant_pad_nd(x, pads, value), length)
    padding = _padding(x, dim, missing, value, side)
    return Padded(_join(x, padding, dim, side, out), length)


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
    """
    dim = _dimension(x, dim, "unpad")
    size = x.shape[dim]
    if not 0 <= length <= size:
        raise ValueError(
            f"unpad: length is {length}, but x of shape {tuple(x.shape)} has {size} in dim {dim}"
        )
    if side not in {"left", "right"}:
        raise ValueError(f"unpad: side is {side!r}, expected 'right' or 'left'")
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
    ends = real.long()[:, None]  # the difference may not fit a smaller dtype
    return positions < ends if side == "right" else positions >= size - ends


def _dimension(x: torch.Tensor, dim: int, operation: str) -> int:
    dimensions = x.dim()
    if not -dimensions <= dim < dimensions:
        raise IndexError(
            f"{operation}: dim is {dim}, but x of shape {tuple(x.shape)} has {dimensions} "
            "dimensions"
        )
    return dim % dimensions


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
    return as_buckets(buckets, "pad_to_bucket: buckets", " or one size").bucket_for(length)


def _check_buffer(x: torch.Tensor, dim: int, size: int, out: torch.Tensor) -> None:
    wanted = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    if tuple(out.shape) != wanted or out.dtype != x.dtype or out.device != x.device:
        raise ValueError(
            f"pad_to_bucket: out is {tuple(out.shape)} {out.dtype} on {out.device}, expected "
            f"{wanted} {x.dtype} on {x.device}"
        )
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError(
            "pad_to_bucket: a buffer carries no gradient; leave out away, or call it under "
            "torch.no_grad()"
        )


def check_number(value: complex, dtype: torch.dtype) -> None:
    """Raise unless the dtype holds the number."""
    fits = _fits if is_dynamo_compiling() else _fits_cached
    if value != 0 and not fits(value, dtype):
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


_fits_cached = functools.lru_cache(maxsize=1024, typed=True)(_fits)


def _one_operator_is_best(x: torch.Tensor) -> bool:
    """Whether to leave the padding to ``constant_pad_nd`` altogether.

    It takes every kind of tensor. On a GPU it is two kernels, a fill of everything and a
    copy, and cat is one; on a CPU cat wins once the tensor is large.
    """
    # A subclass has its own padding, and may not be joined to an ordinary tensor.
    if is_dynamo_compiling() or type(x) not in _PLAIN or x.layout is not torch.strided:
        return True
    if x.is_cpu:
        return x.nbytes < _CAT_FROM_BYTES and not _is_pinned(x)
    return x.dim() > _CAT_DIMENSIONS


def _is_pinned(x: torch.Tensor) -> bool:
    if is_dynamo_compiling():
        return False
    try:
        return x.is_pinned()
    except RuntimeError:  # torch.func has no rule for the question
        return False


def _padding(x: torch.Tensor, dim: int, missing: int, value: Fill, side: Side) -> torch.Tensor:
    """Return what to join to ``x``: a view wherever there is something to view."""
    shape = (*x.shape[:dim], missing, *x.shape[dim + 1 :])
    if not missing:
        return x.new_empty(shape)
    if callable(value):
        with torch.no_grad():
            made = value(x.detach(), missing)
        made = made.item() if isinstance(made, np.generic) else made
        if not isinstance(made, (int, float, complex)):
            return _broadcast(made, x, shape)
        check_number(made, x.dtype)
        value = made
    if isinstance(value, (int, float, complex)):
        return _constant(value, x).expand(shape)
    if value == "repeat-last":
        if not x.shape[dim]:
            raise ValueError(
                f"pad_to_bucket: value='repeat-last', but x of shape {tuple(x.shape)} has nothing "
                f"to repeat in dim {dim}"
            )
        last = 0 if side == "left" else x.shape[dim] - 1
        return x.detach().narrow(dim, last, 1).expand(shape)
    if value == "arange":
        if x.dtype.is_complex or x.dtype == torch.bool:
            raise TypeError(f"pad_to_bucket: value='arange' does not fit {x.dtype}")
        start = 0 if side == "left" else x.shape[dim]
        last = start + missing - 1
        if not _fits(last, x.dtype):  # torch would wrap around silently
            raise TypeError(f"pad_to_bucket: value='arange' reaches {last}, too much for {x.dtype}")
        numbers = _numbers(start, start + missing, x)
        return numbers.view(-1, *[1] * (x.dim() - 1 - dim)).expand(shape)
    raise TypeError(
        f"pad_to_bucket: value is {value!r}, expected a number, 'repeat-last', 'arange' or a "
        "function"
    )


def _broadcast(made: Any, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Give what a function returned the padding's shape."""
    returned = "pad_to_bucket: value returned"
    if not isinstance(made, torch.Tensor):
        raise TypeError(
            f"{returned} an object of type {type(made).__name__}, expected a tensor or a number"
        )
    if made.dtype != x.dtype or made.device != x.device:
        raise TypeError(
            f"{returned} {made.dtype} on {made.device}, expected {x.dtype} on {x.device}"
        )
    try:
        return made.detach().expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{returned} shape {tuple(made.shape)}, which does not broadcast to the padding's, "
            f"{shape}"
        ) from None


# Cached, so that the next call launches no kernel to make them: numbers, and 0, 1, 2, ... up to
# powers of two.
_cache: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
_MOST_CACHED = 256


def _constant(value: complex, x: torch.Tensor) -> torch.Tensor:
    """Return a 0-d tensor of ``x``'s dtype and device."""
    if not _may_cache(x):
        return torch.full((), value, dtype=x.dtype, device=x.device)
    return _cached(repr(value), lambda: torch.tensor(value, dtype=x.dtype), x)


def _numbers(start: int, stop: int, x: torch.Tensor) -> torch.Tensor:
    """Return ``torch.arange(start, stop)`` of ``x``'s dtype and device."""
    # Counted as integers: arange itself has no kernel for uint16 and the like.
    if not _may_cache(x):
        return torch.arange(start, stop, device=x.device).to(x.dtype)
    # A power of two, so that a growing length does not make new ones at every call.
    count = 1 << (stop - 1).bit_length()
    return _cached(f"to {count}", lambda: torch.arange(count), x)[start:stop]


def _cached(name: str, make: Callable[[], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    key = (name, x.dtype, x.device)
    cached = _cache.get(key)
    if cached is None:
        with torch.inference_mode(False):
            # Copied from the host, and so there before any stream can read it.
            cached = make().to(x.device, x.dtype)
        if type(cached) is torch.Tensor:  # and not a fake one, made while something else is traced
            if len(_cache) >= _MOST_CACHED:
                _cache.clear()
            _cache[key] = cached
    return cached


def _may_cache(x: torch.Tensor) -> bool:
    """Whether what is joined to ``x`` may be cached for later, and taken from what was cached."""
    # What a CUDA graph makes lives in its pool and is gone with it; what is made in a trace is
    # part of the trace; and a tensor subclass, such as a fake tensor, needs one of its own.
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return not is_dynamo_compiling() and not capturing and type(x) in _PLAIN


def _join(
    x: torch.Tensor, padding: torch.Tensor, dim: int, side: Side, out: torch.Tensor | None
) -> torch.Tensor:
    """Join in one kernel, into ``x``'s kind of memory."""
    both = (padding, x) if side == "left" else (x, padding)
    memory_format: torch.memory_format = torch.contiguous_format
    order: tuple[int, ...] = ()
    if x.dim() in _CHANNELS_LAST and not x.is_contiguous():
        channels_last, its_order = _CHANNELS_LAST[x.dim()]
        if x.is_contiguous(memory_format=channels_last):
            memory_format, order = channels_last, its_order
    if out is None and _is_pinned(x) and not (torch.is_grad_enabled() and x.requires_grad):
        shape = (*x.shape[:dim], x.shape[dim] + padding.shape[dim], *x.shape[dim + 1 :])
        out = torch.empty(shape, dtype=x.dtype, memory_format=memory_format, pin_memory=True)
    if out is not None or not order:
        return torch.cat(both, dim, out=out)
    # With its dimensions in the order of its memory a tensor is contiguous, and cat keeps that.
    joined = torch.cat([each.permute(order) for each in both], order.index(dim))
    return joined.permute([order.index(each) for each in range(x.dim())])


# The dimensions in the order of memory where channels come last.
_CHANNELS_LAST = {
    4: (torch.channels_last, (0, 2, 3, 1)),
    5: (torch.channels_last_3d, (0, 2, 3, 4, 1)),
}
