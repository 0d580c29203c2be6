"""Which calls of a compiled graph are checked, and what other threads run meanwhile."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchguard._torch import symbols_in
from torchguard.verification.options import Options
from torchguard.verification.warning import warn_of

if TYPE_CHECKING:
    from torchguard.verification.check import Check

__all__ = ["Sizes", "checked_calls", "sizes_of"]

_SizesOf = Callable[[Sequence[Any]], Hashable]


class Sizes:
    """The sizes with which a graph with dynamic shapes was checked.

    A combination of sizes holds one number for each symbol of the graph: dims, strides, and
    integers that Dynamo has made dynamic. Up to :attr:`EACH` combinations are checked one by one.
    From then on a combination is trusted if the code that a compiler makes can't tell it from
    those that were checked: if one of them had numbers of the same lengths in binary, and
    each of its numbers leaves a remainder by :attr:`WIDEST` that one of them left too. A loop of
    inductor runs over a multiple of the sizes, or a constant more. Its vectorized part begins
    where that reaches the width of a vector, its tail is what a vector's width leaves over,
    and Triton asks for divisibility by 16; how the rest is split among threads and blocks
    depends on the magnitude.

    A graph that writes its inputs may read what it has overwritten. That hangs on how far
    apart the program puts both, which may be any function of the sizes, so nothing follows from
    other sizes. Such a graph is checked with each combination up to :attr:`EACH_WRITING`; when
    there are more, inductor is told to keep the writes out of the graph.
    """

    EACH = 64
    EACH_WRITING = 256
    WIDEST = 64
    """Elements in the widest vector: 64 of one byte in the 512 bits of AVX-512."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._checks: Counter[Hashable] = Counter()
        self._alike: Counter[Hashable] = Counter()

    def lacking(self, sizes: Hashable, writes: bool) -> bool:
        """Whether a call with these sizes is to be checked, of a graph that writes its inputs."""
        calls, checks = self._options.calls, self._checks
        if checks[sizes] >= calls:
            return False
        if self._options.every == "shape" or writes or sizes in checks or len(checks) < self.EACH:
            return True
        return any(self._alike[trait] < calls for trait in self._traits(sizes))

    @property
    def too_many(self) -> bool:
        """Whether there is no more to be checked of a graph that writes its inputs."""
        return self._options.every == "auto" and len(self._checks) >= self.EACH_WRITING

    def checked(self, sizes: Hashable) -> None:
        """Note that a call with these sizes was checked."""
        self._checks[sizes] += 1
        self._alike.update(self._traits(sizes))

    def _traits(self, sizes: Hashable) -> Iterator[Hashable]:
        numbers = list(_numbers(sizes))
        octaves = [(number < 0, number.bit_length()) for number in numbers]
        yield tuple(octaves)
        for place, (number, octave) in enumerate(zip(numbers, octaves, strict=True)):
            yield place, "remainder", number % self.WIDEST
            yield place, "magnitude", octave, abs(number) >> max(0, octave[1] - 3)
            yield place, "alignment", octave, math.gcd(number, 16)


def _numbers(sizes: Any) -> Iterator[int]:
    if isinstance(sizes, tuple):  # torch.Size is one
        for size in sizes:
            yield from _numbers(size)
    elif isinstance(sizes, int):
        yield sizes


def sizes_of(examples: Sequence[Any], traced: Sequence[Any]) -> _SizesOf | None:
    """Return what reads the sizes from the inputs of a call; None for a graph with static shapes.

    Dynamo gives a graph every symbol of its inputs as an integer of its own.

    Args:
        examples: what the backend was given; symbolic integers in place of those integers.
        traced: the fake inputs with which Dynamo traced the graph, where it says so.
    """
    places = [place for place, value in enumerate(examples) if isinstance(value, torch.SymInt)]
    given = symbols_in([examples[place] for place in places])
    if symbols_in(traced) - given:
        return _shapes
    return operator.itemgetter(*places) if places else None


def _shapes(inputs: Sequence[Any]) -> Hashable:
    return tuple(
        (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else value
        for value in inputs
        if isinstance(value, (torch.Tensor, int))
    )


def checked_calls(check: Check, options: Options, sizes: _SizesOf | None) -> Callable[..., Any]:
    """Return what Dynamo calls: the compiled graph, some calls of which are checked."""
    if sizes is None or options.every == "graph":
        return _static(check, options.calls)
    return _dynamic(check, options, sizes)


def _static(check: Check, calls: int) -> Callable[..., Any]:
    """Check the first calls; from then on, passing the call on is all that is left."""
    remaining = calls
    target: Callable[..., Any]

    def checked(*inputs: Any) -> Any:
        nonlocal target, remaining
        if not check.begin():
            return check.eager(*inputs)
        warning = None
        try:
            if remaining > 0 and not check.finished:
                warning = check(inputs)
                remaining -= 1
            trusted = check.trusted
            if remaining <= 0 or check.finished:
                target = trusted  # nothing of the check stays alive
        finally:
            check.end()
        if warning is not None:
            warn_of(warning)  # where warnings are errors, it raises
        return trusted(*inputs)

    target = checked

    def run(*inputs: Any) -> Any:
        return target(*inputs)

    return run


class _All(set[Hashable]):
    """Contains everything."""

    def __contains__(self, _: object) -> bool:
        return True

    def add(self, _: Hashable) -> None:
        """Keep nothing."""


_MOST_KNOWN = 10_000
"""How many combinations are kept for a quick answer: an integer may differ in every call."""


class _Dynamic:
    """The calls of a graph with dynamic shapes: those with sizes it was not checked with."""

    def __init__(self, check: Check, options: Options, sizes_of_call: _SizesOf) -> None:
        self._check = check
        self._options = options
        self._sizes_of = sizes_of_call
        self._restart()

    def _restart(self) -> None:
        """Forget all sizes: what runs now was checked with none of them."""
        self._checked = Sizes(self._options)
        known: set[Hashable] = set()
        # One name for both: no call may find sizes known that another function was checked with.
        self.state = (known, self._check.trusted)

    def __call__(self, *inputs: Any) -> Any:
        check = self._check
        if not check.begin():
            return check.eager(*inputs)
        try:
            warning = self._look(inputs)
            trusted = check.trusted
        except BaseException:
            self._restart()
            raise
        finally:
            check.end()
        if warning is not None:
            warn_of(warning)
        return trusted(*inputs)

    def _look(self, inputs: Sequence[Any]) -> str | None:
        check, warning = self._check, None
        sizes = self._sizes_of(inputs)
        if sizes not in self.state[0] and self._checked.lacking(sizes, check.writes_inside):
            many = self._checked.too_many and check.writes_inside
            if not (many and check.write_outside(inputs)):
                warning = check(inputs)
            if check.trusted is not self.state[1]:
                self._restart()
            self._checked.checked(sizes)
        if check.finished:
            self.state = (_All(), check.trusted)
        elif len(self.state[0]) >= _MOST_KNOWN:
            self.state = (set(), check.trusted)
        if not self._checked.lacking(sizes, check.writes_inside):
            self.state[0].add(sizes)
        return warning


def _dynamic(check: Check, options: Options, sizes_of_call: _SizesOf) -> Callable[..., Any]:
    """Look up the sizes of each call, and check those that are new."""
    calls = _Dynamic(check, options, sizes_of_call)

    def run(*inputs: Any) -> Any:
        known, trusted = calls.state
        if sizes_of_call(inputs) in known:
            return trusted(*inputs)
        return calls(*inputs)

    return run
