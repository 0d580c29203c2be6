"""What a graph is compiled with: the backend first, then its fallbacks down to eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx

from torchguard._torch import (
    dynamo_backend,
    inductor_backend,
    inductor_options,
    mutation_switches,
    patch,
    shape_guards,
    tracing_again,
)
from torchguard.equivalence.reference import reference_of
from torchguard.verification.graph import SYMBOLIC, copy_graph

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


class Fallback(NamedTuple):
    """One way to compile a graph."""

    name: str
    compile: Compiler

    source: str | None = None
    """The arguments for ``torch.compile`` that stand for it in a script; None if there are none."""


EAGER = Fallback("eager", lambda graph, _: reference_of(graph))
UNCOMPILED = {"eager", "aot_eager"}
"""The backends that run torch's own operators, and so draw random numbers as eager does."""

OUTSIDE = "inductor, inputs written outside the graph"
ROUNDING = "inductor, every cast rounds"


# Looked up when it compiles: to do so imports Dynamo.
_AOT_EAGER = Fallback("aot_eager", lambda *given: dynamo_backend("aot_eager")(*given))  # noqa: PLW0108


def fallbacks_of(
    inner: str | Compiler, settings: Mapping[str, Any], dynamic: bool | None
) -> tuple[Fallback, ...]:
    """Return a backend and what comes after it, down to AOTAutograd without a compiler and eager.

    ``settings`` are what ``torch.compile`` passes on to the backend, ``mode`` and ``options``.
    """
    if inner == "inductor":
        backend = inductor_backend(settings.get("mode"), settings.get("options"), dynamic)
        return _inductor_and_fallbacks(backend)
    if isinstance(inner, str):
        name, compiler, source = inner, dynamo_backend(inner), f"backend={inner!r}"
    elif getattr(inner, "compiler_name", None) == "inductor":
        return _inductor_and_fallbacks(inner)
    else:
        name, compiler, source = getattr(inner, "__name__", type(inner).__name__), inner, None

    def compile_with_settings(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return compiler(graph, inputs, **settings)

    first = Fallback(name, compile_with_settings if settings else compiler, source)
    return (first, EAGER) if name in UNCOMPILED else (first, _AOT_EAGER, EAGER)


def _inductor_and_fallbacks(compiler: Compiler) -> tuple[Fallback, ...]:
    def with_inputs_written_outside(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        # There is no option for it. TracedGraph.compile holds Dynamo's lock, so no other thread's
        # graph is compiled while the patch is in place.
        paths = mutation_switches()
        patch.apply(OUTSIDE, dict.fromkeys(paths, _without_input_mutations))
        try:
            return compiler(graph, inputs)
        finally:
            patch.undo(OUTSIDE)

    def with_casts_that_round(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        # Inductor leaves out x.half().float(): https://github.com/pytorch/pytorch/issues/185337
        rounding = {**options, "emulate_precision_casts": True}
        compiled: Callable[..., Any] = inductor_backend(None, rounding, None)(graph, inputs)
        return compiled

    options = inductor_options(compiler)
    source = f"options={options!r}" if options else ""
    first = Fallback("inductor", compiler, source)
    outside = Fallback(OUTSIDE, with_inputs_written_outside)
    return (first, outside, Fallback(ROUNDING, with_casts_that_round), _AOT_EAGER, EAGER)


def _without_input_mutations(aot_autograd: Callable[..., Any]) -> FunctionType:
    """Make AOTAutograd write the inputs after the graph, from results of the graph.

    Most of inductor's errors around in-place writes need an input that the graph itself writes.
    https://github.com/pytorch/pytorch/issues/198094
    """

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if "keep_inference_input_mutations" in kwargs:
            kwargs["keep_inference_input_mutations"] = False
        return aot_autograd(*args, **kwargs)

    assert isinstance(replacement, FunctionType)
    return replacement


@dataclass
class TracedGraph:
    """A graph as Dynamo traced it, which is eager, and what it takes to compile it again."""

    graph: fx.GraphModule
    owned: list[torch.Tensor]
    """The tensors that the graph has as attributes, such as an optimizer's parameters."""

    examples: list[Any]
    """What Dynamo gave to compile with, None in place of tensors that hold values."""

    fakes: list[Any] | None
    """The inputs of a graph with dynamic shapes without their values."""

    context: Any
    """What Dynamo knew when it traced the graph."""

    symbols: list[Any]
    """What it had decided about the sizes of each input."""

    _guards: int | None = None
    """How many guards on sizes there were when Dynamo wrote its own."""

    @property
    def is_dynamic(self) -> bool:
        """Whether the graph has dynamic shapes."""
        return any(isinstance(example, SYMBOLIC) for example in self.examples)

    @functools.cached_property
    def eager(self) -> Callable[..., Any]:
        """Runs the graph as Dynamo traced it; operands that it overwrites are copied first."""
        return reference_of(self.graph)

    def compile(self, fallback: Fallback, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """Compile with a fallback; None if it can't, or only under guards that are never evaluated.

        What Dynamo evaluates before each call was written when the graph was compiled first.
        """
        if self._guards is None:
            self._guards = shape_guards(self.context)
        examples = self.fakes
        if examples is None:
            if self.is_dynamic:
                return None  # the sizes of this call are not those of every call
            pairs = zip(self.examples, inputs, strict=True)
            examples = [given if example is None else example for example, given in pairs]
        try:
            # A copy: AOTAutograd rewrites the graph, and this one is what eager is.
            with tracing_again(self.context, zip(inputs, self.symbols, strict=True)):
                compiled = fallback.compile(copy_graph(self.graph), examples)
        except Exception:  # noqa: BLE001 - then the next one has to do
            return None
        return compiled if shape_guards(self.context) == self._guards else None


def with_strides(
    function: Callable[..., Any], outputs: Mapping[int, tuple[int, ...]]
) -> Callable[..., Any]:
    """Return ``function`` with outputs copied into memory with the order of these strides.

    Inductor keeps the strides of a graph's outputs as AOTAutograd hands them over, lest ``view()``
    raise (https://github.com/pytorch/pytorch/blob/main/torch/_inductor/graph.py). By then
    ``cat([empty, x])`` has become ``x.clone()``, which has the strides of ``x``, where eager's
    result is contiguous: the first key-value cache of a decoder.
    """
    orders = {
        position: tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))
        for position, strides in outputs.items()
    }

    def run(*inputs: Any) -> Any:
        returned = list(function(*inputs))
        for position, order in orders.items():
            value = returned[position]
            strides, size = [0] * value.dim(), 1
            for dim in reversed(order):
                strides[dim] = size
                size *= max(value.size(dim), 1)
            sizes = zip(value.shape, value.stride(), strides, strict=True)
            if any(length != 1 and has != wanted for length, has, wanted in sizes):
                # Not permute().contiguous(): the result would be a view, and eager's is not.
                made = torch.empty_strided(
                    value.shape, strides, dtype=value.dtype, device=value.device
                )
                returned[position] = made.copy_(value)
        return returned

    return run
