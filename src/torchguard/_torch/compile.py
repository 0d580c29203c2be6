"""torch.compile: its backends, and what it keeps of a function."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch

__all__ = [
    "before_backward",
    "compile_in_place",
    "compiled_call",
    "compiled_variants",
    "compiler_of",
    "compiles_dynamic",
    "compiles_inside",
    "default_backend",
    "dynamo_backend",
    "graphs_compiled",
    "inductor_backend",
    "inductor_draws_like_eager",
    "inductor_options",
    "keep_settings",
    "mutation_switches",
    "records_cuda_graphs",
    "settings_are_shared",
    "settings_of_compiled",
    "traced",
    "without_recompile_limit",
]


def compiler_of(compiled: Any) -> tuple[Any, Any] | None:
    """Return what ``torch.compile`` was given and how to compile something else the same way.

    None for what is not compiled. A compiled module says both itself, a compiled function has
    its original as an attribute and its compiler in its closure.
    """
    if isinstance(compiled, torch.nn.Module):
        settings = compiled.__dict__.get("dynamo_ctx")
        original = compiled._modules.get("_orig_mod")
        return None if settings is None or original is None else (original, settings)
    original = getattr(compiled, "_torchdynamo_orig_callable", None)
    if original is None or not hasattr(compiled, "__closure__"):
        return None
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    settings = cells["self"].cell_contents if "self" in cells else None
    if not hasattr(settings, "compiler_config"):  # torch.compiler.disable has a closure as well
        return None
    return original, settings


def compiled_call(given: Any) -> Any:
    """Return what ``torch.compile`` has made: this, or the call of a module compiled in place.

    None for what is not compiled.
    """
    # torch.compile leaves a module's own class, and puts what it compiled behind it.
    if hasattr(given, "get_compiler_config"):
        return given
    return vars(given).get("_compiled_call_impl") if isinstance(given, torch.nn.Module) else None


def settings_of_compiled(compiled: Any) -> dict[str, Any] | None:
    """Return how ``torch.compile`` was called to make this, or None where torch does not say.

    The keys: ``function`` (a function, or a module), ``fullgraph``, ``dynamic`` and
    ``compiler`` (what turns a graph into a callable).
    """
    found = compiler_of(compiled)
    if found is None:
        return None
    function, settings = found
    compiler: Any = getattr(settings, "callback", None)
    one_graph = getattr(settings, "fullgraph", None)
    while compiler is not None:  # Dynamo wraps it, in another way on each release
        one_graph = getattr(compiler, "_one_graph", one_graph)
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        inner = inner or getattr(compiler, "_torchdynamo_orig_callable", None)
        if inner is None:
            break
        compiler = inner
    if compiler is None:
        return None
    return {
        "function": function,
        "fullgraph": bool(one_graph),
        "dynamic": getattr(settings, "_dynamic", None),
        # torch.compile wraps a backend that is not inductor once more.
        "compiler": getattr(compiler, "compiler_fn", compiler),
    }


def compiles_inside(
    compiled: Callable[..., Any], scope: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """Return the same compiled function, which enters ``scope()`` whenever Dynamo compiles for it.

    Dynamo looks for a compiled variant without a lock, and each guard it evaluates releases the
    GIL. When another thread moves an entry to the front of the list meanwhile, the entry that
    fits can be walked past, so any call may compile, in any thread. (With 2.13: 8 threads that
    call one function compiled for 2 sizes compile it 7 more times.) What happens then is up to
    the callback, which costs nothing while calls find their variant.

    What ``dynamic=`` asks for is set while Dynamo compiles and not while the function runs, as
    :func:`keep_settings` has it.
    """
    found = compiler_of(compiled)
    callback = getattr(found[1], "callback", None) if found is not None else None
    if found is None or not callable(callback):
        return compiled
    set_dynamic = _changes_shared_settings(found[1])
    # No other thread compiles while they are changed: Dynamo takes this lock, again, to compile.
    lock = importlib.import_module("torch._dynamo.convert_frame").compile_lock

    def convert(*args: Any, **kwargs: Any) -> Any:
        with scope(), contextlib.ExitStack() as settings_before:
            if set_dynamic:
                settings_before.enter_context(lock)
            for change in set_dynamic:
                settings_before.callback(change())
            return callback(*args, **kwargs)

    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        # The backend is part of a variant's cache key, and found by this attribute. As many
        # steps away as before: set_stance("eager_then_compile") counts them.
        backend = getattr(callback, name, None)
        if backend is not None:
            setattr(convert, name, backend)
    settings = object.__new__(type(found[1]))
    # Not copy.copy(): its __reduce__ leaves dynamic= and most of the other settings out.
    hooks = [each for each in getattr(found[1], "enter_exit_hooks", ()) if each not in set_dynamic]
    vars(settings).update(vars(found[1]), callback=convert, enter_exit_hooks=hooks)
    result: Callable[..., Any] = settings(found[0])
    return result


def keep_settings(compiled: Any) -> Any:
    """Return the same compiled function, whose calls leave Dynamo's settings alone.

    Up to torch 2.11 ``dynamic=`` changes settings of the whole process while the function runs.
    Where the calls of two threads overlap, the second finds what the first has set, and sets it
    again when it ends: ``automatic_dynamic_shapes`` is False from then on, for all that is
    compiled. https://github.com/pytorch/pytorch/issues/118260
    """
    found = compiler_of(compiled)
    if found is None or not _changes_shared_settings(found[1]):
        return compiled
    return compiles_inside(compiled, contextlib.nullcontext)


def _changes_shared_settings(settings: Any) -> list[Callable[[], Callable[[], None]]]:
    """Return what a call of a compiled function does for ``dynamic=`` to other threads as well."""
    # https://github.com/pytorch/pytorch/blob/v2.6.0/torch/_dynamo/eval_frame.py#L367
    changes = [
        hook
        for hook in getattr(settings, "enter_exit_hooks", ())
        if "_make_closure_patcher" in getattr(hook, "__qualname__", "")
    ]
    return changes if changes and settings_are_shared() else []


@functools.cache
def settings_are_shared() -> bool:
    """Whether a setting of Dynamo that one thread changes for a moment is seen by the others."""
    config: Any = importlib.import_module("torch._dynamo.config")
    seen: list[bool] = []
    before = config.verbose  # one that nothing reads in between
    with config.patch(verbose=not before):
        thread = threading.Thread(target=lambda: seen.append(config.verbose))
        thread.start()
        thread.join()
    return seen != [before]


def traced(function: Callable[..., Any]) -> bool:
    """Whether Dynamo compiles the frame of this function, True where torch does not say.

    It does not for functions of torch and of Python's own library. ``torch.compile`` puts one
    frame around those, ``inner``, whose code object and cache all of them share.
    """
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    return not getattr(rules, "check", lambda _: False)(function)


def compile_in_place(module: torch.nn.Module, **settings: Any) -> None:
    """Equals ``module.compile(**settings)``, for torch's own modules too.

    Dynamo does not look into a frame of ``torch.nn``, so ``module.compile()`` leaves an
    ``nn.Sequential`` eager on some releases; ``torch.compile(module)`` knows the way out.
    """
    utilities = importlib.import_module("torch._dynamo.external_utils")
    if hasattr(utilities, "wrap_inline"):
        call = utilities.wrap_inline(module._call_impl)
        module._compiled_call_impl = torch.compile(call, **settings)
    else:
        module.compile(**settings)
    module._compiled_call_impl = keep_settings(module._compiled_call_impl)


def compiles_dynamic(settings: Any) -> bool:
    """Whether this compiler was given ``dynamic=True``."""
    return getattr(settings, "_dynamic", None) is True


def records_cuda_graphs(compiled: Callable[..., Any]) -> bool:
    """Whether a compiled function may record CUDA graphs, whose outputs are memory of theirs."""
    config: Any = getattr(compiled, "get_compiler_config", lambda: None)()
    if isinstance(config, dict) and "triton.cudagraphs" in config:
        return bool(config["triton.cudagraphs"])
    return False


def compiled_variants(code: CodeType) -> int:
    """Count the compiled variants Dynamo keeps for a code object; 0 where it does not say."""
    hooks: Any = getattr(torch._C._dynamo, "eval_frame", None)
    entries = getattr(hooks, "_debug_get_cache_entry_list", None)
    return 0 if entries is None else len(entries(code))


def graphs_compiled() -> int:
    """Count the graphs that reached a compiler so far in this process."""
    utilities: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utilities is None else int(utilities.counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def without_recompile_limit() -> Iterator[None]:
    """Compile as often as it takes, in frames behind a graph break too.

    Without it the ninth size of such a frame would run eager, with one line in the log.
    https://github.com/pytorch/pytorch/issues/128071
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    names = ("recompile_limit", "accumulated_recompile_limit")
    older = ("cache_size_limit", "accumulated_cache_size_limit")
    found = names if hasattr(config, names[0]) else older
    raised = {name: max(getattr(config, name), 1 << 16) for name in found}
    with config.patch(raised):
        yield


@contextlib.contextmanager
def before_backward(call: Callable[[str], None]) -> Iterator[None]:
    """Call this, with the id of a graph, before its backward is compiled, which is done late.

    What it raises comes out of ``backward()``. torch 2.6 has no such callback: it isn't called.
    """
    callbacks: Any = importlib.import_module("torch._dynamo.callback")
    if not hasattr(callbacks, "on_compile_start"):
        yield
        return

    def notice(*given: Any) -> None:
        trigger = getattr(given[0], "callback_trigger", None) if given else None
        if getattr(trigger, "name", None) == "LAZY_BACKWARD":
            call(given[0].compile_id)

    callbacks.on_compile_start(notice)
    try:
        yield
    finally:
        callbacks.callback_handler.remove_start_callback(notice)


# ---- backends and their settings that no option reaches ----


def dynamo_backend(name: str) -> Callable[..., Any]:
    """Return the compiler that ``torch.compile(backend=name)`` uses."""
    registry = importlib.import_module("torch._dynamo.backends.registry")
    backend: Callable[..., Any] = registry.lookup_backend(name)
    return backend


def default_backend() -> Any:
    """Return the backend of a ``torch.compile`` that names none; 2.15 lets the user choose."""
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
