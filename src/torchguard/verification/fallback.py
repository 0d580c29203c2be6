"""The ways to compile a graph, from the fastest to the one that is right by definition."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from torch import fx

from torchguard._torch import dynamo_backend, inductor_options, mutation_switches, patch

__all__ = ["EAGER", "OUTSIDE", "Compiler", "Step", "inductor_steps", "steps_of"]

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


class Step(NamedTuple):
    """One way to compile a graph."""

    name: str
    compile: Compiler

    source: str | None = None
    """The arguments for ``torch.compile`` that stand for it in a script; None if there are none."""


def _as_it_is(graph: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
    run: Callable[..., Any] = graph.forward
    return run


EAGER = Step("eager", _as_it_is)
OUTSIDE = "inductor, inputs written outside the graph"


def _by_aot_autograd(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = dynamo_backend("aot_eager")(graph, inputs)
    return compiled


_AOT_EAGER = Step("aot_eager", _by_aot_autograd)


def steps_of(name: str, compiler: Compiler, source: str | None) -> tuple[Step, ...]:
    """Return the ladder below a backend: AOTAutograd without a compiler, then eager."""
    first = Step(name, compiler, None if source is None else f"backend={source!r}")
    if name in {"eager", "aot_eager"}:
        return (first, EAGER)
    return (first, _AOT_EAGER, EAGER)


def inductor_steps(compiler: Compiler) -> tuple[Step, ...]:
    """Return the ladder below inductor with some mode and options."""

    def with_inputs_written_outside(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        paths = mutation_switches()
        patch.apply((path, _without_input_mutations) for path in paths)
        try:
            return compiler(graph, inputs)
        finally:
            patch.undo(paths)

    outside = Step(OUTSIDE, with_inputs_written_outside)
    options = inductor_options(compiler)
    source = f"options={options!r}" if options else ""
    return (Step("inductor", compiler, source), outside, _AOT_EAGER, EAGER)


def _without_input_mutations(aot_autograd: Callable[..., Any]) -> FunctionType:
    """Make AOTAutograd write the inputs after the graph, from results of the graph.

    Most of inductor's errors around in-place writes need an input that the graph itself
    writes. https://github.com/pytorch/pytorch/issues/198094
    """

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if "keep_inference_input_mutations" in kwargs:
            kwargs["keep_inference_input_mutations"] = False
        return aot_autograd(*args, **kwargs)

    assert isinstance(replacement, FunctionType)
    return replacement
