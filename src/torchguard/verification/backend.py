"""The backend for ``torch.compile``: compiles with another one, and checks what comes out."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from torch import fx

from torchguard._torch import (
    dynamo_backend,
    inductor_backend,
    inductor_draws_like_eager,
    inductor_options,
    inductor_records_cuda_graphs,
)
from torchguard.equivalence.reference import reference_of
from torchguard.verification.graph import (
    copy_graph,
    numbers_in,
    owned_tensors,
    place_of,
    sizes_of,
    why_not_twice,
)
from torchguard.verification.report import (
    ALL_GRAPHS,
    GraphRecord,
    VerificationReport,
    say_unverified,
)

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
OnMismatch = Literal["fallback", "raise", "warn"]


class Inner(NamedTuple):
    """The backend that compiles the graphs to check."""

    name: str
    compile: Compiler

    source: str | None = None
    """Its arguments for ``torch.compile`` in a script; None if a script can't name it."""

    @property
    def draws_like_eager(self) -> bool:
        """Whether what it compiles draws the random numbers that eager draws."""
        if self.name == "inductor":
            return inductor_draws_like_eager(self.compile)
        return self.name in {"eager", "aot_eager"}  # they run torch's own operators

    def why_draws_differ(self, *, on_gpu: bool) -> str:
        """Say why a check can't choose the random numbers that compiled code draws, if so."""
        if self.name != "inductor" or self.source is None:
            return f"which {self.name} may draw in its own way"
        # Not tested on a GPU yet: a check that is recorded would make its seeds those of all calls.
        if on_gpu and inductor_records_cuda_graphs(self.compile):
            return "which would become a part of the CUDA graph that is recorded"
        return ""


def inner_of(options: Options, settings: Mapping[str, Any]) -> Inner:
    """Look a backend up.

    ``settings`` are what ``torch.compile`` passes on with a graph, ``mode`` and ``options``.
    """
    own = {"mode": options.mode, "options": options.options}
    settings = {**{name: value for name, value in own.items() if value is not None}, **settings}
    given = options.backend
    if given == "inductor":
        compiler = inductor_backend(settings.get("mode"), settings.get("options"), options.dynamic)
        found = inductor_options(compiler)
        return Inner("inductor", compiler, f"options={found!r}" if found else "")
    if isinstance(given, str):
        name, compiler, source = given, dynamo_backend(given), f"backend={given!r}"
    else:
        name, compiler, source = getattr(given, "__name__", type(given).__name__), given, None
    if not settings:
        return Inner(name, compiler, source)
    return Inner(name, functools.partial(compiler, **settings), source)


class _Comparing(threading.local):
    runs: Literal["", "python", "compiled"] = ""
    """How this thread runs a call at the moment, to compare it with Python."""

    watched: object = None
    """The comparison whose call this thread runs; Dynamo ends that call before it compiles."""


comparison = _Comparing()


@dataclass(frozen=True)
class Options:
    """How a graph is checked, and what compiles it; the values are right."""

    calls: int = 1
    on_mismatch: OnMismatch = "fallback"
    max_bytes: int | None = None
    against: Literal["python"] | None = None
    every: int | None = None
    backend: str | Compiler = "inductor"
    mode: str | None = None
    options: dict[str, Any] | None = None
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("calls", 1), ("max_bytes", 0), ("every", 1)):
            value = getattr(self, name)
            is_left_out = value is None and name != "calls"
            if not is_left_out and (type(value) is not int or value < least):
                of = " of bytes or None" if name == "max_bytes" else ""
                raise ValueError(
                    f"verified: {name} is {value!r}, expected a number of {least} or more{of}"
                )
        for name, known in (("on_mismatch", get_args(OnMismatch)), ("against", ("python", None))):
            value = getattr(self, name)
            if value not in known:
                choices = " or ".join(map(repr, known))
                raise ValueError(f"verified: {name} is {value!r}, expected {choices}")
        if self.every is not None and self.against is None:
            raise ValueError("verified: every is for against='python', which was not given")
        if not isinstance(self.backend, str) and not callable(self.backend):
            raise TypeError(
                f"verified: backend is {self.backend!r}, expected a name or what compiles"
            )
        if self.options is not None and not isinstance(self.options, Mapping):
            raise TypeError(
                f"verified: options is {self.options!r}, expected a dict of options of inductor, "
                "such as {'max_autotune': True}; a name of several, such as 'max-autotune', is "
                "given as mode="
            )
        if self.dynamic not in {None, True, False}:
            raise TypeError(f"verified: dynamic is {self.dynamic!r}, expected True, False or None")


class VerifiedBackend:
    """A backend for ``torch.compile`` that compiles with another one and checks each graph."""

    __name__ = "torchguard"  # what Dynamo's messages call it

    def __init__(self, options: Options, function: str | None = None) -> None:
        self.options = options
        self.function = function
        """The name of what the user has decorated."""
        self._own: Inner | None = None
        self._graphs: list[GraphRecord] = []
        if options.mode is not None or options.options is not None:
            self.inner()  # raises for what inductor does not know

    def inner(self, **settings: Any) -> Inner:
        """Look up by its name the backend that compiles; ``torch.compile`` passes settings on."""
        if settings:
            return inner_of(self.options, settings)
        if self._own is None:
            self._own = inner_of(self.options, {})
        return self._own

    def __call__(
        self, graph: fx.GraphModule, example_inputs: list[Any], **settings: Any
    ) -> Callable[..., Any]:
        """Compile a graph; its first calls are checked."""
        if self.options.against is None:
            return self._compile(graph, example_inputs, settings)
        # Copied before it is compiled, as below. The operands of a write are those of Python.
        traced = reference_of(copy_graph(graph), copies=False)
        compiled = self._compile(graph, example_inputs, settings)

        def run(*inputs: Any) -> Any:
            # Compilers are the business of the check of each graph: no rounding, no other random
            # numbers, no kernels that write operands in another order.
            return (traced if comparison.runs else compiled)(*inputs)

        return run

    def _compile(
        self, graph: fx.GraphModule, example_inputs: list[Any], settings: dict[str, Any]
    ) -> Callable[..., Any]:
        inner = self.inner(**settings)
        operations = sum(node.op.startswith("call_") for node in graph.graph.nodes)
        reason = why_not_twice(graph)
        # Copied before it is compiled: compilers rewrite the graph they are given.
        traced = graph if reason is not None else copy_graph(graph)
        function, place = place_of(traced)
        record = GraphRecord(self.function or function, place, operations, runs=inner.name)
        sizes = sizes_of(traced)
        numbers, owned = numbers_in(traced, example_inputs), owned_tensors(traced)
        compiled = inner.compile(graph, example_inputs)
        self.add(record)
        if reason is not None:
            record.status, record.reason = "unverified", reason
            say_unverified(record)
            return compiled
        # Here and not above: what a check needs is imported with the first graph.
        from torchguard.verification.check import GraphCheck, checked_calls  # noqa: PLC0415

        draws, options = inner.draws_like_eager, self.options
        return checked_calls(
            GraphCheck(traced, inner, options, record, compiled, draws, sizes, numbers, owned)
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
        inner: Any = self.options.backend
        if inner == "inductor":
            inner = inductor_backend(None, None, None)
        reset = getattr(inner, "reset", None)
        if reset is not None:
            reset()

    # Dynamo keeps what it has compiled with the backend, and compiles again for one that is not
    # equal: https://github.com/pytorch/pytorch/blob/main/torch/csrc/dynamo/extra_state.cpp
    def __eq__(self, other: object) -> bool:
        return isinstance(other, VerifiedBackend) and self.options == other.options

    def __hash__(self) -> int:
        return hash(VerifiedBackend)  # a dict of options has none


backend = VerifiedBackend(Options())
"""What ``torch.compile(f, backend="torchguard")`` uses, with no import of torchguard."""
