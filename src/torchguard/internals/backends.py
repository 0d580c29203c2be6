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
    "inductor_backend",
    "inductor_draws_like_eager",
    "inductor_options",
    "mutation_switches",
    "shape_guards",
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


@contextlib.contextmanager
def tracing_again(context: Any, symbols: Iterable[tuple[object, Any]] = ()) -> Iterator[None]:
    """Compile once more for a graph whose context was kept from when Dynamo traced it.

    Each input comes with what :func:`symbols_of` said of it; without that AOTAutograd takes
    all its sizes for dynamic ones, of which nobody knows. No other thread compiles meanwhile.
    """
    frames = importlib.import_module("torch._dynamo.convert_frame")
    told = [(value, decided) for value, decided in symbols if decided is not None]
    with getattr(frames, "compile_lock", contextlib.nullcontext()), torch._guards.tracing(context):
        for value, decided in told:
            context.tensor_to_context[value] = decided
        try:
            yield
        finally:
            # What stays here would keep torch.utils.swap_tensors from its work.
            for value, _ in told:
                context.tensor_to_context.pop(value, None)


def shape_guards(context: Any) -> int | None:
    """Count the guards on symbolic sizes so far; None where nobody can say."""
    environment = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    return None if environment is None else len(environment.guards)
