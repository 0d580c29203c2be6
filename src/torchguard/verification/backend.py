"""The backend for ``torch.compile``: compiles with another one, and checks what comes out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import fx

from torchguard._public import public
from torchguard._torch import (
    fake_inputs,
    has_own_dispatch,
    inductor_backend,
    inductor_draws_like_eager,
    symbols_of,
    tracing_context,
)
from torchguard.verification.fallback import (
    UNCOMPILED,
    Compiler,
    Fallback,
    TracedGraph,
    fallbacks_of,
)
from torchguard.verification.graph import (
    SYMBOLIC,
    SizesOf,
    copy_graph,
    numbers_in,
    owned_tensors,
    place_of,
    sizes_of,
    why_not_twice,
)
from torchguard.verification.report import ALL_GRAPHS, GraphRecord, VerificationReport

if TYPE_CHECKING:
    from torchguard.verification.check import GraphCheck

OnMismatch = Literal["fallback", "raise", "warn"]
CheckEach = Literal["auto", "graph", "shape"]


@dataclass(frozen=True)
class Options:
    """How a graph is checked."""

    calls: int = 1
    on_mismatch: OnMismatch = "fallback"
    max_bytes: int | None = None
    check_each: CheckEach = "auto"
    group: Any = None
    """The ranks that take the same fallback."""

    run_twice: Collection[str] = ()
    """Custom operators that have no effect but on their tensors."""

    def __post_init__(self) -> None:
        if type(self.calls) is not int or self.calls < 1:
            raise ValueError(f"verified: calls is {self.calls!r}, expected a number of 1 or more")
        for name, known in (("on_mismatch", OnMismatch), ("check_each", CheckEach)):
            if getattr(self, name) not in get_args(known):
                choices = " or ".join(map(repr, get_args(known)))
                raise ValueError(f"verified: {name} is {getattr(self, name)!r}, expected {choices}")
        if self.max_bytes is not None and (type(self.max_bytes) is not int or self.max_bytes < 0):
            raise ValueError(
                f"verified: max_bytes is {self.max_bytes!r}, expected a number of bytes or None"
            )
        # By what it is not: a torch built without torch.distributed has no class to compare with.
        if self.group is not True and isinstance(self.group, (str, int, float, list, tuple)):
            raise TypeError(
                f"verified: group is {self.group!r}, expected a process group, such as "
                "torch.distributed.group.WORLD, True for all ranks, or None"
            )
        # A string is a collection of its letters, and equal options make equal backends.
        names = None if isinstance(self.run_twice, str) else tuple(self.run_twice)
        if names is None or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"verified: run_twice is {self.run_twice!r}, expected names of operators: "
                'run_twice=["namespace::name"]'
            )
        unnamed = [name for name in names if not all(name.partition("::"))]
        if unnamed:
            raise ValueError(
                f"verified: run_twice has {unnamed[0]!r}, expected the name of an operator with "
                'its namespace: "namespace::name"'
            )
        object.__setattr__(self, "run_twice", frozenset(names))


class VerifiedBackend:
    """A backend for ``torch.compile``; :func:`verified_backend` makes it."""

    __name__ = "torchguard"  # what Dynamo's messages call it

    def __init__(
        self,
        inner: str | Compiler,
        options: Options,
        *,
        mode: str | None = None,
        inner_options: dict[str, Any] | None = None,
        dynamic: bool | None = None,
        function: str | None = None,
    ) -> None:
        self._inner = inner
        self._function = function  # the name of what the user has decorated
        self.checks = options
        """How graphs are checked."""
        given = {"mode": mode, "options": inner_options}
        self._settings = {name: value for name, value in given.items() if value is not None}
        self._dynamic = dynamic
        self._own_fallbacks: tuple[Fallback, ...] | None = None
        self._graphs: list[GraphRecord] = []
        if self._settings:
            self.fallbacks()  # raises for what inductor does not know

    def fallbacks(self, **settings: Any) -> tuple[Fallback, ...]:
        """Look the backend up by its name, and return it and its fallbacks.

        ``torch.compile`` passes on settings with a graph, ``mode`` and ``options``.
        """
        if settings:
            return fallbacks_of(self._inner, {**self._settings, **settings}, self._dynamic)
        if self._own_fallbacks is None:
            self._own_fallbacks = fallbacks_of(self._inner, self._settings, self._dynamic)
        return self._own_fallbacks

    def __call__(
        self, graph: fx.GraphModule, example_inputs: list[Any], **settings: Any
    ) -> Callable[..., Any]:
        """Compile a graph; its first calls are checked."""
        fallbacks = self.fallbacks(**settings)
        first = fallbacks[0]
        operations = sum(node.op.startswith("call_") for node in graph.graph.nodes)
        reason = why_not_twice(graph, self.checks.run_twice)
        # Copied before it is compiled: compilers rewrite the graph they are given.
        traced = graph if reason is not None else copy_graph(graph)
        function, place = place_of(traced)
        record = GraphRecord(self._function or function, place, operations, runs=first.name)
        # Asked while Dynamo compiles: afterwards 2.13 has forgotten it.
        context = tracing_context()
        symbols = [symbols_of(context, value) for value in example_inputs]
        dynamic = any(isinstance(value, SYMBOLIC) for value in example_inputs)
        fakes = fake_inputs(context, example_inputs, symbols) if dynamic else None
        compiled = first.compile(graph, example_inputs)
        self._graphs.append(record)
        ALL_GRAPHS.append(record)
        if reason is not None:
            record.status, record.reason = "unverified", reason
            return compiled
        # Here and not above: what a check needs is imported with the first graph.
        from torchguard.verification.check import GraphCheck, checked_calls  # noqa: PLC0415

        # Tensors with values are let go, so that they live no longer than their holders want.
        examples = [
            None if isinstance(value, torch.Tensor) and not has_own_dispatch(value) else value
            for value in example_inputs
        ]
        check = GraphCheck(
            TracedGraph(traced, owned_tensors(traced), examples, fakes, context, symbols),
            fallbacks,
            self.checks,
            record,
            compiled,
            draws_like_eager=first.name in UNCOMPILED
            or (first.name == "inductor" and inductor_draws_like_eager(first.compile)),
        )
        numbers = numbers_in(traced, example_inputs)
        sizes = sizes_of(traced, examples)
        if (sizes is None and not numbers) or self.checks.check_each == "graph":
            return checked_calls(check)
        return checked_calls_of_new_sizes(check, sizes, numbers)

    def stats(self) -> VerificationReport:
        """Return what has become of the graphs this backend has compiled."""
        return VerificationReport(tuple(self._graphs))

    def reset(self) -> None:
        """Pass ``torch._dynamo.reset()`` on to the backend that compiles."""
        # Dynamo calls reset() of each backend that has one. Inductor's drops its CUDA graphs:
        # https://github.com/pytorch/pytorch/blob/main/torch/__init__.py
        inner = inductor_backend(None, None, None) if self._inner == "inductor" else self._inner
        reset = getattr(inner, "reset", None)
        if reset is not None:
            reset()

    # Dynamo keeps what it has compiled with the backend, and compiles again for one that is not
    # equal: https://github.com/pytorch/pytorch/blob/main/torch/csrc/dynamo/extra_state.cpp
    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, VerifiedBackend)
            and self._inner == other._inner
            and self.checks == other.checks
            and self._settings == other._settings
            and self._dynamic == other._dynamic
        )

    def __hash__(self) -> int:
        return hash((VerifiedBackend, self.checks))


@public
def verified_backend(
    inner: str | Compiler = "inductor",
    *,
    calls: int = 1,
    on_mismatch: OnMismatch = "fallback",
    max_bytes: int | None = None,
    check_each: CheckEach = "auto",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    group: Any = None,
    run_twice: Collection[str] = (),
) -> VerifiedBackend:
    """Return a backend that compiles with ``inner`` and keeps only what does what eager does.

    ``torch.compile(f, backend=verified_backend())`` equals ``torch.compile(f)`` where
    inductor is right. Each graph is run on copies of its first real inputs, once as Dynamo
    traced it and once compiled: values, gradients, strides and sharing of memory have to
    be the same. Where they are not, one warning says so and the first fallback runs that is
    right: inductor with inputs written outside the graph, AOTAutograd alone, eager. A graph
    with dynamic shapes is checked again when it is called with sizes that are new to it. While
    one thread checks a graph, others that call it run it eagerly.

    Args:
        inner: a backend of ``torch.compile``, by name or itself.
        calls: how many calls of each graph are checked; of a graph with dynamic shapes, how
            many with each combination of sizes.
        on_mismatch: ``"fallback"``: run what is right. ``"warn"``: run the wrong graph all
            the same. ``"raise"``: raise a ``MiscompilationError`` when it is called.
        max_bytes: leave a graph unverified where its inputs' storages have more bytes.
        check_each: which sizes of a graph with dynamic shapes are checked. ``"auto"``: the first 64
            combinations, and from then on those that compiled code may tell from all of them.
            ``"shape"``: every combination. ``"graph"``: the first one.
        mode: as for ``torch.compile``.
        options: as for ``torch.compile``.
        group: a process group whose ranks take the same fallback; all of them have to compile
            the same graphs in the same order, as they do under DDP. They wait for each other
            in the first ``calls`` calls of a graph; sizes that come later, each rank checks alone.
        run_twice: custom operators, as ``"namespace::name"``, that have no effect but on their
            tensors, so that a graph which has them is checked. Of those whose schema says that
            they write nothing, and that have no side-effect token, torchguard believes it.

    Raises:
        TypeError: ``run_twice`` is no collection of names, or ``group`` no process group.
        ValueError: an argument is none of these.

    Upstream: https://github.com/pytorch/pytorch/issues/197829 and others; the doctor
    lists them.
    """
    checks = Options(calls, on_mismatch, max_bytes, check_each, group, run_twice)
    return VerifiedBackend(inner, checks, mode=mode, inner_options=options)


backend = verified_backend()
"""What ``torch.compile(f, backend="torchguard")`` uses, with no import of torchguard."""


# ---- which calls of a graph with dynamic shapes are checked ----


class SizesChecked:
    """The sizes with which a graph with dynamic shapes was checked.

    A combination of sizes holds one number for each symbol of the graph. Up to :attr:`EACH` are
    checked one by one; from then on one is trusted if compiled code can't tell it from those: if
    one of them had numbers of the same lengths in binary, and each of its numbers leaves a
    remainder by :attr:`WIDEST` that one of them left too. An inductor loop runs over a multiple of
    the sizes, or a constant more. Its vectorized part begins at the width of a vector, its tail is
    what that leaves over, Triton asks for divisibility by 16, and threads and blocks depend on the
    magnitude.

    A graph that writes its inputs may read what it has overwritten, by any function of the sizes.
    It is checked with each combination up to :attr:`EACH_WRITING`; when there are more, inductor
    keeps the writes out of the graph.
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
        """Whether a call with these sizes is checked; ``writes``: the graph writes its inputs."""
        calls, checks = self._options.calls, self._checks
        if checks[sizes] >= calls:
            return False
        each = self._options.check_each == "shape" or writes or sizes in checks
        if each or len(checks) < self.EACH:
            return True
        return any(self._alike[trait] < calls for trait in self._traits(sizes))

    @property
    def too_many(self) -> bool:
        """Whether as many sizes were checked as ever are of a graph that writes its inputs."""
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


_MOST_KNOWN = 10_000
"""How many combinations are kept for a quick answer: an integer may differ in every call."""


def _with_numbers(sizes: SizesOf | None, numbers: Sequence[int]) -> SizesOf:
    """Add to the sizes of a call whether its floats are those of the first call.

    Inductor of torch 2.13 returns ``n + 1`` as the constant that it was then: two values tell.
    """
    first: list[list[Any]] = []

    def key(inputs: Sequence[Any]) -> Hashable:
        values = [inputs[place].item() for place in numbers]
        if not first:
            first.append(values)
        return values == first[0], None if sizes is None else sizes(inputs)

    return key


@dataclass(eq=False)
class _Calls:
    """The calls of a graph with dynamic shapes: those with sizes it was not checked with."""

    check: GraphCheck
    sizes_of_call: SizesOf | None
    numbers: Sequence[int]

    def __post_init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        """Forget all sizes: what runs now was checked with none of them."""
        self._checked = SizesChecked(self.check.options)
        # None: whatever the sizes are, nothing is left to check.
        known: set[Hashable] | None = set()
        sizes_of = self.sizes_of_call
        if self.numbers or sizes_of is None:
            sizes_of = _with_numbers(sizes_of, self.numbers)
        # One name for all: no call may find sizes known that another function was checked with.
        self.state = (known, self.check.runs, sizes_of)

    def look(self, inputs: tuple[Any, ...]) -> str | None:
        """Check the call if its sizes are new; return the text of a warning."""
        check, warning = self.check, None
        known, runs, sizes_of = self.state
        if known is None:
            return None
        sizes = sizes_of(inputs)
        if sizes not in known and self._checked.lacking(sizes, check.mutates_inside):
            try:
                many = self._checked.too_many and check.mutates_inside
                if not (many and check.mutate_outside(inputs)):
                    warning = check.check(inputs)
            finally:
                if check.runs is not runs:
                    self._restart()
            known, runs, sizes_of = self.state
            sizes = sizes_of(inputs)
            if check.conclusive:
                self._checked.checked(sizes)
        if check.settled:
            self.state = (None, runs, sizes_of)
        elif known is None or len(known) >= _MOST_KNOWN:
            self.state = (set(), runs, sizes_of)
        elif not self._checked.lacking(sizes, check.mutates_inside):
            known.add(sizes)
        return warning


def checked_calls_of_new_sizes(
    check: GraphCheck, sizes_of_call: SizesOf | None, numbers: Sequence[int]
) -> Callable[..., Any]:
    """Return what Dynamo calls: the compiled graph, whose calls with new sizes are checked.

    The sizes are None if the shapes are static; of the floats at ``numbers`` two are checked.
    """
    calls = _Calls(check, sizes_of_call, numbers)

    def run(*inputs: Any) -> Any:
        known, trusted, sizes_of = calls.state
        if known is None or sizes_of(inputs) in known:
            return trusted(*inputs)
        return check.call(inputs, calls.look)

    return run
