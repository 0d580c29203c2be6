"""Which operands of a call share memory with what it writes, and the call with copies of those.

numpy computes such calls as if the operands were copied first, since 1.13. PyTorch looks for
overlap only if both tensors are dense, and is silent elsewhere:
https://github.com/pytorch/pytorch/issues/135487
"""

from __future__ import annotations

import bisect
import contextlib
import enum
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from torchguard._torch import computing_unseen, has_own_dispatch, operator_schemas, unwrapped
from torchguard._torch.schemas import tags_of
from torchguard.equivalence.mutation import out_tensors, writes_of, written_tensors
from torchguard.state.tensors import extent

PLAIN = (torch.Tensor, torch.nn.Parameter)

_FEW = 4
"""Up to so many written tensors, each operand is compared with each of them."""

_MAX_WORK = 10_000
"""Steps of numpy's search for a common address, about 0.1 ms; beyond it a copy is made."""


class Overlap(NamedTuple):
    """The shapes of what is written and of an operand that shares memory with it."""

    written: tuple[int, ...]
    operand: tuple[int, ...]


class Separated(NamedTuple):
    """What to call a function with, so that it computes what the code says."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    overlap: Overlap | None = None
    """The first operand that PyTorch may read after it has written there."""


# ---- where a tensor lies ----


class Memory(NamedTuple):
    """Where the elements of a strided tensor lie."""

    array: Any
    """An array of numpy at the same addresses, of any device. Its elements are not looked at."""

    kind: tuple[Any, ...]
    """Dtype, device, and whether the elements are conjugate or negative."""

    def select(self, items: tuple[Any, ...]) -> Memory:
        """Return where ``tensor[items]`` lies, for integers, slices, ``...`` and ``None``."""
        # With an ellipsis, an index that selects one element returns an array, too.
        items = items if any(each is Ellipsis for each in items) else (*items, Ellipsis)
        return Memory(self.array[items], self.kind)

    @property
    def begin(self) -> int:
        """The address of the first byte."""
        return int(self.array.__array_interface__["data"][0])

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        span = extent(self.array.shape, self.array.strides)  # in steps of a byte
        return int(self.begin + span - 1 + self.array.itemsize)


class _Interface:
    """What numpy reads of an array to know where it lies."""

    __slots__ = ("__array_interface__",)

    def __init__(self, tensor: torch.Tensor, address: int) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "data": (address, False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
        }


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Return where a tensor lies; None if it has no elements or no memory to ask for."""
    tensor = unwrapped(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    # A fake tensor, of any device, warns when it is asked for its address.
    if has_own_dispatch(tensor) and tensor.untyped_storage().device.type == "meta":
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        return None
    if not address or not tensor.numel():
        return None
    kind = (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
    return Memory(np.asarray(_Interface(tensor, address)), kind)


def are_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one ends before the other begins: the quick answer for most pairs, else False."""
    if type(one) not in PLAIN or type(other) not in PLAIN:
        return False
    try:
        distance = other.data_ptr() - one.data_ptr()
        if distance > 0:
            return one.is_contiguous() and distance >= one.nbytes
        return other.is_contiguous() and -distance >= other.nbytes > 0
    except RuntimeError:  # sparse, functorch's
        return False


def shares_memory(one: Memory, other: Memory) -> bool:
    """Whether two tensors have a byte in common; True if that is too hard to say."""
    # By addresses: tensors made of one numpy array, or through DLPack, have no common storage.
    if one.kind[1] != other.kind[1]:
        return False
    try:
        return bool(np.shares_memory(one.array, other.array, _MAX_WORK))
    except _TOO_HARD:
        return True


_TOO_HARD: type[Exception] = getattr(np, "exceptions", np).TooHardError


def _same_elements(one: Memory, other: Memory) -> bool:
    same = one.begin == other.begin and one.kind[0] == other.kind[0]
    return same and one.array.shape == other.array.shape and _steps(one) == _steps(other)


def _steps(memory: Memory) -> list[int]:
    """Return the strides of the dimensions that have more than one element."""
    sizes = zip(memory.array.strides, memory.array.shape, strict=True)
    return [step for step, size in sizes if size > 1]


def _is_part(operand: Memory, written: Memory) -> bool:
    """Whether each element of an operand is read for its own place, too: ``x[:1]`` for ``x``."""
    if operand.kind != written.kind:
        return False
    array = operand.array
    extra = array.ndim - written.array.ndim
    if extra > 0:  # as in an assignment, which leaves out leading dimensions of size 1
        if any(size != 1 for size in array.shape[:extra]):
            return False
        array = array.reshape(array.shape[extra:])
    sizes = (*(1,) * -extra, *array.shape)
    steps = (*(0,) * -extra, *array.strides)
    spread = []  # stride and size of the dimensions along which one element is read
    for size, step, own_size, own_step in zip(
        sizes, steps, written.array.shape, written.array.strides, strict=True
    ):
        if own_size > 1 and (size == 1 or not step):
            spread.append((own_step, own_size))
        elif size != own_size or (size > 1 and step != own_step):
            return False
    distance = operand.begin - written.begin
    if distance < 0:
        return False
    for step, size in sorted(spread, reverse=True):
        distance -= step * min(distance // step, size - 1) if step else 0
    return distance == 0


# ---- a call ----


class _Rule(NamedTuple):
    """Which operands a function may read while it writes."""

    elementwise: bool = True
    """If they have the elements that are written, each in its place."""

    first: bool = False
    """The first one, if it has these elements."""

    keeps: int | None = None
    """Those from this place on, if each of their elements is read for its own place, too."""


_ASSIGNS = _Rule(keeps=0)
_READS_ALL = _Rule(elementwise=False)

# Of operators that lack torch.Tag.pointwise or keep something; the schemas tell those of others.
# tests/rollback/test_overlap.py tries each of them.
_RULES = {
    # They read each element before they write it, and no other element of the same tensor.
    **dict.fromkeys(("copysign", "floor_divide", "threshold"), _Rule()),
    # Other names of operators that have the tag.
    **dict.fromkeys(("multiply", "subtract", "divide", "true_divide", "absolute"), _Rule()),
    **dict.fromkeys(("negative", "clip", "fix", "square", "heaviside", "xlogy"), _Rule()),
    **dict.fromkeys(("arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh"), _Rule()),
    **dict.fromkeys(("arctan2", "greater", "greater_equal", "less", "less_equal"), _Rule()),
    **dict.fromkeys(("not_equal", "__iadd__", "__isub__", "__imul__", "__itruediv__"), _Rule()),
    **dict.fromkeys(("__ifloordiv__", "__imod__", "__ipow__", "__ixor__"), _Rule()),
    **dict.fromkeys(("__ilshift__", "__irshift__", "__idiv__"), _Rule()),
    # Of two equal numbers these make that number, so that an element which is read for many
    # places keeps its value when its own place is written: x.copy_(x[:1]), x[:, 0] = x[2, 0].
    **dict.fromkeys(("copy", "fill", "maximum", "minimum", "fmax", "fmin"), _Rule(keeps=0)),
    **dict.fromkeys(("clamp_min", "clamp_max", "bitwise_and", "bitwise_or"), _Rule(keeps=0)),
    **dict.fromkeys(("__iand__", "__ior__"), _Rule(keeps=0)),
    # From the first operand on that is such a number, and not a mask or an index.
    "where": _Rule(keeps=1),
    "masked_fill": _Rule(keeps=2),
    "index_fill": _Rule(elementwise=False, first=True, keeps=3),
    "logcumsumexp": _Rule(elementwise=False, first=True),
}


@functools.lru_cache(maxsize=4096)
def _rule_of(function: Callable[..., Any]) -> _Rule:
    name = _name_of(function)
    if name.startswith("_foreach_"):
        return _Rule()
    names = name, name.removesuffix("_")
    found = next((_RULES[each] for each in names if each in _RULES), None)
    return found or _Rule(any(map(_all_pointwise, names)), any(map(_may_be_own_output, names)))


def is_elementwise(function: Callable[..., Any]) -> bool:
    """Whether each element of the result depends on the elements in the same place alone."""
    return _rule_of(function).elementwise


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", "")).partition(".")[0]


class Copy(enum.Enum):
    """Whether an operand is copied before the call writes."""

    NO = enum.auto()
    QUIETLY = enum.auto()
    """PyTorch computes the same without, or refuses the call."""
    WARN = enum.auto()


def copy_of(operand: torch.Tensor, written: Memory, rule: _Rule = _ASSIGNS, place: int = 0) -> Copy:
    """Say whether an operand, in its place in the call, is copied before the call writes."""
    other = memory_of(operand)
    if other is None or not shares_memory(written, other):
        return Copy.NO
    if (rule.elementwise or (rule.first and place == 0)) and _same_elements(written, other):
        return Copy.NO
    keeps = rule.keeps is not None and place >= rule.keeps and _is_part(other, written)
    return Copy.QUIETLY if keeps else Copy.WARN


def separated(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Separated:
    """Return the call's arguments, operands that overlap what is written replaced by clones."""
    if _name_of(function) in ASSIGNMENTS:
        return _separated_assignment(args, kwargs)
    writes = writes_of(function)
    if writes is not None and not writes.elements:
        writes = None
    targets = list(out_tensors(writes, kwargs))
    if writes is not None:
        targets += written_tensors(writes, args, kwargs)
    if not targets:
        return Separated(args, kwargs)
    clones, found = _cloning(function, targets)
    # The tensors that are written are passed on themselves, not as clones.
    written = () if writes is None else writes.arguments
    places = {each.position for each in written if not each.is_out}
    names = {"out", *(each.name for each in written)}
    bound = {name: _place_of(function, name) for name in kwargs}
    new_args = tuple(
        each if place in places else clones(each, place) for place, each in enumerate(args)
    )
    new_kwargs = {
        name: value if name in names or bound[name] in places else clones(value, bound[name])
        for name, value in kwargs.items()
    }
    return Separated(new_args, new_kwargs, found[0] if found else None)


def _cloning(
    function: Callable[..., Any], targets: list[torch.Tensor]
) -> tuple[Callable[[Any, int], Any], list[Overlap]]:
    """Return what clones an argument that overlaps what is written, and what it says of them."""
    rule, in_lists = _rule_of(function), function.__name__.startswith("_foreach_")
    spans = _Spans(targets) if len(targets) > _FEW else None
    memory_at = functools.cache(lambda index: memory_of(targets[index]))
    found: list[Overlap] = []

    def clone(operand: Any, place: int, number: int = -1) -> Any:
        """Return an operand, or a clone of it."""
        if not isinstance(operand, torch.Tensor) or (spans and not spans.meet(operand)):
            return operand
        for index, target in enumerate(targets):
            # Of lists, each element is written as its own operand is read, not another's.
            its_rule = _READS_ALL if in_lists and index != number else rule
            if (operand is target and its_rule.elementwise) or are_apart(target, operand):
                continue
            memory = memory_at(index)
            copy = Copy.NO if memory is None else copy_of(operand, memory, its_rule, place)
            if copy is not Copy.NO:
                if copy is Copy.WARN:
                    found.append(Overlap(tuple(target.shape), tuple(operand.shape)))
                return operand.clone()
        return operand

    def clones(value: Any, place: int) -> Any:
        """Return an argument, or one with clones."""
        if not isinstance(value, (tuple, list)):
            return clone(value, place)
        items = [clone(each, place, number) for number, each in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return items if isinstance(value, list) else tuple(items)

    return clones, found


@functools.lru_cache(maxsize=4096)
def _place_of(function: Callable[..., Any], name: str) -> int:
    """Return in which place an argument is that is given by name; behind all if none is known."""
    name = "self" if name == "input" else name  # as schemas call it
    schemas = operator_schemas(_name_of(function))
    named = [[each.name for each in schema.arguments] for schema in schemas]
    return next((names.index(name) for names in named if name in names), _LAST)


_LAST = 1_000


class _Spans:
    """Where many tensors lie, in order: most operands of a list lie between them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        memories = filter(None, map(memory_of, tensors))
        spans = sorted((memory.begin, memory.end) for memory in memories)
        self._begins = [begin for begin, _ in spans]
        self._ends = list(itertools.accumulate((end for _, end in spans), max))

    def meet(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor may share memory with one of them."""
        memory = memory_of(tensor)
        if memory is None:
            return False
        before = bisect.bisect_left(self._begins, memory.end)  # those that begin before its end
        return before > 0 and self._ends[before - 1] > memory.begin


def _may_be_own_output(name: str) -> bool:
    """Whether ``out=`` may be the first operand: ``x.cumsum_(0)`` is ``cumsum(x, 0, out=x)``.

    PyTorch computes a method that writes in place with the kernel of ``out=``.
    """
    in_place = _parameters(f"{name}_")
    return bool(in_place) and not in_place.isdisjoint(_parameters(name))


def _parameters(name: str) -> set[tuple[str, ...]]:
    """Return the names of the arguments of each overload without ``out=``."""
    return {
        tuple(argument.name for argument in schema.arguments)
        for schema in operator_schemas(name)
        if not any(argument.is_out for argument in schema.arguments)
    }


def _all_pointwise(name: str) -> bool:
    """Whether the overloads of an operator that take the most tensors are tagged."""
    by_count: dict[int, list[Any]] = {}
    for schema in operator_schemas(name):
        if not any(argument.is_out for argument in schema.arguments):
            count = sum(str(argument.type) == "Tensor" for argument in schema.arguments)
            by_count.setdefault(count, []).append(schema)
    most = max(by_count, default=0)
    return most > 0 and all(torch.Tag.pointwise in tags_of(each) for each in by_count[most])


# ---- x[index] = value ----

ASSIGNMENTS = frozenset(("__setitem__", "setitem"))
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def _separated_assignment(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Separated:
    """Do what :func:`separated` does for ``x[index] = value``, which writes to a part."""
    if kwargs or len(args) != 3 or not isinstance(args[0], torch.Tensor):  # noqa: PLR2004
        return Separated(args, kwargs)
    tensor, index, value = args
    items = index if isinstance(index, tuple) else (index,)
    tensors = [each for each in (*items, value) if isinstance(each, torch.Tensor)]
    if all(are_apart(tensor, each) for each in tensors):
        return Separated(args, kwargs)
    memory = memory_of(tensor)
    if memory is None or _is_masked_fill(tensor, items, value):
        return Separated(args, kwargs)
    if not all(map(_is_basic, items)):
        return _separated_at_tensors(tensor, index, value, memory)
    if isinstance(value, torch.Tensor):
        # PyTorch says what is wrong with an index.
        with contextlib.suppress(IndexError, RuntimeError):
            # It reads the number of an index that is a tensor of one integer before it writes.
            with computing_unseen(items):
                selected = memory.select(tuple(map(_number, items)))
            copy = copy_of(value, selected)
            if copy is not Copy.NO:
                overlap = Overlap(selected.array.shape, tuple(value.shape))
                warned = overlap if copy is Copy.WARN else None
                return Separated((tensor, index, value.clone()), {}, warned)
    return Separated(args, kwargs)


def _separated_at_tensors(
    tensor: torch.Tensor, index: Any, value: Any, memory: Memory
) -> Separated:
    """Separate an assignment whose index has masks, lists or tensors of integers."""
    overlap: Overlap | None = None

    def clone(operand: Any) -> Any:
        nonlocal overlap
        if not isinstance(operand, torch.Tensor) or copy_of(operand, memory, _READS_ALL) is Copy.NO:
            return operand
        overlap = overlap or Overlap(tuple(tensor.shape), tuple(operand.shape))
        return operand.clone()

    items = index if isinstance(index, tuple) else (index,)
    new = tuple(map(clone, items))
    args = (tensor, new if isinstance(index, tuple) else new[0], clone(value))
    return Separated(args, {}, overlap)


def _is_basic(item: Any) -> bool:
    """Whether an item of an index selects a view; a bool is a mask."""
    if isinstance(item, torch.Tensor):
        return item.dim() == 0 and item.dtype in _SIGNED
    kinds = (int, np.integer, slice, type(None), type(...))
    return isinstance(item, kinds) and not isinstance(item, bool)


def _number(item: Any) -> Any:
    return int(item) if isinstance(item, torch.Tensor) else item


def _is_masked_fill(tensor: torch.Tensor, items: tuple[Any, ...], value: Any) -> bool:
    """Whether it is ``x[mask] = v`` with one element ``v``, which PyTorch reads first."""
    return (
        len(items) == 1
        and isinstance(items[0], torch.Tensor)
        and items[0].dtype is torch.bool
        and isinstance(value, torch.Tensor)
        and value.numel() == 1
        and tensor.is_cpu
        and value.is_cpu
    )
