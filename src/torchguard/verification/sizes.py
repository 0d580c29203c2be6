"""Which calls of a graph with dynamic shapes are checked: those with sizes that are new."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torchguard.verification.check import GraphCheck
from torchguard.verification.graph import SizesOf
from torchguard.verification.options import Options

__all__ = ["Sizes", "checked_calls_of_new_sizes"]


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
        if (
            self._options.check_each == "shape"
            or writes
            or sizes in checks
            or len(checks) < self.EACH
        ):
            return True
        return any(self._alike[trait] < calls for trait in self._traits(sizes))

    @property
    def too_many(self) -> bool:
        """Whether there is no more to be checked of a graph that writes its inputs."""
        return self._options.check_each == "auto" and len(self._checks) >= self.EACH_WRITING

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


class _All(set[Hashable]):
    """Contains everything."""

    def __contains__(self, _: object) -> bool:
        return True

    def add(self, _: Hashable) -> None:
        """Keep nothing."""


_MOST_KNOWN = 10_000
"""How many combinations are kept for a quick answer: an integer may differ in every call."""


class _Calls:
    """The calls of a graph with dynamic shapes: those with sizes it was not checked with."""

    def __init__(self, check: GraphCheck, options: Options, sizes_of_call: SizesOf) -> None:
        self._check = check
        self._options = options
        self._sizes_of = sizes_of_call
        self._restart()

    def _restart(self) -> None:
        """Forget all sizes: what runs now was checked with none of them."""
        self._checked = Sizes(self._options)
        known: set[Hashable] = set()
        # One name for both: no call may find sizes known that another function was checked with.
        self.state = (known, self._check.runs)

    def look(self, inputs: tuple[Any, ...]) -> str | None:
        """Check the call if its sizes are new; return the text of a warning."""
        try:
            return self._look(inputs)
        except BaseException:
            self._restart()
            raise

    def _look(self, inputs: tuple[Any, ...]) -> str | None:
        check, warning = self._check, None
        sizes = self._sizes_of(inputs)
        if sizes not in self.state[0] and self._checked.lacking(sizes, check.mutates_inside):
            many = self._checked.too_many and check.mutates_inside
            if not (many and check.mutate_outside(inputs)):
                warning = check.check(inputs)
            if check.runs is not self.state[1]:
                self._restart()
            self._checked.checked(sizes)
        if check.settled:
            self.state = (_All(), check.runs)
        elif len(self.state[0]) >= _MOST_KNOWN:
            self.state = (set(), check.runs)
        if not self._checked.lacking(sizes, check.mutates_inside):
            self.state[0].add(sizes)
        return warning


def checked_calls_of_new_sizes(
    check: GraphCheck, options: Options, sizes_of_call: SizesOf
) -> Callable[..., Any]:
    """Return what Dynamo calls: the compiled graph, whose calls with new sizes are checked."""
    calls = _Calls(check, options, sizes_of_call)

    def run(*inputs: Any) -> Any:
        known, trusted = calls.state
        if sizes_of_call(inputs) in known:
            return trusted(*inputs)
        return check.call(inputs, calls.look)

    return run
