"""The other data that a check runs a function on: of another sign, whole numbers, near thresholds.

A threshold is a number beyond which an operator goes by another rule. ``(x - 5).relu().mean(1)`` is
0 with padding and without as long as no number is above 5: data that lies on one side of a
threshold shows nothing of data on the other. So the operators that have one are watched while the
check runs on several data, and what they were given leads back to the numbers of the input that
would reach the threshold, by a straight line through what was seen.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchguard.bucketing.decorator.plan import Call, Input

_LARGER = 16.0
_SMALLER = 1 / 64
_WHOLE = 31
"""A prime number: no dim that is counted along has all its numbers alike."""

_ROUNDS = 2
"""How often larger numbers are tried: the way to a threshold is guessed, and may be longer."""

_CANDIDATES = 16
"""Of more numbers that reach thresholds, the smallest are tried."""

_STEPS = {
    # rounding
    *("round", "floor", "ceil", "trunc", "frac", "floor_divide", "fmod", "remainder"),
    # comparing
    *("eq", "ne", "gt", "ge", "lt", "le", "isin", "sign", "sgn", "all", "any", "nonzero"),
    *("count_nonzero", "searchsorted", "bucketize", "histc", "bincount"),
    # choosing
    *("max", "maximum", "amax", "argmax", "cummax", "min", "minimum", "amin", "argmin", "cummin"),
    *("aminmax", "mode", "median", "nanmedian", "kthvalue", "sort", "argsort", "topk"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
"""Operators that give one answer to much data, and another one beyond: they round, compare, or
choose. Data that is all alike to them shows nothing of other data."""


# ---- other data ----


def may_be_probabilities(tensor: torch.Tensor) -> bool:
    """Whether another value could end the process: kernels of an accelerator assert 0 <= p <= 1."""
    return bool(((tensor >= 0) & (tensor <= 1)).all())


def _may_be_indices(tensor: torch.Tensor) -> bool:
    """Likewise: they assert that an index lies within what it points into."""
    return bool(((tensor >= 0) & (tensor == tensor.trunc())).all())


class OtherValues(NamedTuple):
    """A way to make other data of the same kind."""

    description: str
    """Of the data, in an error: "where {label} ..."."""
    of_floats: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    of_integers: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    keeps_sign: bool = False
    """Whether what is positive stays so, and between 0 and 1 what is."""

    def made(self, inputs: Iterable[Input], call: Call) -> Call | None:
        """Return the call with other data in these inputs; None if nothing changes."""
        new: dict[int, Any] = {}
        with torch.no_grad(), contextlib.suppress(RuntimeError, NotImplementedError):
            for each in inputs:
                tensor = call.leaves[each.index]
                other = self._of(tensor.detach())
                if other is not None and not torch.equal(other, tensor):
                    new[each.index] = other.requires_grad_(tensor.requires_grad)
        return call.with_leaves(new) if new else None

    def _of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.dtype == torch.bool or tensor.dtype.is_complex or not tensor.numel():
            return None
        if not tensor.dtype.is_floating_point:
            return self.of_integers(tensor)
        on_accelerator = not tensor.is_cpu and not self.keeps_sign
        if on_accelerator and (may_be_probabilities(tensor) or _may_be_indices(tensor)):
            return None
        if not bool(tensor.any()):
            tensor = torch.ones_like(tensor)
        other = self.of_floats(tensor)
        return other if torch.equal(other.isfinite(), tensor.isfinite()) else None


def _positive(numbers: torch.Tensor) -> torch.Tensor:
    """Put the largest number in the place of those that are not positive, if it is."""
    return torch.where((numbers <= 0) & (numbers.max() > 0), numbers.max(), numbers)


def _negative(numbers: torch.Tensor) -> torch.Tensor:
    return -_positive(-numbers)


def _exchanged(numbers: torch.Tensor) -> torch.Tensor:
    """Put each number that is there in the place of another, and turn the order around."""
    present, places = torch.unique(numbers, return_inverse=True)
    exchanged: torch.Tensor = present.roll(1)[places].flip(-1)
    return exchanged


def _order(values: torch.Tensor) -> torch.Tensor:
    """Return a number for each place of a tensor, in an order without a rule."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(values.numel(), generator=generator, device="cpu")
    return order.view(values.shape).to(values.device)


def _whole(values: torch.Tensor, factor: float = 1) -> torch.Tensor:
    """Make whole numbers from 1 to 31, each as often as the others, times a factor."""
    return ((_order(values) % _WHOLE + 1) * factor).to(values.dtype)


def _of_either_sign(values: torch.Tensor, factor: float = 1) -> torch.Tensor:
    whole = _whole(values)
    return torch.where(whole % 2 == 0, whole, -whole) * factor


def _across(values: torch.Tensor, beyond: Beyond, factor: float) -> torch.Tensor:
    """Make whole numbers of either sign, far and near, and those that reach the thresholds."""
    made = _of_either_sign(values, factor)
    if not beyond.missed:
        return made
    part = _order(values)
    reaching = torch.tensor(beyond.missed[:_CANDIDATES], dtype=values.dtype, device=values.device)
    made = torch.where(part % 3 == 1, _of_either_sign(values), made)
    return torch.where(part % 3 == 0, reaching[part // 3 % len(reaching)], made)


def _spread(numbers: torch.Tensor) -> torch.Tensor:
    """Put the numbers that are there, each as often as the others; on a CPU those between, too."""
    present = torch.unique(numbers[numbers > 0])
    if not present.numel():
        return numbers.clone()
    if numbers.is_cpu:  # one that is not valid raises, on an accelerator it ends the process
        present = torch.arange(1, int(present[-1].clamp(max=_WHOLE)) + 1, dtype=numbers.dtype)
    spread: torch.Tensor = present[_whole(numbers).long() % len(present)]
    if spread.dim() > 1 and len(spread) > 1:
        spread[-1] = spread[-1, ..., :1]  # a row of one number, for what asks for all of a row
    return spread


_SIGNS = (
    OtherValues("is positive", lambda x: _positive(x.abs()), _positive, keeps_sign=True),
    OtherValues("is negative", lambda x: -x.abs(), _negative),
)
"""They find what other padding can't: one negative number, and ``(x > 0).all()`` is False whatever
the padding holds."""


def _whole_numbers(beyond: Beyond, factor: float) -> tuple[OtherValues, ...]:
    """Return whole numbers, the least of them beyond every threshold.

    They find what data can't that is all alike once it is rounded: ``x.round().mode(1)`` of
    numbers below 0.5 is 0 as long as more of them are real than padded.
    """
    return (
        OtherValues("is a positive whole number", lambda x: _whole(x, factor), _spread),
        OtherValues("is a negative whole number", lambda x: -_whole(x, factor)),
        OtherValues("is a whole number of either sign", lambda x: _across(x, beyond, factor)),
    )


def _near(compared: Sequence[float]) -> OtherValues:
    """Return the integers that a function compares its input with, and those beside them."""
    near = [round(each) + step for each in compared[:_CANDIDATES] for step in (0, 1, -1)]

    def made(numbers: torch.Tensor) -> torch.Tensor:
        return _chosen(numbers, [*near, *torch.unique(numbers).tolist()])

    description = "is near what the function compares it with"
    return OtherValues(description, of_integers=made, keeps_sign=True)


def _above(compared: float) -> OtherValues:
    """Return integers above those that a function compares its input with."""
    least = math.ceil(compared) + 1

    def made(numbers: torch.Tensor) -> torch.Tensor:
        above = torch.unique(numbers[numbers >= least]).tolist()
        return _chosen(numbers, above or [least, least + 1, least + 2])

    description = "is above all that the function compares it with"
    return OtherValues(description, of_integers=made, keeps_sign=True)


def _chosen(numbers: torch.Tensor, among: Iterable[int]) -> torch.Tensor:
    """Put other integers that may come, each about as often as the others."""
    # One that is not valid raises, on an accelerator it ends the process. Ones may be a mask.
    if not numbers.is_cpu or bool((numbers == 1).all()):
        return numbers.clone()
    least = min(int(numbers.min()), 1)
    valid = dict.fromkeys(each for each in among if each >= least)
    chosen: torch.Tensor = torch.tensor([*valid], dtype=numbers.dtype)[_order(numbers) % len(valid)]
    return chosen


_MAGNITUDES = (
    OtherValues(
        "is 64 times smaller and in reverse order",
        lambda x: (x * _SMALLER).flip(tuple(range(x.dim()))),
        lambda x: x[..., :1].expand_as(x).clone(),
        keeps_sign=True,
    ),
    OtherValues("is 16 times larger and has the other sign", lambda x: x * -_LARGER, _exchanged),
)


def other_values(
    thresholds: Thresholds,
    agreed: Callable[..., list[bool]],
    operators: Iterable[str],
    *,
    relies_on_0: bool,
) -> Iterator[OtherValues]:
    """Yield the other data to try on a function, each once that before it was tried.

    Args:
        thresholds: those that were seen, and that are while it is tried.
        agreed: returns what any rank has found.
        operators: the names of those that the function has run.
        relies_on_0: whether the answer depends on what the padding holds.
    """
    yield from _SIGNS
    steps = any(name.rpartition("::")[2].rstrip("_") in _STEPS for name in operators)
    floats, integers, tried = Beyond(), Beyond(), 0.0
    for _ in range(_ROUNDS):
        if thresholds.runs:
            floats = thresholds.beyond(of_integers=False)
            integers = thresholds.beyond(of_integers=True)
        # A power of 2, so that they are the same numbers in every dtype.
        factor = 2.0 ** math.ceil(math.log2(floats.farthest + 1))
        if tried:
            wanted = bool(floats.missed) and factor > tried
        else:
            wanted = steps or relies_on_0 or bool(floats.missed or integers.missed)
        wanted, near, above = agreed(wanted, bool(integers.missed), integers.farthest > 1)
        if not wanted:
            break
        yield from _whole_numbers(floats, factor)
        tried = factor
    if near:
        yield _near(integers.missed)
    if above:
        yield _above(integers.farthest)
    if relies_on_0:
        yield from _MAGNITUDES


# ---- thresholds: the ranges of what operators compare ----

_FARTHEST = 2.0**16
"""Thresholds further away are not looked for: a mask of scores adds -10,000 or -3e38, and
numbers as large as that make of every softmax a maximum."""

_EPSILON = 1e-4
"""A smaller threshold, other than 0, keeps a divisor from being 0."""


class _Range(NamedTuple):
    """The smallest and the largest of some numbers."""

    low: float
    high: float


def _range_of(value: Any) -> _Range | None:
    """Return the range of a number, or of the finite ones of a tensor; None if there is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _Range(value, value) if math.isfinite(value) else None
    if type(value) not in {torch.Tensor, torch.nn.Parameter} or not _has_numbers(value):
        return None
    value = value.detach()
    if value.is_floating_point():
        value = value[value.isfinite()]
    if not value.numel():
        return None
    low, high = torch.stack(torch.aminmax(value)).tolist()
    return _Range(low, high)


def _has_numbers(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return is_plain and tensor.dtype != torch.bool and not tensor.is_complex()


def _is_floating(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else value % 1 != 0


def _union(ranges: Iterable[_Range]) -> _Range:
    lows, highs = zip(*ranges, strict=True)
    return _Range(min(lows), max(highs))


# ---- what an operator compares ----


class _Seen(NamedTuple):
    """Two things that an operator has compared in one run."""

    name: str
    value: _Range
    threshold: _Range
    is_met: bool
    """Whether they were equal somewhere, for an operator that asks for no more."""
    of_integers: bool


def _with_constants(*constants: float) -> Callable[..., Iterator[tuple[Any, Any]]]:
    def pairs(value: Any, *_: Any, **__: Any) -> Iterator[tuple[Any, Any]]:
        return ((value, constant) for constant in constants)

    return pairs


def _with_the_rest(value: Any, *rest: Any, **named: Any) -> Iterator[tuple[Any, Any]]:
    return ((value, each) for each in (*rest, *named.values()))


def _if_it_rounds(value: Any, *rest: Any, **named: Any) -> Iterator[tuple[Any, Any]]:
    if named.get("rounding_mode") is not None:  # of div
        yield from _with_the_rest(value, *rest)
    to = named.get("dtype")  # of _to_copy
    if to is not None and not to.is_floating_point and value.is_floating_point():
        yield from _with_constants(-1.0, 1.0)(value)


_PAIRS: dict[str, Callable[..., Iterator[tuple[Any, Any]]]] = {
    **dict.fromkeys(
        (
            *("eq", "ne", "gt", "ge", "lt", "le", "isin", "bucketize", "searchsorted"),
            *("maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max"),
            *("threshold", "hardtanh", "hardshrink", "softshrink", "heaviside"),
            *("remainder", "fmod", "floor_divide", "smooth_l1_loss", "huber_loss"),
        ),
        _with_the_rest,
    ),
    **dict.fromkeys(
        (
            *("relu", "leaky_relu", "_prelu_kernel", "elu", "gelu", "silu", "mish", "softplus"),
            *("sigmoid", "log_sigmoid_forward", "tanh", "erf", "abs", "sign", "sgn"),
        ),
        _with_constants(0.0),
    ),
    **dict.fromkeys(("round", "floor", "ceil", "trunc"), _with_constants(-1.0, 1.0)),
    **dict.fromkeys(("hardsigmoid", "hardswish"), _with_constants(-3.0, 3.0)),
    **dict.fromkeys(("div", "_to_copy"), _if_it_rounds),
}
"""By operator, what it compares with what."""

_EQUALITIES = {"eq", "ne", "isin"}


OPERATORS = frozenset(_PAIRS)

# ---- from there to the input ----


class _Run(NamedTuple):
    given: Sequence[Any]
    ranges: list[_Range | None]
    seen: list[_Seen]


class Beyond(NamedTuple):
    """The numbers of an input that reach the thresholds of what is computed from it."""

    farthest: float = 0.0
    """The largest absolute one."""
    missed: tuple[float, ...] = ()
    """Those on one side of which no data has been yet."""


@dataclass
class Thresholds:
    """What operators have compared, in runs on different data."""

    runs: list[_Run] = field(default_factory=list)

    def note(self, given: Sequence[Any], name: str, args: Any, kwargs: Any) -> None:
        """Note what an operator compares.

        Args:
            given: the inputs that hold other data in each run; a new list begins a run.
            name: of the operator, one of ``OPERATORS``.
            args: its own.
            kwargs: likewise.
        """
        if not self.runs or self.runs[-1].given is not given:
            self.runs.append(_Run(given, [_range_of(each) for each in given], []))
        # What can't be read, such as an 8-bit type, is not noted.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            for one, other in _PAIRS[name](*args, **kwargs):
                value, threshold = _range_of(one), _range_of(other)
                if value is not None and threshold is not None:
                    met = name in _EQUALITIES and bool(torch.isin(one, other).any())
                    integers = not (_is_floating(one) or _is_floating(other))
                    self.runs[-1].seen.append(_Seen(name, value, threshold, met, integers))

    def beyond(self, *, of_integers: bool) -> Beyond:
        """Return the numbers that reach thresholds, for the inputs of integers or of floats."""
        # Another branch of the function has other operators.
        names = [each.name for each in self.runs[0].seen]
        runs = [run for run in self.runs if [each.name for each in run.seen] == names]
        ranges = [
            numbers
            for run in runs
            for each, numbers in zip(run.given, run.ranges, strict=True)
            if numbers is not None and _is_floating(each) is not of_integers
        ]
        if not ranges:
            return Beyond()
        inputs = _union(ranges)
        if inputs.low == inputs.high:  # nothing is known of any other number
            return Beyond(missed=inputs[:1])
        reaching, missed = [0.0], set()
        for seen in zip(*(run.seen for run in runs), strict=True):
            sides = _sides(seen)
            if sides is None:
                continue
            values, thresholds = sides
            reached = _union(values)
            for threshold in set(_union(thresholds)):
                if 0 < abs(threshold) < _EPSILON:
                    continue
                numbers = _reaching(threshold, reached, inputs)
                is_shown = reached.low < threshold < reached.high
                if seen[0].name in _EQUALITIES:
                    is_shown = any(each.is_met for each in seen)
                    numbers.append(threshold)  # of what was rounded first
                if seen[0].of_integers or not of_integers:
                    reaching += numbers
                if not is_shown:
                    missed.update(numbers)
        return Beyond(max(map(abs, reaching)), tuple(sorted(missed, key=abs)))


def _sides(seen: Sequence[_Seen]) -> tuple[list[_Range], list[_Range]] | None:
    """Return what depends on the data, and what it is compared with, in each run; None if none."""
    values, thresholds = [each.value for each in seen], [each.threshold for each in seen]
    changes = [len(set(ranges)) > 1 for ranges in (values, thresholds)]
    # What is even, such as a square, does not change with the sign of the data; positions do
    # not with any.
    if not any(changes) and (len(seen) == 1 or not seen[0].of_integers):
        changes = [any(each.low < each.high for each in ranges) for ranges in (values, thresholds)]
    if not any(changes):
        return None
    if all(changes):  # ``x > y`` is ``x - y > 0``
        gaps = [
            _Range(value.low - threshold.high, value.high - threshold.low)
            for value, threshold in zip(values, thresholds, strict=True)
        ]
        return gaps, [_Range(0.0, 0.0)]
    return (thresholds, values) if changes[1] else (values, thresholds)


def _reaching(threshold: float, reached: _Range, inputs: _Range) -> list[float]:
    """Return the numbers of the input for which a value gets to a threshold.

    The value is taken for a straight line that rises, or falls, from one end of the inputs that
    were seen to the other.
    """
    rise, width = reached.high - reached.low, inputs.high - inputs.low
    if reached == inputs and abs(threshold) <= _FARTHEST:
        return [threshold]
    if rise <= 0 or width <= 0:
        return []
    way = (threshold - reached.low) / rise * width
    return [each for each in (inputs.low + way, inputs.high - way) if abs(each) <= _FARTHEST]
