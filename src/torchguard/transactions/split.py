"""A batch cut into parts: what in it has a row for each sample, and what goes to every part.

A container of the batch is one of two things, and no type tells which: a container of fields, of
which each has all samples, or a list with one entry for each sample. So the number of samples
decides, which tensors say in dimension 0. Where both readings fit, nothing is cut: the caller says
which it is, by ``split=``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from torchguard._pytree import KeyPath, children, keystr, with_children

Split: TypeAlias = "bool | Mapping[Any, Split] | Sequence[Split] | None"
"""True of what has a row for each sample, False of what every part gets; or that of its parts."""

_STRINGS = (str, bytes)
_SCALARS = (bool, int, float, complex, type(None), np.generic, *_STRINGS)
_CONSTANTS = (*_SCALARS, torch.Size, torch.dtype, torch.device)
_FEW = 4
"""So many numbers may be a size, a mean, or a box."""


class Rows(NamedTuple):
    """Which containers and tensors of a batch have a row for each sample."""

    samples: int
    paths: frozenset[KeyPath]

    def parts(self, batch: Any, size: int) -> Iterator[tuple[Any, float]]:
        """Yield parts of at most ``size`` samples, views of the batch, with their share of it."""
        if size >= self.samples:
            yield batch, 1.0
            return
        for begin in range(0, self.samples, size):
            end = min(begin + size, self.samples)
            yield _cut(batch, (), slice(begin, end), self.paths), (end - begin) / self.samples


def _cut(node: Any, path: KeyPath, rows: slice, paths: frozenset[KeyPath]) -> Any:
    if path in paths:
        return node[rows]
    new = {}
    for key, child in _inside(node) or ():
        made = _cut(child, (*path, key), rows, paths)
        if made is not child:
            new[key] = made
    return with_children(node, new) if new else node


def rows_of(batch: Any, split: Split, shown: dict[KeyPath, bool]) -> Rows:
    """Return what of a batch is cut.

    Args:
        batch: any container.
        split: what the caller says of it.
        shown: what earlier batches have shown of each list, whether it has an entry for each
            sample: the last batch of an epoch may have as many samples as an image has sizes.

    Raises:
        TypeError: something can't be cut, or may be cut in two ways; it names what.
    """
    if split is False:
        raise TypeError("run: split is False, so nothing of the batch is cut: leave out split=")
    if _is_list(batch) and not _is_of_parts(split) and _is_of_samples(batch, split):
        return Rows(len(batch), frozenset({()}))
    fields = list(_fields(batch, (), split, batch, opened=True))
    samples, first = _count(fields, batch)
    paths = set()
    while fields:
        path, node, said = field = fields.pop(0)
        name = keystr("batch", path, batch)
        if said is False:
            continue
        if _has_rows(node):
            if len(node) != samples:
                raise TypeError(
                    f"run: can't split {name} of shape {tuple(node.shape)}: expected {samples} in "
                    f"dimension 0, as {first} has; pass split={_typed(path, 'False')} if every "
                    "part gets all of it"
                )
            paths.add(path)
        elif _is_list(node):
            if _has_entries(field, samples, shown, name):
                paths.add(path)
            else:
                fields[:0] = _fields(node, path, None, batch, opened=True)
        elif said is True or not _is_constant(node):
            raise TypeError(
                f"run: can't split {name}, of type {type(node).__name__}; pass a list with one "
                f"entry per sample and make it of that in loss_of, or "
                f"split={_typed(path, 'False')} if every part gets all of it"
            )
    return Rows(samples, frozenset(paths))


class _Field(NamedTuple):
    """A leaf of the batch, or a list in it, and what the caller says of it."""

    path: KeyPath
    node: Any
    said: Split


def _fields(
    node: Any, path: KeyPath, said: Split, batch: Any, *, opened: bool = False
) -> Iterator[_Field]:
    """Yield the leaves of mappings, named tuples and dataclasses, and the lists in them."""
    inside, name = _inside(node), keystr("batch", path, batch)
    if not (said is None or isinstance(said, bool) or _is_of_parts(said)):
        raise TypeError(
            f"run: split says {said!r} of {name}, expected True if it has a row for each sample, "
            "False if every part gets all of it, or a dict or list that says so of what is in it"
        )
    if not _is_of_parts(said) and (inside is None or said is False or _is_list(node) > opened):
        yield _Field(path, node, said)
        return
    if inside is None:
        raise TypeError(f"run: split looks into {name}, which is a {type(node).__name__}")
    keys = [key for key, _ in inside]
    if isinstance(said, Mapping) and (unknown := [key for key in said if key not in keys]):
        raise TypeError(f"run: split has {unknown[0]!r}, and {name} has {keys}")
    if isinstance(said, Sequence) and len(said) != len(keys):
        raise TypeError(f"run: split has {len(said)} items, and {name} has {keys}")
    for number, (key, child) in enumerate(inside):
        of_child: Any = said
        if isinstance(said, Mapping):
            of_child = said.get(key)
        elif isinstance(said, Sequence):
            of_child = said[number]
        elif _is_constant(child):
            of_child = None
        yield from _fields(child, (*path, key), of_child, batch)


def _count(fields: list[_Field], batch: Any) -> tuple[int, str]:
    """Return the number of samples, and of what it is the length."""
    usable = [each for each in fields if each.said is not False]
    lists = [each for each in usable if _is_list(each.node) and len(each.node)]
    tensors = [each for each in usable if _has_rows(each.node)]
    for path, node, _ in (*(e for e in (*tensors, *lists) if e.said is True), *tensors):
        return len(node), keystr("batch", path, batch)
    if not lists:
        raise TypeError(
            "run: found no tensor to split in the batch; expected tensors whose "
            "dimension 0 counts the samples, in lists, tuples, mappings or dataclasses"
        )
    lengths = {len(each.node) for each in lists}
    inside = [leaf for each in lists for leaf in _leaves(each.node)]
    rows = {len(leaf) if _has_rows(leaf) else None for leaf in inside}
    name = keystr("batch", lists[0].path, batch)
    if len(rows) == 1 and None not in rows:  # all of it may be fields: the states of some layers
        if len(lengths) > 1 or lengths == {1}:
            return next(iter(rows)) or 0, f"{name}[0]"
        raise _doubt(lists[0].path, lists[0].node, name, f"of {rows.pop()} rows each")
    if len(lengths) > 1:
        raise TypeError(
            f"run: the lists of the batch have {sorted(lengths)} entries, and it has no tensor: "
            f"pass split={_typed(lists[0].path, 'True')} if {name} has one for each sample"
        )
    return lengths.pop(), name


def _has_entries(field: _Field, samples: int, shown: dict[KeyPath, bool], name: str) -> bool:
    """Whether a list has an entry for each sample; if not, it is a container of fields."""
    path, node, said = field
    if len(node) != samples:
        if said is True or shown.get(path):
            raise TypeError(
                f"run: can't split {name}, which has {len(node)} entries, for {samples} samples; "
                f"pass split={_typed(path, 'False')} if every part gets all of it"
            )
        if len(node):
            shown[path] = False
        return False
    if said is True or samples == 1:  # one sample is not cut
        return True
    if path not in shown:
        if _are_numbers(node) and len(node) <= _FEW:
            raise _doubt(path, node, name, "numbers")
        if _rows_in(node) == {samples}:
            raise _doubt(path, node, name, f"whose tensors have {samples} rows")
        shown[path] = True
    return shown[path]


def _is_of_samples(batch: Any, split: Split) -> bool:
    """Whether the batch itself is a list of samples, as ``collate_fn=list`` makes."""
    if split is True:
        return True
    if any(map(_has_rows, batch)):  # (inputs, targets)
        return False
    if len(batch) < 2:  # noqa: PLR2004
        return not any(_inside(each) is not None for each in batch)
    if not _are_alike(batch):
        return False
    columns = all(map(_is_list, batch)) and all(map(_are_alike, batch))
    if len(_rows_in(batch)) == 1 or (columns and len(set(map(len, batch))) == 1):
        raise _doubt((), batch, "batch", "that are alike")
    return True


def _doubt(path: KeyPath, node: Any, name: str, what: str) -> TypeError:
    """Return the error for a list that can be read in two ways."""
    each = "False" if _are_numbers(node) else f"[{', '.join(['True'] * min(len(node), _FEW))}]"
    if len(node) > _FEW and each != "False":
        each = f"[True] * {len(node)}"
    meaning = "every part gets all" if each == "False" else "each of them has a row for each sample"
    return TypeError(
        f"run: {name} is a {type(node).__name__} of {len(node)} {what}: pass "
        f"split={_typed(path, 'True')} if it has one entry for each sample, "
        f"split={_typed(path, each)} if {meaning}"
    )


def _typed(path: KeyPath, value: str) -> str:
    """Return what to type for ``split=``."""
    for key in reversed(path):
        value = f"{{{key!r}: {value}}}"
    return value


# ---- what a part of a batch is ----


def _inside(node: Any) -> list[tuple[Any, Any]] | None:
    # A named tuple whose fields only make sense together: data is sorted by batch_sizes.
    return None if isinstance(node, torch.nn.utils.rnn.PackedSequence) else children(node)


def _is_list(node: Any) -> bool:
    """Whether it is a list or a plain tuple; a named tuple has fields."""
    return isinstance(node, list) or type(node) is tuple


def _is_dense(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.layout is torch.strided and not leaf.is_nested
    return isinstance(leaf, np.ndarray)


def _has_rows(leaf: Any) -> bool:
    return _is_dense(leaf) and leaf.ndim > 0


def _is_constant(leaf: Any) -> bool:
    """Whether every part gets this value as it is."""
    return isinstance(leaf, _CONSTANTS) or (_is_dense(leaf) and leaf.ndim == 0)


def _is_of_parts(said: Split) -> bool:
    return isinstance(said, (Mapping, Sequence)) and not isinstance(said, _STRINGS)


def _leaves(node: Any) -> Iterator[Any]:
    inside = _inside(node)
    if inside is None:
        yield node
    for _, child in inside or ():
        yield from _leaves(child)


def _are_numbers(entries: Any) -> bool:
    constant = all(_is_constant(e) and not isinstance(e, torch.Size) for e in entries)
    return constant and not all(isinstance(e, _STRINGS) for e in entries)


def _rows_in(entries: Any) -> set[int]:
    """Return the numbers of rows that the tensors in these entries have."""
    return {len(leaf) for leaf in _leaves(entries) if _has_rows(leaf)}


def _are_alike(entries: Any) -> bool:
    return len({_kind(each) for each in entries}) == 1


def _kind(node: Any) -> Any:
    """Return what samples have in common."""
    if isinstance(node, _SCALARS):
        return isinstance(node, _STRINGS)
    if _is_list(node):
        return type(node), frozenset(map(_kind, node))
    return (type(node), frozenset(node)) if isinstance(node, Mapping) else type(node)
