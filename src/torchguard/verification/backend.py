"""The backend for ``torch.compile``: compiles with another one, and checks what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from torchguard._torch import (
    dynamo_backend,
    fake_inputs,
    has_own_dispatch,
    inductor_backend,
    inductor_draws_like_eager,
    symbols_of,
    tracing_context,
)
from torchguard.verification.fallback import Compiler, Step, inductor_steps, steps_of
from torchguard.verification.graph import copy_graph, is_symbolic, place_of
from torchguard.verification.options import Every, OnMismatch, Options
from torchguard.verification.report import Records, VerificationReport, new_record
from torchguard.verification.side_effects import why_not_twice

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
        self._records = Records()
        if self._settings:
            self._steps({})  # raises for what inductor does not know

    def __call__(
        self, graph: fx.GraphModule, example_inputs: list[Any], **settings: Any
    ) -> Callable[..., Any]:
        """Compile a graph; its first calls are checked."""
        steps, random_like_eager = self._steps(settings)
        operations = sum(node.op.startswith("call_") for node in graph.graph.nodes)
        reason = why_not_twice(graph, self._options.run_twice)
        traced = graph if reason is not None else copy_graph(graph)
        context = tracing_context()
        symbols = [symbols_of(context, value) for value in example_inputs]
        dynamic = any(map(is_symbolic, example_inputs))
        fakes = fake_inputs(context, example_inputs, symbols) if dynamic else None
        start = time.monotonic()
        compiled = steps[0].compile(graph, example_inputs)
        compile_seconds = time.monotonic() - start
        function, place = place_of(traced)
        record = new_record(self._records, self._function or function, place, operations)
        record.runs = steps[0].name
        if reason is not None:
            record.status, record.reason = "unverified", reason
            return compiled
        # Here and not above: it is the larger part of the folder, and `import torchguard` is quick.
        from torchguard.verification.calls import checked_calls, sizes_of  # noqa: PLC0415
        from torchguard.verification.check import Check  # noqa: PLC0415

        # Real tensors are kept alive by nobody between compiling and the first call.
        examples = [None if _has_values(value) else value for value in example_inputs]
        placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        inputs = [node.meta.get("example_value") for node in placeholders]
        check = Check(
            traced,
            steps,
            self._options,
            record,
            random_like_eager,
            compiled,
            examples,
            fakes,
            context,
            symbols,
            compile_seconds,
        )
        return checked_calls(check, self._options, sizes_of(examples, inputs))

    def _steps(self, settings: dict[str, Any]) -> tuple[tuple[Step, ...], bool]:
        """Return the ladder, and whether its first step draws random numbers as eager does."""
        settings = {**self._settings, **settings}
        inner = self._inner
        if inner == "inductor":
            mode, options = settings.get("mode"), settings.get("options")
            inner = inductor_backend(mode, options, self._dynamic)
            return inductor_steps(inner), inductor_draws_like_eager(inner)
        if isinstance(inner, str):
            name, compiler = inner, dynamo_backend(inner)
        elif getattr(inner, "compiler_name", None) == "inductor":
            return inductor_steps(inner), inductor_draws_like_eager(inner)
        else:
            name, compiler = getattr(inner, "__name__", type(inner).__name__), inner

        def compile_with_settings(graph: fx.GraphModule, inputs: list[Any]) -> Any:
            return compiler(graph, inputs, **settings)

        source = name if isinstance(inner, str) else None
        like_eager = name in {"eager", "aot_eager"}
        return steps_of(name, compile_with_settings, source), like_eager

    def stats(self) -> VerificationReport:
        """Return what has become of the graphs this backend has compiled."""
        return self._records.stats()

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


def verified_backend(
    inner: str | Compiler = "inductor",
    *,
    calls: int = 1,
    on_mismatch: OnMismatch = "fallback",
    max_bytes: int | None = None,
    every: Every = "auto",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    group: Any = None,
    run_twice: Collection[str] = (),
) -> VerifiedBackend:
    """Return a backend that compiles with ``inner`` and keeps only what does what eager does.

    ``torch.compile(f, backend=verified_backend())`` equals ``torch.compile(f)`` where
    inductor is right. Each graph is run on copies of its first real inputs, once as Dynamo
    traced it and once compiled: values, gradients, strides and sharing of memory have to
    be the same. Where they are not, one warning says so and the next step runs, if that is
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
        every: which sizes of a graph with dynamic shapes are checked. ``"auto"``: the first 64
            combinations, and from then on those that compiled code may tell from all of them.
            ``"shape"``: every combination. ``"graph"``: the first one.
        mode: as for ``torch.compile``.
        options: as for ``torch.compile``.
        group: a process group whose ranks take the same step; all of them have to compile
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
    checks = Options(calls, on_mismatch, max_bytes, every, group, run_twice)
    return VerifiedBackend(inner, checks, mode=mode, inner_options=options)


def _has_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not has_own_dispatch(value)


backend = verified_backend()
"""What ``torch.compile(f, backend="torchguard")`` uses, with no import of torchguard."""
