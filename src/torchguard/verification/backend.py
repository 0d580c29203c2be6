"""The backend for ``torch.compile``: compiles with another one, and checks what comes out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from typing import Any

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
    copy_graph,
    owned_tensors,
    place_of,
    sizes_of,
    why_not_twice,
)
from torchguard.verification.options import CheckEach, OnMismatch, Options
from torchguard.verification.report import ALL_GRAPHS, GraphRecord, VerificationReport

__all__ = ["VerifiedBackend", "backend", "verified_backend"]


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
        self._options = options
        self._settings: dict[str, Any] = {
            name: value
            for name, value in (("mode", mode), ("options", inner_options))
            if value is not None
        }
        self._dynamic = dynamic
        self._graphs: list[GraphRecord] = []
        if self._settings:
            _ = self._own_fallbacks  # raises for what inductor does not know

    @functools.cached_property
    def _own_fallbacks(self) -> tuple[Fallback, ...]:
        return fallbacks_of(self._inner, self._settings, self._dynamic)

    def look_up(self) -> VerifiedBackend:
        """Look the backend up by its name now, as ``torch.compile`` does, and return this."""
        _ = self._own_fallbacks
        return self

    def _fallbacks(self, settings: dict[str, Any]) -> tuple[Fallback, ...]:
        if not settings:
            return self._own_fallbacks
        return fallbacks_of(self._inner, {**self._settings, **settings}, self._dynamic)

    def __call__(
        self, graph: fx.GraphModule, example_inputs: list[Any], **settings: Any
    ) -> Callable[..., Any]:
        """Compile a graph; its first calls are checked."""
        fallbacks = self._fallbacks(settings)
        first = fallbacks[0]
        operations = sum(node.op.startswith("call_") for node in graph.graph.nodes)
        reason = why_not_twice(graph, self._options.run_twice)
        # Copied before it is compiled: compilers rewrite the graph they are given.
        traced = graph if reason is not None else copy_graph(graph)
        function, place = place_of(traced)
        record = GraphRecord(self._function or function, place, operations, runs=first.name)
        # Asked while Dynamo compiles: afterwards 2.13 has forgotten it.
        context = tracing_context()
        symbols = [symbols_of(context, value) for value in example_inputs]
        dynamic = any(isinstance(value, SYMBOLIC) for value in example_inputs)
        fakes = fake_inputs(context, example_inputs, symbols) if dynamic else None
        start = time.monotonic()
        compiled = first.compile(graph, example_inputs)
        compile_seconds = time.monotonic() - start
        self._graphs.append(record)
        ALL_GRAPHS.append(record)
        if reason is not None:
            record.status, record.reason = "unverified", reason
            return compiled
        # Here and not above: it is the larger part of the room, and `import torchguard` is quick.
        from torchguard.verification.check import GraphCheck, checked_calls  # noqa: PLC0415

        # Tensors with values are let go, so that they live no longer than their holders want.
        examples = [
            None if isinstance(value, torch.Tensor) and not has_own_dispatch(value) else value
            for value in example_inputs
        ]
        check = GraphCheck(
            TracedGraph(traced, owned_tensors(traced), examples, fakes, context, symbols),
            fallbacks,
            self._options,
            record,
            compiled,
            draws_like_eager=first.name in UNCOMPILED
            or (first.name == "inductor" and inductor_draws_like_eager(first.compile)),
            compile_seconds=compile_seconds,
        )
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        sizes = sizes_of(examples, [node.meta.get("example_value") for node in placeholders])
        if sizes is None or self._options.check_each == "graph":
            return checked_calls(check, self._options.calls)
        from torchguard.verification.sizes import checked_calls_of_new_sizes  # noqa: PLC0415

        return checked_calls_of_new_sizes(check, self._options, sizes)

    def stats(self) -> VerificationReport:
        """Return what has become of the graphs this backend has compiled."""
        return VerificationReport(tuple(self._graphs))

    def reset(self) -> None:
        """Pass ``torch._dynamo.reset()`` on to the backend that compiles."""
        if self._inner == "inductor":
            reset = getattr(inductor_backend(None, None, None), "reset", None)
        else:
            reset = getattr(self._inner, "reset", None)
        if reset is not None:
            reset()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, VerifiedBackend)
            and self._inner == other._inner
            and self._options == other._options
            and self._settings == other._settings
            and self._dynamic == other._dynamic
        )

    def __hash__(self) -> int:
        return hash((VerifiedBackend, self._options))


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
        TypeError: ``run_twice`` is no collection of names.
        ValueError: an argument is none of these.

    Upstream: https://github.com/pytorch/pytorch/issues/197829 and others; the doctor
    lists them.
    """
    checks = Options(calls, on_mismatch, max_bytes, check_each, group, run_twice)
    return VerifiedBackend(inner, checks, mode=mode, inner_options=options)


backend = verified_backend()
"""What ``torch.compile(f, backend="torchguard")`` uses, with no import of torchguard."""
