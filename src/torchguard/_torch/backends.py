"""What turns a graph into a callable, and the settings of it that no option reaches."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = [
    "default_backend",
    "dynamo_backend",
    "fake_inputs",
    "inductor_backend",
    "inductor_draws_like_eager",
    "inductor_options",
    "mutation_switches",
    "shape_guards",
    "symbols_in",
    "symbols_of",
    "tracing_again",
    "tracing_context",
]


def dynamo_backend(name: str) -> Callable[..., Any]:
    """Return the compiler that ``torch.compile(backend=name)`` uses."""
    registry = importlib.import_module("torch._dynamo.backends.registry")
    backend: Callable[..., Any] = registry.lookup_backend(name)
    return backend


def default_backend() -> Any:
    """Return what ``torch.compile`` compiles with if nobody says; 2.15 lets the user choose."""
    registry = importlib.import_module("torch._dynamo.backends.registry")
    chosen: Callable[[], Any] = getattr(registry, "get_default_backend", lambda: "inductor")
    return chosen()


def inductor_backend(
    mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> Callable[..., Any]:
    """Return what ``torch.compile`` makes of ``backend="inductor"``, a mode and options.

    It raises at once for a mode or an option that inductor does not know, as
    ``torch.compile`` does, and it equals another one with the same settings.
    """
    wrapper: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is not None:
        backend: Callable[..., Any] = wrapper(mode, options, dynamic)
        return backend
    if mode is not None and mode != "default":
        inductor = importlib.import_module("torch._inductor")
        options = {**inductor.list_mode_options(mode, dynamic), **(options or {})}
    return functools.partial(dynamo_backend("inductor"), config_patches=options)


def inductor_options(backend: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of something that :func:`inductor_backend` made, those of its mode too."""
    given = getattr(backend, "config", None) or getattr(backend, "keywords", {}).get(
        "config_patches"
    )
    return dict(given or {})


def inductor_draws_like_eager(backend: Callable[..., Any]) -> bool:
    """Whether inductor takes its random numbers from where eager does."""
    config = importlib.import_module("torch._inductor.config")
    return bool(inductor_options(backend).get("fallback_random", config.fallback_random))


def mutation_switches() -> list[str]:
    """Return where inductor asks AOTAutograd to keep mutations of inputs in the graph.

    They are paths of functions that take ``keep_inference_input_mutations``; there
    is no option for it. Empty where there is no such function.
    """
    return [
        f"{path}.aot_autograd"
        for path in ("torch._inductor.compile_fx", "torch._dynamo.backends.common")
        if hasattr(importlib.import_module(path), "aot_autograd")
    ]


def tracing_context() -> Any:
    """Return what Dynamo knows of the graph it is compiling: its symbols, its fake tensors."""
    return torch._guards.TracingContext.try_get()


def symbols_of(context: Any, value: object) -> Any:
    """Return what Dynamo has decided about an input's sizes, which are dynamic; None if nothing.

    Ask while Dynamo compiles: for a backend that is registered, under a name of its own,
    2.13 forgets it as soon as the graph is compiled.
    """
    known: Any = getattr(context, "tensor_to_context", {})
    return known.get(value) if isinstance(value, torch.Tensor) else None


def symbols_in(values: Iterable[object]) -> set[Any]:
    """Return the symbols in the sizes, strides and offsets of tensors, and in integers."""
    shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    found: set[Any] = set()
    for value in values:
        parts = (value,)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            parts = (*value.size(), *value.stride(), value.storage_offset())
        for part in parts:
            if isinstance(part, torch.SymInt):
                found |= shapes.free_symbols(part)
    return found


def fake_inputs(context: Any, inputs: Iterable[Any], symbols: Iterable[Any]) -> list[Any] | None:
    """Return the inputs that Dynamo compiles with as AOTAutograd sees them: without values.

    With them the graph can be compiled again later, when other sizes are at hand. None where
    there is no such mode, or a tensor about which Dynamo has decided nothing.
    """
    mode: Any = getattr(context, "fake_mode", None)
    try:
        return [
            mode.from_tensor(
                value, symbolic_context=decided, source=decided.tensor_source, trace=False
            )
            if isinstance(value, torch.Tensor)
            else value
            for value, decided in zip(inputs, symbols, strict=True)
        ]
    except (AttributeError, TypeError):
        return None


@contextlib.contextmanager
def tracing_again(context: Any, symbols: Iterable[tuple[object, Any]] = ()) -> Iterator[None]:
    """Compile once more for a graph whose context was kept from when Dynamo traced it.

    Each input comes with what :func:`symbols_of` said of it; without that AOTAutograd takes
    all its sizes for dynamic ones, of which nobody knows. No other thread compiles meanwhile.
    """
    frames = importlib.import_module("torch._dynamo.convert_frame")
    told = [(value, decided) for value, decided in symbols if decided is not None]
    # A thread that calls compiled code while another one traces with torch.fx is told by 2.13 that
    # it traces itself, unless this says that torch.compile does. 2.15 asks the thread alone.
    session = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)
    lock = getattr(frames, "compile_lock", contextlib.nullcontext())
    with lock, session(), torch._guards.tracing(context):
        for value, decided in told:
            context.tensor_to_context[value] = decided
        try:
            yield
        finally:
            # What stays here would keep torch.utils.swap_tensors from its work.
            for value, _ in told:
                context.tensor_to_context.pop(value, None)


def shape_guards(context: Any) -> int | None:
    """Count the guards on symbolic sizes so far; None where nobody can say.

    AOTAutograd's cache adds that a size is no larger than 64 bits can say, which it never is.
    """
    environment = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    if environment is None:
        return None
    return sum(not _names_the_largest_integer(guard) for guard in environment.guards)


def _names_the_largest_integer(guard: Any) -> bool:
    numbers = [atom for atom in guard.expr.atoms() if atom.is_Integer]
    return any(abs(int(number)) >= 2**63 - 2 for number in numbers)
