"""Outputs taken apart, and sliced to what of them is real.

Shapes: B batch, T the size of an axis.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from torchguard._pytree import KeyPath, children, flatten, key_paths, keystr, unflatten
from torchguard.bucketing.decorator.spec import Sizes
from torchguard.bucketing.padding import Side
from torchguard.equivalence.outcome import Output as Compared

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.plan import Plan

__all__ = [
    "UNKNOWN",
    "Fold",
    "Narrow",
    "Output",
    "Slices",
    "Steps",
    "declared_steps",
    "kind_of",
    "real_output",
    "slice_or_learn",
    "slice_output",
]


_PLAIN = (int, float, complex, str, bytes, bool, torch.dtype, torch.device)


@dataclass(frozen=True)
class Output:
    """An output taken apart; two are equal that have the same structure."""

    leaves: list[Any] = field(compare=False)
    paths: list[KeyPath]
    whole: Any = field(compare=False)

    def label(self, index: int) -> str:
        """Return how to spell a leaf: ``output.logits``."""
        return keystr("output", self.paths[index], self.whole)

    @classmethod
    def of(cls, whole: Any) -> Output:
        """Take an output apart.

        Raises:
            TypeError: it has something inside that may hold tensors, but can't be looked into.
        """
        # Of any class, FakeTensor too: a tensor is one leaf.
        if isinstance(whole, torch.Tensor):
            return cls([whole], [()], whole)
        leaves, treedef = flatten(whole)
        output = cls(leaves, key_paths(treedef), whole)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, (Iterator, Awaitable)):
                raise TypeError(
                    f"bucketed: {output.label(index)} is a {type(leaf).__name__}: what comes out "
                    "of it later can't be cut to size. Return tensors, tuples, lists, dicts or "
                    "dataclasses"
                )
            if not _is_plain(leaf) and _holds_tensors(leaf):
                raise TypeError(
                    f"bucketed: {output.label(index)} is a {type(leaf).__name__}, which holds "
                    "tensors that can't be cut to size: return tensors, tuples, lists, dicts or "
                    "dataclasses (with Hugging Face models: use_cache=False)"
                )
        return output


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf is a tensor or certainly holds none."""
    return leaf is None or isinstance(leaf, (torch.Tensor, torch.Size, *_PLAIN))


# Three levels reach the tensors in a cache of transformers: its list of layers, a layer, a tensor.
def _holds_tensors(value: Any, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (type, torch.nn.Module)) or callable(value):
        return False
    inside = [child for _, child in children(value) or ()]
    inside += getattr(value, "__dict__", {}).values()
    return any(_holds_tensors(child, depth - 1) for child in inside)


class Narrow(NamedTuple):
    """The arguments of ``tensor.narrow``: the real part of one dim."""

    dim: int
    start: int
    length: int

    @classmethod
    def of(cls, dim: int, length: int, padded: int, side: Side) -> Narrow:
        """Return where ``length`` is real of a dim that is ``padded`` long."""
        return cls(dim, 0 if side == "right" else padded - length, length)


class Fold(NamedTuple):
    """A dim that is several flattened into one, (B, T) as B * T, and what of them is real."""

    dim: int
    sizes: tuple[int, ...]
    """Of those dims, after padding."""
    narrows: tuple[Narrow, ...]
    """Their dims are counted from the first of those flattened."""

    def slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the real part; a copy, where it is not one piece of memory."""
        tensor = tensor.unflatten(self.dim, self.sizes)
        for index, start, length in self.narrows:
            tensor = tensor.narrow(self.dim + index, start, length)
        # The dims have to be one again: the function returned one.
        return tensor.flatten(self.dim, self.dim + len(self.sizes) - 1)


Steps: TypeAlias = "tuple[Narrow | Fold, ...]"
"""How to slice a tensor, in order."""


class Slices(NamedTuple):
    """What to take of an output, by index of its leaves."""

    steps: tuple[tuple[int, Steps], ...] = ()
    numbers: tuple[tuple[int, int], ...] = ()
    """Integers that say how long something is."""


# ---- in every call ----


UNKNOWN: Any = object()
"""What :func:`slice_output` returns for an output of a kind that was not seen yet."""


def slice_output(plan: Plan, whole: Any) -> Any:
    """Take the real part of an output; ``UNKNOWN`` if it is not known yet what that is."""
    if type(whole) is torch.Tensor:
        # Outputs of one plan may differ in shape: a branch on data, or a loss in place of logits.
        slices = plan.slices.get(whole.shape)
        if slices is None:
            return UNKNOWN
        return _slice(whole, slices.steps[0][1]) if slices.steps else whole
    leaves, key = _flatten(whole)
    slices = plan.slices.get(key)
    if slices is None:
        return UNKNOWN
    for index, number in slices.numbers:
        leaves[index] = number
    for index, steps in slices.steps:
        leaves[index] = _slice(leaves[index], steps)
    return unflatten(leaves, whole)


def slice_or_learn(plan: Plan, find: Callable[[Output], Slices], whole: Any) -> Any:
    """Take the real part of an output.

    Args:
        plan: how the call was padded; what is found is kept there.
        find: finds out what of an output of a new kind is real. It may run the function on
            tensors without data.
        whole: what the function returned.
    """
    real = slice_output(plan, whole)
    if real is UNKNOWN:
        plan.slices[kind_of(whole)] = find(Output.of(whole))
        real = slice_output(plan, whole)
    return real


def _slice(tensor: torch.Tensor, steps: Steps) -> torch.Tensor:
    for step in steps:
        tensor = tensor.narrow(*step) if isinstance(step, Narrow) else step.slice(tensor)
    return tensor


def real_output(
    plan: Plan,
    find: Callable[[Output], Slices] | None,
    count: Callable[[Output, Any], list[Compared]] | None,
    whole: Any,
) -> tuple[Output, list[Compared]]:
    """Take the real part of an output apart, to compare it with that of another run.

    Args:
        plan: of the call.
        find: as of :func:`slice_or_learn`; None where nothing was padded.
        count: says which elements count, of the real part of a padded output, or of one that was
            not padded, which comes with None; left out, all do.
        whole: what the function returned.
    """
    output = Output.of(whole if find is None else slice_or_learn(plan, find, whole))
    if count is not None:
        return output, count(output, None if find is None else whole)
    return output, [Compared(leaf) for leaf in output.leaves]


def kind_of(whole: Any) -> Any:
    """Return what tells an output from others that are sliced otherwise."""
    return whole.shape if type(whole) is torch.Tensor else _flatten(whole)[1]


def _flatten(whole: Any) -> tuple[list[Any], Any]:
    """Return the leaves of an output, and its kind."""
    leaves, treedef = flatten(whole)
    kinds = [leaf.shape if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves]
    return leaves, (treedef, *kinds)


# ---- what outputs= says ----


def declared_steps(
    declared: Any, output: Output, sizes: Sizes, buckets: Sizes, side: Side
) -> tuple[tuple[int, Steps], ...]:
    """Return how ``outputs=`` says to slice each leaf, by its index.

    Raises:
        TypeError, ValueError: it does not fit what the function returned.
    """
    found: list[tuple[int, Steps]] = []
    for index, (leaf, path) in enumerate(zip(output.leaves, output.paths, strict=True)):
        spec = _declared_at(declared, path) if isinstance(leaf, torch.Tensor) else None
        if spec is None:
            continue
        label = output.label(index)
        # A dict may name few dims of many, a tuple names each in its place.
        narrows: list[Narrow] = []
        folds: list[Fold] = []
        for dim, size in spec.items() if isinstance(spec, Mapping) else enumerate(spec):
            if size is None:
                continue
            if type(dim) is not int or not -leaf.dim() <= dim < leaf.dim():
                raise ValueError(
                    f"bucketed: outputs names dimension {dim!r} of {label}, which has shape "
                    f"{tuple(leaf.shape)}"
                )
            what = _DeclaredDim(dim % leaf.dim(), leaf.shape[dim], dim, label, sizes, buckets)
            if isinstance(size, tuple):
                folds += what.folds(size, side)
            else:
                narrows += what.narrows(size, side)
        if narrows or folds:
            found.append((index, (*narrows, *folds)))
    return tuple(found)


class _DeclaredDim(NamedTuple):
    """A dim of an output that ``outputs=`` names."""

    dim: int
    size: int
    given: int
    """The dim as it was written."""
    label: str
    sizes: Sizes
    buckets: Sizes

    def narrows(self, size: Any, side: Side) -> list[Narrow]:
        padded, length = self._sizes(size)
        if self.size != padded:
            raise ValueError(
                f"bucketed: outputs says that dimension {self.given} of {self.label} is {padded} "
                f"for {_listed(self.buckets)}, but it is {self.size}"
            )
        return [] if length == padded else [Narrow.of(self.dim, length, padded, side)]

    def folds(self, parts: tuple[Any, ...], side: Side) -> list[Fold]:
        """Read ``(None, "t")``: what was flattened into the dim, None for one of any size."""
        what = f"dimension {self.given} of {self.label}"
        if parts.count(None) > 1:
            raise ValueError(
                f"bucketed: outputs has {parts!r} for {what}, expected None for one part only"
            )
        pairs = [
            (part, part) if part is None or type(part) is int else self._sizes(part)
            for part in parts
        ]
        known = math.prod(padded for padded, _ in pairs if padded is not None)
        other = self.size // known if known else 0
        sizes = tuple(other if padded is None else padded for padded, _ in pairs)
        if math.prod(sizes) != self.size:
            raise ValueError(
                f"bucketed: outputs says that {what} is {parts!r} flattened, for "
                f"{_listed(self.buckets)}, but it is {self.size}, which is no multiple of {known}"
            )
        narrows = tuple(
            Narrow.of(index, length, padded, side)
            for index, (padded, length) in enumerate(pairs)
            if padded is not None and length is not None and length != padded
        )
        return [Fold(self.dim, sizes, narrows)] if narrows else []

    def _sizes(self, size: Any) -> tuple[int, int]:
        """Return a declared size after padding, and how much of it is real."""
        padded, length = (_evaluated(size, each, self.label) for each in (self.buckets, self.sizes))
        if not 0 <= length <= padded:
            raise ValueError(
                f"bucketed: outputs gives {length} for dimension {self.given} of {self.label} at "
                f"{_listed(self.sizes)}, expected 0 to {padded}"
            )
        return padded, length


def _declared_at(declared: Any, path: KeyPath) -> Any:
    """Return what is declared for one leaf of an output, None if nothing is."""
    for key in path:
        if isinstance(declared, Mapping):
            declared = declared.get(key)
        elif isinstance(declared, (tuple, list)) and isinstance(key, int) and key < len(declared):
            declared = declared[key]
        else:
            return None
    return declared


def _evaluated(size: Any, sizes: Sizes, label: str) -> int:
    if isinstance(size, str) and size in sizes:
        return sizes[size]
    if callable(size):
        wanted = inspect.signature(size).parameters
        if all(name in sizes for name in wanted):
            return int(size(**{name: sizes[name] for name in wanted}))
    raise TypeError(
        f"bucketed: outputs has {size!r} for {label}, expected one of {', '.join(sizes)}, or a "
        f"function of them, such as lambda {next(iter(sizes))}: {next(iter(sizes))} // 2, or "
        f"(None, {next(iter(sizes))!r}) for a batch and its rows flattened into one dim"
    )


def _listed(sizes: Sizes) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
