"""The backend for ``torch.compile``: compiles with another one, and checks what comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import fx

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
    may_write,
    numbers_in,
    owned_tensors,
    place_of,
    shared_inputs,
    sizes_of,
    why_not_twice,
)
from torchguard.verification.report import ALL_GRAPHS, GraphRecord, VerificationReport

if TYPE_CHECKING:
    from torchguard.verification.check import GraphCheck

OnMismatch = Literal["fallback", "raise", "warn"]


@dataclass(frozen=True)
class Options:
    """How a graph is checked."""

    calls: int = 1
    on_mismatch: OnMismatch = "fallback"
    max_bytes: int | None = None
    against: Literal["python"] | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        if type(self.calls) is not int or self.calls < 1:
            raise ValueError(f"verified: calls is {self.calls!r}, expected a number of 1 or more")
        if self.on_mismatch not in get_args(OnMismatch):
            choices = " or ".join(map(repr, get_args(OnMismatch)))
            raise ValueError(f"verified: on_mismatch is {self.on_mismatch!r}, expected {choices}")
        if self.max_bytes is not None and (type(self.max_bytes) is not int or self.max_bytes < 0):
            raise ValueError(
                f"verified: max_bytes is {self.max_bytes!r}, expected a number of bytes or None"
            )
        if self.against not in {None, "python"}:
            raise ValueError(f"verified: against is {self.against!r}, expected 'python' or None")
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ValueError(f"verified: every is {self.every!r}, expected a number of 1 or more")
        if self.every is not None and self.against is None:
            raise ValueError("verified: every is for against='python', which was not given")


class VerifiedBackend:
    """A backend for ``torch.compile`` that compiles with another one and checks each graph."""

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
        self.function = function
        """The name of what the user has decorated."""
        self.checks = options
        """How graphs are checked."""
        given = {"mode": mode, "options": inner_options}
        self._settings = {name: value for name, value in given.items() if value is not None}
        self.dynamic = dynamic
        self._own_fallbacks: tuple[Fallback, ...] | None = None
        self._graphs: list[GraphRecord] = []
        if self._settings:
            self.fallbacks()  # raises for what inductor does not know

    def fallbacks(self, **settings: Any) -> tuple[Fallback, ...]:
        """Look the backend up by its name, and return it and its fallbacks.

        ``torch.compile`` passes on settings with a graph, ``mode`` and ``options``.
        """
        if settings:
            return fallbacks_of(self._inner, {**self._settings, **settings}, self.dynamic)
        if self._own_fallbacks is None:
            self._own_fallbacks = fallbacks_of(self._inner, self._settings, self.dynamic)
        return self._own_fallbacks

    def __call__(
        self, graph: fx.GraphModule, example_inputs: list[Any], **settings: Any
    ) -> Callable[..., Any]:
        """Compile a graph; its first calls are checked."""
        fallbacks = self.fallbacks(**settings)
        first = fallbacks[0]
        draws_like_eager = self.draws_like_eager(first)
        operations = sum(node.op.startswith("call_") for node in graph.graph.nodes)
        reason = why_not_twice(graph)
        # Copied before it is compiled: compilers rewrite the graph they are given.
        traced = graph if reason is not None else copy_graph(graph)
        function, place = place_of(traced)
        record = GraphRecord(self.function or function, place, operations, runs=first.name)
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
            draws_like_eager=draws_like_eager,
        )
        numbers = numbers_in(traced, example_inputs)
        sizes = sizes_of(traced, examples)
        tensors = sum(isinstance(value, torch.Tensor) for value in example_inputs)
        writes = tensors > 1 and may_write(traced)
        if sizes is None and not numbers and not writes:
            return checked_calls(check)
        return checked_calls_of_new_keys(check, sizes, numbers, writes)

    def draws_like_eager(self, first: Fallback | None = None) -> bool:
        """Whether the random numbers of what the backend compiles are those of eager."""
        first = self.fallbacks()[0] if first is None else first
        return first.name in UNCOMPILED or (
            first.name == "inductor" and inductor_draws_like_eager(first.compile)
        )

    def add(self, record: GraphRecord) -> None:
        """Add a row that is not of a graph to the reports."""
        self._graphs.append(record)
        ALL_GRAPHS.append(record)

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
            and self.dynamic == other.dynamic
        )

    def __hash__(self) -> int:
        return hash((VerifiedBackend, self.checks))


backend = VerifiedBackend("inductor", Options())
"""What ``torch.compile(f, backend="torchguard")`` uses, with no import of torchguard."""


# ---- which calls of a graph are checked ----


class KeysChecked:
    """What a graph was checked with: combinations of sizes, and of inputs that share memory.

    A combination of sizes has one number for each symbol of the graph. Each combination that is new
    is checked, up to :attr:`MOST`; later ones are trusted.
    """

    MOST = 256

    def __init__(self, options: Options) -> None:
        self._calls = options.calls
        self._checks: Counter[Hashable] = Counter()

    def lacks(self, key: Hashable) -> bool:
        """Whether a call with this key is checked."""
        checks = self._checks.get(key)
        return len(self._checks) < self.MOST if checks is None else checks < self._calls

    def is_trusted(self, key: Hashable) -> bool:
        """Whether a call with this key is trusted though none was checked."""
        return key not in self._checks and not self.lacks(key)

    def add(self, key: Hashable) -> None:
        """Note that a call with this key was checked."""
        self._checks[key] += 1


_MOST_KNOWN = 10_000
"""How many combinations are kept for a quick answer: an integer may differ in every call."""


def _key_of(sizes: SizesOf | None, numbers: Sequence[int], sharing: SizesOf | None) -> SizesOf:
    """Return what reads the key of a call: its sizes, and which inputs share memory.

    Of its floats, whether they are those of the first call: inductor of torch 2.13 returns
    ``n + 1`` as the constant that it was then, and two values tell.
    """
    if sizes is not None and not numbers and sharing is None:
        return sizes
    first: list[list[Any]] = []

    def key(inputs: Sequence[Any]) -> Hashable:
        values = [inputs[place].item() for place in numbers]
        if not first:
            first.append(values)
        return (
            values == first[0],
            None if sizes is None else sizes(inputs),
            () if sharing is None else sharing(inputs),
        )

    return key


@dataclass(eq=False)
class _Calls:
    """The calls of a graph whose key it was not checked with."""

    check: GraphCheck
    sizes_of_call: SizesOf | None
    numbers: Sequence[int]
    writes: bool
    """Whether it may write its inputs: then it matters which of them share memory."""

    def __post_init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        """Forget all keys: what runs now was checked with none of them."""
        self._checked = KeysChecked(self.check.options)
        sharing = shared_inputs if self.writes else None
        key_of = _key_of(self.sizes_of_call, self.numbers, sharing)
        # None: whatever the key is, nothing is left to check.
        known: set[Hashable] | None = set()
        # One name for all: no call may find a key known that another function was checked with.
        self.state = (known, self.check.runs, key_of)

    def look(self, inputs: tuple[Any, ...]) -> str | None:
        """Check the call if its key is new; return the text of a warning."""
        check, warning = self.check, None
        known, runs, key_of = self.state
        if known is None:
            return None
        key = key_of(inputs)
        if key not in known and self._checked.lacks(key):
            try:
                warning = check.check(inputs)
            finally:
                if check.runs is not runs:
                    self._restart()
            if check.conclusive and self.writes and not check.mutates:
                self.writes = False
                self._restart()
            known, runs, key_of = self.state
            key = key_of(inputs)
            if check.conclusive:
                self._checked.add(key)
        elif self._checked.is_trusted(key):
            check.trust_what_is_new()
        alone = self.sizes_of_call is None and not self.numbers and not self.writes
        if check.settled or (alone and not self._checked.lacks(key)):
            self.state = (None, runs, key_of)
        elif known is None or len(known) >= _MOST_KNOWN:
            self.state = (set(), runs, key_of)
        elif not self._checked.lacks(key):
            known.add(key)
        return warning


def checked_calls_of_new_keys(
    check: GraphCheck, sizes_of_call: SizesOf | None, numbers: Sequence[int], writes: bool
) -> Callable[..., Any]:
    """Return what Dynamo calls: the compiled graph, whose calls with new sizes are checked.

    The sizes are None if the shapes are static; of the floats at ``numbers`` two are checked. If
    the graph ``writes`` its inputs, so is each pattern of inputs that share memory.
    """
    calls = _Calls(check, sizes_of_call, numbers, writes)

    def run(*inputs: Any) -> Any:
        known, trusted, key_of = calls.state
        if known is None or key_of(inputs) in known:
            return trusted(*inputs)
        return check.call(inputs, calls.look)

    return run
