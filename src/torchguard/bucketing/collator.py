"""BucketCollator: batches leave the DataLoader's workers at their bucket's size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from torchguard._public import public
from torchguard._pytree import KeyPath, flatten, key_paths, keystr, replace
from torchguard.bucketing.buckets import Buckets, buckets_by_axis
from torchguard.bucketing.dims import (
    Axes,
    axes_in,
    declared_dims,
    leaves_of,
    lengths_by_axis,
    part_of,
)
from torchguard.bucketing.padding import Side, length_mask, pad_to_bucket

_NAME = "BucketCollator"

Dims: TypeAlias = Any
"""The batch's own structure with, for each tensor to pad, ``{dim: axis}`` in its place."""


@public
class BucketCollator:
    """Make a batch of samples that differ in length, and pad it to its buckets.

    Equals ``torch.utils.data.default_collate``, or ``collate_fn``, if every named dimension
    has a bucket's size already. Samples of different length (tensors, numpy arrays, lists of
    numbers) are padded to the longest first; with a ``collate_fn`` of your own that is its work.
    It runs in the DataLoader's workers, and can be pickled if ``collate_fn`` can.

    Args:
        buckets: a ladder or a list of sizes for every axis, or ``{axis: ladder}``.
        dims: which dimensions of which tensors to pad, in the structure of the batch:
            ``{"ids": {1: "t"}, "audio": {"wave": {2: "s"}}}``, a tuple for a tuple, None for what
            to leave alone. Tensors that share an axis must be equally long.
        fill: what the padding holds, in the same structure: ``{"labels": -100}``; 0 elsewhere.
            As ``value`` of :func:`torchguard.pad_to_bucket`.
        collate_fn: makes the batch; the default of PyTorch if left out.
        side: where the padding goes.
        mask_key: put a bool mask (B, S), True where a sample is real, into the batch, a
            mapping, under this; with several axes ``{axis: key}``. Masks that the samples have
            themselves are named in ``dims`` like everything else.
        batch_sizes: ``{size: rows}`` of :class:`torchguard.BucketBatchSampler`: batches with fewer
            rows get rows of padding: samples of length 1 that hold ``fill``. Their mask is True at
            one position, because attention to nothing is NaN; that of an axis whose tensors all
            have a negative fill, as labels have, is False. ``fill`` has
            to say what they hold of tensors that ``dims`` does not name: ``{"label": -100}``. Of
            several axes with buckets of these sizes the longer one says how many rows there are:
            the sampler gets ``max(source, target)`` of each sample.

    Raises:
        TypeError: ``dims`` does not name dimensions of tensors.
        ValueError: an axis without a ladder; a mask besides a ``collate_fn``, which alone
            knows how long each sample was.

    Cost:
        The padding, in the workers of the loader.

    Example:
        >>> import torch
        >>> from torchguard import BucketCollator, Buckets
        >>> collate = BucketCollator(
        ...     Buckets([4, 8]), {"ids": {1: "t"}}, fill={"ids": -1}, mask_key="mask"
        ... )
        >>> collate([{"ids": torch.tensor([1, 2, 3])}, {"ids": torch.tensor([4, 5])}])
        {'ids': tensor([[ 1,  2,  3, -1],
                [ 4,  5, -1, -1]]), 'mask': tensor([[ True,  True,  True, False],
                [ True,  True, False, False]])}
    """

    def __init__(
        self,
        buckets: Buckets | Sequence[int] | Mapping[str, Any],
        dims: Dims,
        *,
        fill: Any = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        side: Side = "right",
        mask_key: str | Mapping[str, str] | None = None,
        batch_sizes: Mapping[int, int] | None = None,
    ) -> None:
        self._declared = declared_dims(dims, _NAME)
        axes = dict.fromkeys(axis for named in self._declared.values() for _, axis in named)
        if not axes:
            raise ValueError("BucketCollator: dims names no dimension to pad")
        if isinstance(buckets, Mapping):  # it may be a dict of more axes than these
            buckets = {axis: each for axis, each in buckets.items() if axis in axes}
        self._buckets = buckets_by_axis(tuple(axes), buckets, "BucketCollator")
        self._batch_sizes = _batch_sizes(batch_sizes, self._buckets)
        self._fills = {path: each for path, each in leaves_of(fill) if each is not None}
        if self._batch_sizes is None:
            # With rows of padding fill also names what dims does not: it is checked with the batch.
            for path in self._fills.keys() - self._declared:
                raise ValueError(
                    f"BucketCollator: {keystr('fill', path)} is given, which dims does not pad"
                )
        self._collate_fn = collate_fn
        self._side: Side = side
        self._mask_keys = _mask_keys(mask_key, axes)
        if self._mask_keys and collate_fn is not default_collate:
            raise ValueError(
                "BucketCollator: mask_key and collate_fn are both given: how long each sample was "
                "is known to collate_fn alone. Let it make the mask, and name that in dims"
            )

    def __call__(self, samples: list[Any]) -> Any:
        """Collate ``samples`` and pad the batch.

        Raises:
            KeyError, TypeError: the batch does not have the structure of ``dims``.
            ValueError: no bucket is large enough, or one axis has two lengths.
        """
        lengths: dict[str, list[int]] = {}
        if self._collate_fn is default_collate:
            if len(samples) == 0:
                raise ValueError("BucketCollator: samples is empty, expected at least one")
            samples, lengths = self._evened(samples)
        # A collate_fn of the user's own evens the samples out by itself: it alone knows how.
        try:
            collated = self._collate_fn(samples)
        except RuntimeError as error:
            named = [dim for axes in self._declared.values() for dim, _ in axes]
            if self._collate_fn is default_collate and 0 in named:
                text = "BucketCollator: dimension 0 in dims is the batch; that of a sample is 1"
                raise ValueError(text) from error
            raise
        batch, sizes = self._padded(collated)
        for axis, key in self._mask_keys.items():
            if axis not in lengths:
                raise ValueError(f"BucketCollator: no sample has axis {axis!r} to make a mask of")
            known = self._with_lengths_of_rows(lengths[axis], axis, batch, sizes)
            _put(batch, key, length_mask(known, sizes[axis], side=self._side))
        return batch

    def _with_lengths_of_rows(
        self, lengths: list[int], axis: str, batch: Any, sizes: Mapping[str, int]
    ) -> list[int]:
        """Return the lengths of samples and of rows of padding.

        Attention to nothing and the mean of nothing are NaN, and so are all gradients then: a row
        has one real position. But for a label of -100 ctc_loss would read outside of memory.
        """
        parts = list(self._parts(batch, "batch"))
        own = (part.fill for part in parts if any(name == axis for _, name in part.axes))
        row = [0] if all(isinstance(fill, (int, float)) and fill < 0 for fill in own) else [1]
        for part in parts:
            for dim, name in part.axes:
                if dim % part.value.dim() == 0:
                    more = row * (sizes[name] - len(lengths))
                    lengths = more + lengths if self._side == "left" else lengths + more
        if self._batch_sizes is not None:
            lengths = lengths + row * (self._rows(sizes, len(lengths)) - len(lengths))
        return lengths

    def _evened(self, samples: list[Any]) -> tuple[list[Any], dict[str, list[int]]]:
        """Pad each sample to the longest; also return how long they were, by axis."""
        parts = [self._parts_of_sample(sample, index) for index, sample in enumerate(samples)]
        lengths: dict[str, list[int]] = {}
        for index, inside in enumerate(parts):
            for axis, length in _lengths(inside).items():
                known = lengths.setdefault(axis, [])
                if len(known) != index:
                    raise ValueError(f"BucketCollator: samples[0] has no axis {axis!r}")
                known.append(length)
        longest = {axis: max(each) for axis, each in lengths.items()}
        for axis, ladder in self._buckets.items():
            if longest.get(axis, 0) > ladder.sizes[-1]:
                index = lengths[axis].index(longest[axis])
                raise ValueError(
                    f"BucketCollator: samples[{index}] is {longest[axis]} long in {axis!r}, but "
                    f"the largest bucket is {ladder.sizes[-1]}: cut or leave out longer samples, "
                    "or add a bucket"
                )
        evened = [
            replace(sample, {part.path: self._pad(part, longest) for part in inside})
            for sample, inside in zip(samples, parts, strict=True)
        ]
        return evened, lengths

    def _parts_of_sample(self, sample: Any, index: int) -> list[_Part]:
        """Return what is to be evened out; the rest is left to collate."""
        found = []
        for part in self._parts(sample, f"samples[{index}]"):
            tensor = _tensor(part.value)
            if tensor is None:
                continue
            # A dimension of the batch is one more than that of a sample; 0 is the batch itself.
            count = tensor.dim() + 1
            axes = [
                (dim % count - 1, axis)
                for dim, axis in part.axes
                if -count <= dim < count and dim % count
            ]
            if axes:
                found.append(part._replace(value=tensor, axes=axes))
        return found

    def _padded(self, batch: Any) -> tuple[Any, dict[str, int]]:
        """Pad a batch to its buckets; also return the bucket of each axis."""
        parts = []
        for part in self._parts(batch, "batch"):
            if not isinstance(part.value, torch.Tensor):
                raise TypeError(
                    f"BucketCollator: {part.label} is of type {type(part.value).__name__}, "
                    "expected a tensor; what collate_fn returns has to be a rectangle to be padded"
                )
            axes = axes_in(part.value, part.axes, part.label, _NAME)
            parts.append(part._replace(axes=axes))
        real = _lengths(parts)
        sizes = {axis: each.bucket_for(real[axis]) for axis, each in self._buckets.items()}
        padded = {part.path: self._pad(part, sizes) for part in parts}
        if self._batch_sizes is not None:
            padded = self._with_rows(batch, padded, sizes)
        return replace(batch, padded), sizes

    def _parts(self, value: Any, label: str) -> Iterator[_Part]:
        """Yield the parts of a sample or of a batch that ``dims`` names."""
        for path, axes in self._declared.items():
            part, fill = part_of(value, path, label, _NAME), self._fills.get(path, 0)
            yield _Part(path, part, axes, fill, keystr(label, path, value))

    def _rows(self, sizes: Mapping[str, int], there: int) -> int:
        """Return how many rows a batch of these buckets gets, which has some already."""
        axes, rows = self._batch_sizes  # type: ignore[misc]
        # If the sampler was given the length of one axis, another one may be longer.
        return min((rows[sizes[axis]] for axis in axes), key=lambda each: (each < there, each))

    def _with_rows(
        self, batch: Any, padded: dict[KeyPath, torch.Tensor], sizes: Mapping[str, int]
    ) -> dict[KeyPath, torch.Tensor]:
        """Return the tensors of a batch, those that are padded and all others, with more rows."""
        leaves, treedef = flatten(batch)
        tensors = {
            path: leaf
            for path, leaf in zip(key_paths(treedef), leaves, strict=True)
            if isinstance(leaf, torch.Tensor) and leaf.dim()
        }
        tensors.update(padded)
        for path in self._fills:
            if path not in tensors:
                raise KeyError(
                    f"BucketCollator: {keystr('fill', path)} is given, but the batch has no tensor "
                    f"{keystr('batch', path)}"
                )
        rows = next(iter(padded.values())).shape[0]
        wanted = self._rows(sizes, rows)
        if rows > wanted:
            (axis, *_), _ = self._batch_sizes  # type: ignore[misc]
            raise ValueError(
                f"BucketCollator: a batch of {rows} rows is {sizes[axis]} long in {axis!r}, where "
                f"batch_sizes allows {wanted}. If BucketBatchSampler made it, the lengths that it "
                "was given do not fit the data: pass it those of these samples in this axis, and "
                "the buckets of the collator"
            )
        filled = dict(padded)
        for path, tensor in tensors.items():
            if tensor.shape[0] != rows:  # nothing with a row for each sample
                continue
            if path not in self._fills and path not in padded:
                raise ValueError(
                    f"BucketCollator: batch_sizes adds rows of padding to {keystr('batch', path)} "
                    "too, and fill does not say what they hold: pass it, such as -100 for a label "
                    "that torch's losses leave out"
                )
            value = self._fills.get(path, 0)
            if rows == wanted:  # see now that it fits the dtype, not at the end of the epoch
                pad_to_bucket(tensor[:1], 0, 2, value=value)
            filled[path] = pad_to_bucket(tensor, 0, wanted, value=value).tensor
        return filled

    def _pad(self, part: _Part, sizes: Mapping[str, int]) -> torch.Tensor:
        tensor: torch.Tensor = part.value
        for dim, axis in part.axes:
            padded = pad_to_bucket(tensor, dim, sizes[axis], value=part.fill, side=self._side)
            tensor = padded.tensor
        return tensor


class _Part(NamedTuple):
    """What is to be padded in a sample or in a batch."""

    path: KeyPath
    value: Any
    axes: Axes
    fill: Any
    label: str


def _lengths(parts: Iterable[_Part]) -> dict[str, int]:
    return lengths_by_axis([(each.label, each.value.shape, each.axes) for each in parts], _NAME)


def _tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor of what a sample may hold in place of one, None for anything else."""
    if isinstance(value, torch.Tensor):
        return value
    is_sequence = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if is_sequence and not len(value):
        return torch.empty(0, dtype=torch.int64)  # torch's float would make floats of all ids
    if is_sequence or isinstance(value, np.ndarray):
        try:
            # torch takes a list of arrays one by one: that is slow, and it warns.
            arrays = is_sequence and isinstance(value[0], np.ndarray)
            return torch.as_tensor(np.stack(value) if arrays else value)
        except (TypeError, ValueError, RuntimeError):  # texts, or rows of different length
            return None
    return None


def _put(batch: Any, key: str, value: Any) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"BucketCollator: mask_key needs a batch that is a mapping, got one of type "
            f"{type(batch).__name__}"
        )
    if key in batch:
        raise ValueError(
            f"BucketCollator: the samples have {key!r} themselves: name it in dims in place of "
            "mask_key"
        )
    # In place: collate_fn has just made the batch, and nothing else refers to it yet.
    batch[key] = value  # type: ignore[index]


def _mask_keys(given: Any, axes: dict[str, None]) -> dict[str, str]:
    if given is None:
        return {}
    keys = dict(given) if isinstance(given, Mapping) else dict.fromkeys(axes, given)
    if not keys.keys() <= axes.keys() or len(set(keys.values())) < len(keys):
        raise ValueError(
            f"BucketCollator: mask_key is {given!r}, expected a key for the axis of dims, or "
            f"{{axis: key}}, of {', '.join(sorted(axes))}"
        )
    return keys


def _batch_sizes(
    given: Any, buckets: Mapping[str, Buckets]
) -> tuple[list[str], Mapping[int, int]] | None:
    """Return which axes decide on the number of rows, and ``{size: rows}``."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise TypeError(
            f"BucketCollator: batch_sizes is {given!r}, expected sampler.batch_sizes, a dict "
            "{size: rows}"
        )
    axes = [name for name, ladder in buckets.items() if all(size in given for size in ladder)]
    if axes:
        return axes, given
    raise ValueError(
        f"BucketCollator: batch_sizes has the sizes {', '.join(map(repr, given))}, expected those "
        f"of the buckets of {' or '.join(buckets)}: give collator and sampler the same buckets"
    )
