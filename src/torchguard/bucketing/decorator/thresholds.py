"""Thresholds: the numbers beyond which an operator goes by another rule.

``(x - 5).relu().mean(1)`` is 0 with padding and without as long as no number is above 5: data that
lies on one side of a threshold shows nothing of data on the other. So the operators that have one
are watched while the check runs on several data, and what they were given leads back to the
numbers of the input that would reach the threshold, by a straight line through what was seen.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["OPERATORS", "Beyond", "Thresholds"]

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
