"""torch.compile: its backends, and what it keeps of a function."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from torchguard._torch.schemas import private


def compiler_of(compiled: Any) -> tuple[Any, Any] | None:
    """Return what ``torch.compile`` was given and its settings; None for what is not compiled."""
    compiled = getattr(compiled, "__torchguard_compiled__", compiled)  # what compares its calls
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


COMPILED_IN_PLACE = "_compiled_call_impl"
"""Where ``module.compile()`` puts the call that it makes."""


def compiled_in_place(module: Any) -> Any:
    """Return the call that ``module.compile()`` has made; None if it was not called."""
    return getattr(module, COMPILED_IN_PLACE, None)


def forget_compiled_in_place(module: torch.nn.Module) -> None:
    """Let a module be called uncompiled again."""
    object.__setattr__(module, COMPILED_IN_PLACE, None)


def enters_autocast(node: torch.fx.Node) -> bool:
    """Whether a node of a graph is the beginning of an autocast scope."""
    return getattr(node.target, "__name__", "") == "_enter_autocast"


def compiled_call(given: Any) -> Any:
    """Return what ``torch.compile`` has made: this, or the call of a module compiled in place."""
    if hasattr(given, "get_compiler_config"):
        return given
    return compiled_in_place(given) if isinstance(given, torch.nn.Module) else None


def uncompiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return what calls a module with its hooks, whatever it was compiled to in place."""
    return module._call_impl


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Let a module run ``call`` when it is called, as ``module.compile()`` does."""
    module._compiled_call_impl = call


def backend_of_compiled(compiled: Any) -> Any:
    """Return what turns the graphs of this into callables, or None where torch does not say."""
    found = compiler_of(compiled)
    compiler = inner = None if found is None else getattr(found[1], "callback", None)
    while inner is not None:  # Dynamo wraps it, in another way on each release
        compiler = inner
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        inner = inner or getattr(compiler, "_torchdynamo_orig_callable", None)
    # torch.compile wraps a backend that is not inductor once more.
    return getattr(compiler, "compiler_fn", compiler)


def compiles_inside(
    compiled: Callable[..., Any], scope: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """Return the same compiled function, which enters ``scope()`` when Dynamo compiles for it."""
    # Dynamo looks for a compiled variant without a lock. Where another thread moves an entry to the
    # front of the list meanwhile, the one that fits can be walked past: any call may compile.
    found = compiler_of(compiled)
    callback = getattr(found[1], "callback", None) if found is not None else None
    if found is None or not callable(callback):
        return compiled

    def convert(*args: Any, **kwargs: Any) -> Any:
        with scope():
            return callback(*args, **kwargs)

    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        # The backend is part of a variant's cache key, and found by this attribute. As many
        # steps away as before: set_stance("eager_then_compile") counts them.
        backend = getattr(callback, name, None)
        if backend is not None:
            setattr(convert, name, backend)
    settings = object.__new__(type(found[1]))
    # Not copy.copy(): its __reduce__ leaves dynamic= and most of the other settings out.
    vars(settings).update(vars(found[1]), callback=convert)
    result: Callable[..., Any] = settings(found[0])
    return result


def traced(function: Callable[..., Any]) -> bool:
    """Whether Dynamo compiles the frame of this function, which is not of torch or of Python."""
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    return not getattr(rules, "check", lambda _: False)(function)


def compile_in_place(module: torch.nn.Module, **settings: Any) -> None:
    """Equals ``module.compile(**settings)``, for modules of torch too, on every release."""
    module._compiled_call_impl = torch.compile(inlined(module._call_impl), **settings)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function to compile that calls this one; torch's own are compiled too then."""
    # Dynamo does not look into a frame of torch.nn, so on some releases that leaves an
    # nn.Sequential eager.
    utilities = importlib.import_module("torch._dynamo.external_utils")
    wrap: Callable[..., Any] = getattr(utilities, "wrap_inline", lambda call: call)
    wrapped: Callable[..., Any] = wrap(function)
    return wrapped


def is_entrance(frame: FrameType | None, code: CodeType) -> bool:
    """Whether torch alone has run since the call of ``code``, with ``frame`` the innermost."""
    while frame is not None and frame.f_code is not code:
        if frame.f_code.co_filename not in _ENTRANCES:
            return False
        frame = frame.f_back
    return frame is not None


_ENTRANCES = {
    str(Path(torch.__file__).parent / each)
    for each in ("_dynamo/eval_frame.py", "_dynamo/external_utils.py", "nn/modules/module.py")
} | {str(Path(__file__).with_name(each)) for each in ("compile.py", "dynamo.py")}
"""Where the frames are between a call of a compiled function and the first that Dynamo compiles."""


def is_error_of_compiler(error: object) -> bool:
    """Whether Dynamo or inductor has raised this about what it can't compile."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def compiles_dynamic(settings: Any) -> bool:
    """Whether this compiler was given ``dynamic=True``."""
    return getattr(settings, "_dynamic", None) is True


def records_cuda_graphs(compiled: Callable[..., Any]) -> bool:
    """Whether a compiled function may record CUDA graphs, whose outputs are memory of theirs."""
    config: Any = getattr(compiled, "get_compiler_config", lambda: None)()
    return isinstance(config, dict) and bool(config.get("triton.cudagraphs"))


def compiled_variants(code: CodeType) -> int:
    """Count the compiled variants Dynamo keeps for a code object; 0 where it does not say."""
    return len(_cache_entries(code))


_cache_entries: Callable[[CodeType], Any] = private(
    "_C._dynamo.eval_frame._debug_get_cache_entry_list", lambda _: ()
)


def graphs_compiled() -> int:
    """Count the graphs that reached a compiler so far in this process."""
    utilities: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utilities is None else int(utilities.counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def compiling_uncounted() -> Iterator[None]:
    """Compile inside without a trace in what Dynamo counts."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    before = {name: counter.copy() for name, counter in counters.items()}
    try:
        yield
    finally:
        counters.clear()
        counters.update(before)


@contextlib.contextmanager
def without_recompile_limit() -> Iterator[None]:
    """Compile as often as it takes; else a ninth size runs eager, with one line in the log."""
    # https://github.com/pytorch/pytorch/issues/128071
    config: Any = importlib.import_module("torch._dynamo.config")
    kind = "recompile" if hasattr(config, "recompile_limit") else "cache_size"  # torch 2.6
    names = (f"{kind}_limit", f"accumulated_{kind}_limit")
    with config.patch({name: max(getattr(config, name), 1 << 16) for name in names}):
        yield


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
    """Return what ``torch.compile`` makes of ``backend="inductor"``, a mode and options."""
    wrapper = private("_TorchCompileInductorWrapper", None)
    if wrapper is not None:
        return wrapper(mode, options, dynamic)  # type: ignore[no-any-return]
    if mode is not None and mode != "default":
        inductor = importlib.import_module("torch._inductor")
        options = {**inductor.list_mode_options(mode, dynamic), **(options or {})}
    return functools.partial(dynamo_backend("inductor"), config_patches=options)


def inductor_options(backend: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of something that :func:`inductor_backend` made, those of its mode too."""
    keywords = getattr(backend, "keywords", {})
    return dict(getattr(backend, "config", None) or keywords.get("config_patches") or {})


def inductor_draws_like_eager(backend: Callable[..., Any]) -> bool:
    """Whether inductor takes its random numbers from where eager does."""
    config = importlib.import_module("torch._inductor.config")
    return bool(inductor_options(backend).get("fallback_random", config.fallback_random))


def inductor_records_cuda_graphs(backend: Callable[..., Any]) -> bool:
    """Whether inductor records what runs on a GPU as CUDA graphs."""
    config = importlib.import_module("torch._inductor.config")
    return bool(inductor_options(backend).get("triton.cudagraphs", config.triton.cudagraphs))
