"""What runs a bucket: a compiled copy of the function, with a code object of its own.

Dynamo keeps what it knows about a function with its code object: the compiled variants, of
which it makes 8 and then runs eager, and the sizes seen, which it makes symbolic when they
change. So every bucket has a code object of its own, with a name of its own (the sizes seen
are kept by file, line and name).
https://github.com/pytorch/pytorch/issues/128071
https://github.com/pytorch/pytorch/issues/190631
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import torch

from torchguard import _torch
from torchguard.bucketing.decorator.bucket import (
    COMPILE_LOCK,
    Graph,
    Plan,
    Specialization,
    sizes_of,
)

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


class Compilers(NamedTuple):
    """What compiles a function, by kind of graph; None where it runs uncompiled."""

    static: Compiler | None = None
    dynamic: Compiler | None = None
    """What compiles the sizes above the largest bucket."""


RECOMPILE_LIMIT = 8
"""As often as torch compiles a function anew before it gives up and runs it uncompiled."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Compile as often as it takes, while no other thread compiles a bucket.

    A call waits here while another thread compiles. The recompile limit is thread-local from
    torch 2.13 on and the whole process's before, so it has to be lifted by each thread, and by
    one at a time.
    """
    with COMPILE_LOCK, _torch.without_recompile_limit():
        yield


def graph_for(function: Callable[..., Any], compilers: Compilers, plan: Plan) -> Graph:
    """Return what runs a call; it is compiled where its bucket has none like it yet."""
    compiler = compilers.static if plan.buckets else compilers.dynamic
    # torch.compile runs what is inside a transform of torch.func uncompiled.
    if compiler is None or plan.specialization.transformed:
        return plan.graph
    graphs = plan.bucket.graphs
    key = (plan.shapes, plan.specialization.global_state) if plan.buckets else None
    if key not in graphs:
        # Dynamo keeps the sizes it has seen under this name, in a file too.
        sizes = "_".join("x".join(map(str, shape)) for _, shape in plan.shapes)
        copied = _separated(function, f"bucket_{sizes}" if plan.buckets else "beyond_buckets")
        run = compiler(copied)
        run = _torch.compiles_inside(run, alone) if plan.buckets else _torch.keep_settings(run)
        cuda_graphs = _torch.records_cuda_graphs(run)
        graphs[key] = Graph(run, copied.__code__, compiles=True, cuda_graphs=cuda_graphs)
    return graphs[key]


def graphs_of(graph: Graph) -> int:
    """Count the graphs that were compiled for it."""
    if graph.code is None:
        return graph.first_graphs
    # Dynamo's own count: guards that fail later compile anew without asking us.
    later = _torch.compiled_variants(graph.code) - graph.first_entries
    return graph.first_graphs + max(later, 0)


@contextlib.contextmanager
def compiling(graph: Graph, specialization: Specialization) -> Iterator[None]:
    """Note the seconds and graphs that the first call of a graph takes."""
    with alone():
        graphs, begun = _torch.graphs_compiled(), time.perf_counter()
        yield
        graph.seconds += time.perf_counter() - begun
        graph.first_graphs += max(_torch.graphs_compiled() - graphs, 0)
        if graph.code is not None:
            graph.first_entries = _torch.compiled_variants(graph.code)
        graph.compiled_for.add(specialization)


_MODES = ("whether gradients are on", "inference mode", "autocast", "a transform of torch.func")


def recompile_reason(plan: Plan) -> str:
    """Return what a call has that no graph was compiled for."""
    graphs = list(plan.bucket.graphs.items())
    compiled = [_parts(*key) for key, graph in graphs if graph.compiled_for]
    if not compiled:
        return f"{sizes_of(plan)}, a bucket that is not compiled yet: warmup() compiles all"
    own = _parts(plan.shapes, plan.specialization.global_state)
    nearest = min(compiled, key=lambda each: len(own.items() ^ each.items()))
    changed = [
        f"{what} is {own.get(what, 'left out')}, compiled was {nearest.get(what, 'left out')}"
        for what in own | nearest
        if own.get(what) != nearest.get(what)
    ]
    labels = ", ".join(label for label, _ in plan.shapes)
    because = ", ".join(changed) or f"{labels} come in another order than was compiled"
    return f"{sizes_of(plan)}, because {because}: call warmup() with the arguments of this call"


def _parts(shapes: Any, state: tuple[Any, ...]) -> dict[str, Any]:
    """Return what a graph is compiled for, by what it is."""
    modules = (f"the training mode of module {i}" for i in range(len(state) - len(_MODES)))
    padded = {f"{label} after padding": shape for label, shape in shapes}
    return padded | dict(zip((*_MODES, *modules), state, strict=True))


def compiler_for(given: Any, options: bool | Mapping[str, Any] | None) -> tuple[Any, Compilers]:
    """Split what the user wraps into the function itself and what compiles it."""
    found = _torch.compiler_of(given)
    if found is None:
        return given, _compilers(options) if options else Compilers()
    original, settings = found
    if options:
        raise ValueError(
            "bucketed: compile= is given, but the function is compiled already: wrap the function "
            "itself"
        )
    if _torch.compiles_dynamic(settings):
        raise ValueError(
            "bucketed: the function is compiled with dynamic=True, which makes static sizes "
            "symbolic: compile it without, or pass the function itself and compile={...}"
        )
    # Without dynamic=False a second size above the buckets makes it symbolic.
    return original, Compilers(settings, settings)


def _compilers(options: Any) -> Compilers:
    if options is not True and not isinstance(options, Mapping):
        # The name of a mode or of a backend, given in place of the dict.
        modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
        intended = {"mode" if options in modes else "backend": options}
        raise TypeError(
            f"bucketed: compile is {options!r}, expected True or a dict of torch.compile's "
            f"arguments: compile={intended!r}"
        )
    arguments = {} if options is True else dict(options)
    if arguments.pop("dynamic", None):
        raise ValueError(
            "bucketed: compile={'dynamic': True} makes static sizes symbolic: leave it out"
        )

    def compiler(*, dynamic: bool | None) -> Compiler:
        # torch.compile is looked up when a bucket compiles: install("verified") replaces it.
        return lambda function: torch.compile(function, dynamic=dynamic, **arguments)

    return Compilers(compiler(dynamic=False), compiler(dynamic=True))


def _separated(function: Callable[..., Any], suffix: str) -> FunctionType:
    """Return a copy of ``function`` with a code object and a name of its own.

    What Dynamo does not trace, such as ``nn.Sequential.forward``, is called by a function that
    it does: the frame that ``torch.compile`` would put around it is shared by all buckets, and
    so would be the recompile limit.
    """
    if not isinstance(function, FunctionType) or not _torch.traced(function):
        function = _trampoline(function)
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{suffix}")
    copied = FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
    # FunctionType takes all but these.
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__module__ = function.__module__
    return copied


def _trampoline(function: Callable[..., Any]) -> FunctionType:
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        owner, method = function.__self__, function.__func__

        def call(*args: Any, **kwargs: Any) -> Any:
            return method(owner, *args, **kwargs)

    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]
