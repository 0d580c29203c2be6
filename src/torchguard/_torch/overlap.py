"""Which operands of a call share memory with what it writes, and a call with copies of those.

numpy computes such calls as if the operands were copied first, since 1.13. torch looks for
overlap only where both tensors are dense, and is silent elsewhere:
https://github.com/pytorch/pytorch/issues/135487
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torchguard._torch.mutation import out_tensors, writes_of, written_tensors
from torchguard._torch.schemas import operator_schemas, tags_of
from torchguard._torch.tensors import has_own_dispatch, private

INSTALLED = "torch._foreach_add_"
"""The path that ``install("overlap")`` patches; the others it shares with other guards."""

_FEW = 4
"""Up to so many written tensors, each operand is compared with each of them."""

_MAX_WORK = 10_000
"""Steps of numpy's search for a common address, about 0.1 ms; beyond it a copy is made."""

# Operators that read each element before they write it, and nothing else of the same tensor. They
# lack torch.Tag.pointwise; tests/rollback/test_overlap.py tries each of them.
_ELEMENTWISE = frozenset(
    (
        *("copy", "copysign", "floor_divide", "fill", "masked_fill", "where", "threshold"),
        # Other names of operators that have the tag.
        *("multiply", "subtract", "divide", "true_divide", "absolute", "negative", "clip", "fix"),
        *("arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "arctan2", "square"),
        *("greater", "greater_equal", "less", "less_equal", "not_equal", "heaviside", "xlogy"),
        *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
        *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__idiv__"),
    )
)


class Overlap(NamedTuple):
    """An operand that shares memory with what is written."""

    written: torch.Tensor
    operand: torch.Tensor


# ---- two tensors ----


class _Memory:
    """What numpy reads of an array: where it lies. Its elements are not looked at."""

    __slots__ = ("__array_interface__",)

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
        }


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors have a byte in common; True where that is too hard to say."""
    # By addresses: tensors made of one numpy array, or through DLPack, have no common storage.
    first, second = one.data_ptr(), other.data_ptr()
    if first > second:
        one, other, first, second = other, one, second, first
    if second - first >= _extent(one) or not one.numel() or not other.numel():
        return False
    if first == second and one.device != other.device:
        return False
    try:
        arrays = np.asarray(_Memory(one)), np.asarray(_Memory(other))
        return bool(np.shares_memory(*arrays, _MAX_WORK))
    except _TOO_HARD:
        return True


_TOO_HARD: type[Exception] = getattr(np, "exceptions", np).TooHardError


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.element_size()
    last = sum(step * (size - 1) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


_is_wrapped: Callable[[Any], bool] = private(
    "_C._functorch.is_functorch_wrapped_tensor", lambda _: False
)


def _with_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor whose memory can be asked for: itself, or what ``vmap`` wraps."""
    while _is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    # A fake tensor, of any device, warns when it is asked for its address.
    if has_own_dispatch(tensor) and tensor.untyped_storage().device.type == "meta":
        return None
    try:
        return tensor if tensor.data_ptr() else None
    except RuntimeError:
        return None


# ---- a call ----


def overlapping(written: torch.Tensor, operand: torch.Tensor, *, elementwise: bool) -> bool:
    """Whether an operand has to be copied before the call writes."""
    if operand is written and elementwise:
        return False
    one, other = _with_memory(written), _with_memory(operand)
    if one is None or other is None or not shares_memory(one, other):
        return False
    return not (elementwise and _same_elements(one, other))


def are_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one ends before the other begins: the quick answer for most pairs, else False."""
    try:
        distance = other.data_ptr() - one.data_ptr()
        if distance > 0:
            return one.is_contiguous() and distance >= one.nbytes
        return other.is_contiguous() and -distance >= other.nbytes > 0
    except RuntimeError:  # sparse, functorch's
        return False


def separated(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Callable[[Overlap], None],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call's arguments, operands that overlap what is written replaced by clones."""
    if getattr(function, "__name__", "") in _SETS:
        return _separated_assignment(args, kwargs, found)
    writes = _writes(function)
    if writes is not None and (not writes.elements or writes.calls_back):
        writes = None
    targets = list(out_tensors(writes, kwargs))
    if writes is not None:
        targets += [tensor for tensor, _ in written_tensors(writes, args, kwargs)]
    if not targets:
        return args, kwargs
    argument, made = _clones(function, targets, found)
    # The tensors that are written are passed on themselves, not as clones.
    written = () if writes is None else writes.arguments
    places = {each.position for each in written if not each.is_out}
    names = {"out", *(each.name for each in written)}
    if "self" in names:
        names.add("input")
    new_args = tuple(each if i in places else argument(each) for i, each in enumerate(args))
    new_kwargs = {name: v if name in names else argument(v) for name, v in kwargs.items()}
    return (new_args, new_kwargs) if made else (args, kwargs)


def _clones(
    function: Callable[..., Any], targets: list[torch.Tensor], found: Callable[[Overlap], None]
) -> tuple[Callable[[Any], Any], list[torch.Tensor]]:
    """Return what clones an argument that overlaps a target, and the list of these clones."""
    spans = _Spans(targets) if len(targets) > _FEW else None
    elementwise, in_lists = is_elementwise(function), function.__name__.startswith("_foreach_")
    made: list[torch.Tensor] = []

    def clone(operand: torch.Tensor, place: int | None = None) -> torch.Tensor:
        if spans is not None and not spans.meet(operand):
            return operand
        for number, target in enumerate(targets):
            # Of lists, each element is written as its own operand is read, not another's.
            in_place = not in_lists or number == place
            if overlapping(target, operand, elementwise=elementwise and in_place):
                if not made:  # of the first, before it is copied
                    found(Overlap(target, operand))
                made.append(operand.clone())
                return made[-1]
        return operand

    def argument(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return clone(value)
        if type(value) not in (tuple, list):
            return value
        items = [
            clone(each, place) if isinstance(each, torch.Tensor) else each
            for place, each in enumerate(value)
        ]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)

    return argument, made


def may_write(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may write to a tensor that it is given."""
    if kwargs.get("out") is not None or getattr(function, "__name__", "") in _SETS:
        return True
    try:
        return _writes(function) is not None
    except TypeError:  # it has no hash
        return False


class _Spans:
    """Where many tensors lie, in order: most operands of a list lie between them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        spans = sorted(filter(None, map(_span, tensors)))
        self._begins = [begin for begin, _ in spans]
        self._ends = list(itertools.accumulate((end for _, end in spans), max))

    def meet(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor may share memory with one of them."""
        span = _span(tensor)
        if span is None:
            return False
        before = bisect.bisect_left(self._begins, span[1])  # those that begin before its end
        return before > 0 and self._ends[before - 1] > span[0]


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the addresses between which a tensor lies; None if it has no memory to ask for."""
    memory = _with_memory(tensor)
    if memory is None or not memory.numel():
        return None
    return memory.data_ptr(), memory.data_ptr() + _extent(memory)


_SETS = frozenset(("__setitem__", "setitem"))
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def _separated_assignment(
    args: tuple[Any, ...], kwargs: dict[str, Any], found: Callable[[Overlap], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Do what :func:`separated` does for ``x[index] = value``, where only a part is written."""
    if kwargs or len(args) != 3 or not isinstance(args[0], torch.Tensor):  # noqa: PLR2004
        return args, kwargs
    tensor, index, value = args
    items = index if isinstance(index, tuple) else (index,)
    tensors = [each for each in (*items, value) if isinstance(each, torch.Tensor)]
    if all(are_apart(tensor, each) for each in tensors):
        return args, kwargs
    basic = all(map(_is_basic, items))
    target = tensor[index] if basic else tensor

    def clone(operand: Any) -> Any:
        # torch reads the number of an index that is a tensor of one integer before it writes.
        if not isinstance(operand, torch.Tensor) or (basic and operand is not value):
            return operand
        if not overlapping(target, operand, elementwise=basic):
            return operand
        # torch refuses memory of the same tensor, though it lies elsewhere than what is written.
        if basic or operand is not value or _hits(tensor, index, operand):
            found(Overlap(target, operand))
        return operand.clone()

    new = tuple(map(clone, items))
    return (tensor, new if isinstance(index, tuple) else new[0], clone(value)), {}


def _is_basic(item: Any) -> bool:
    """Whether an item of an index selects a view; a bool is a mask."""
    if isinstance(item, torch.Tensor):
        return item.dim() == 0 and item.dtype in _SIGNED
    kinds = (int, np.integer, slice, type(None), type(...))
    return isinstance(item, kinds) and not isinstance(item, bool)


def _hits(tensor: torch.Tensor, index: Any, operand: torch.Tensor) -> bool:
    """Whether what an index with tensors selects shares an element with the operand."""
    one, other = _with_memory(tensor), _with_memory(operand)
    if one is None or other is None or one.dtype != other.dtype or one is not tensor:
        return True
    try:
        written = _offsets(one, one.data_ptr())[index]
    except (IndexError, RuntimeError, TypeError):  # torch says what is wrong with the index
        return False
    read = _offsets(other, one.data_ptr())
    return bool(torch.isin(read, written).any())


def _offsets(tensor: torch.Tensor, begin: int) -> torch.Tensor:
    """Return how many bytes each element lies behind an address."""
    size = tensor.element_size()
    total = torch.full((), tensor.data_ptr() - begin, device=tensor.device)
    for dim, (length, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [length if each == dim else 1 for each in range(tensor.dim())]
        total = total + (torch.arange(length, device=tensor.device) * (step * size)).view(shape)
    return total.expand(tensor.shape)


_writes = functools.lru_cache(maxsize=4096)(writes_of)


@functools.lru_cache(maxsize=4096)
def is_elementwise(function: Callable[..., Any]) -> bool:
    """Whether each element of the result depends on the elements in the same place alone."""
    name = getattr(function, "__name__", "").partition(".")[0]
    names = {name, name.removesuffix("_")}
    known = name.startswith("_foreach_") or not _ELEMENTWISE.isdisjoint(names)
    return known or any(map(_all_pointwise, names))


def _all_pointwise(name: str) -> bool:
    """Whether the overloads of an operator that take the most tensors are tagged."""
    by_count: dict[int, list[Any]] = {}
    for schema in operator_schemas(name):
        if not any(argument.is_out for argument in schema.arguments):
            count = sum(str(argument.type) == "Tensor" for argument in schema.arguments)
            by_count.setdefault(count, []).append(schema)
    most = max(by_count, default=0)
    return most > 0 and all(torch.Tag.pointwise in tags_of(each) for each in by_count[most])
