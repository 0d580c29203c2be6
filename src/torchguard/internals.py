"""Every private torch API that torchguard uses, each with what it falls back to.

Nothing public reads or writes a tensor's version counter, steps around
``__torch_function__`` without a call, or tells whether a tensor class has a
dispatcher of its own. ``tests/test_internals.py`` checks each name here on the
torch at hand, and that nothing private is used anywhere else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
import wrapt
from torch.overrides import TorchFunctionMode, has_torch_function_unary
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

__all__ = [
    "SymbolicSizes",
    "TorchDispatchMode",
    "autocast_is_on",
    "base_of",
    "before_backward",
    "compile_in_place",
    "compiled_variants",
    "compiler_of",
    "compiles_dynamic",
    "coo_parts",
    "default_backend",
    "dynamo_backend",
    "dynamo_is_imported",
    "fake_of",
    "fill_tables",
    "follow_in_dynamo",
    "follow_in_torchscript",
    "forget_in_torchscript",
    "graphs_compiled",
    "has_hooks",
    "has_own_dispatch",
    "has_python_out",
    "has_saved_tensors_hooks",
    "has_torch_function_unary",
    "inductor_backend",
    "inductor_draws_like_eager",
    "inductor_options",
    "inside_compiled",
    "is_view",
    "keep_whole_in_graph",
    "mark_untraced",
    "mutation_switches",
    "operator_name",
    "operator_schemas",
    "overriding",
    "paths_behind_python",
    "rebuild_dynamo_tables",
    "records_cuda_graphs",
    "refuses_writes",
    "replace_torch_function_modes",
    "schemas_of",
    "set_version",
    "settings_of_compiled",
    "shape_guards",
    "skip_frames",
    "torch_function_modes",
    "tracing_again",
    "tracing_context",
    "tracing_unseen",
    "under_functorch",
    "version_of",
    "without_dispatch_modes",
    "without_recompile_limit",
    "without_torch_function",
]

without_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = (
    torch._C.DisableTorchFunction
)
"""A scope in which neither subclasses nor modes see a call.

The developer notes on extending torch name it; there is no public spelling.
"""


def version_of(tensor: torch.Tensor) -> int | None:
    """``tensor._version``, or None for an inference tensor, which has no version counter."""
    if tensor.is_inference():
        return None
    try:
        return tensor._version
    except RuntimeError:  # it was made to view an inference tensor: x.data = y
        return None


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Put the version counter back after a write that autograd must not hear of.

    Without it a later backward would refuse a saved tensor whose bytes never
    changed. torch 2.6 takes a tensor and a number here, later releases take
    tuples of both: the class torch itself offers for this knows which.
    """
    keeper: Any = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    if hasattr(keeper, "prev_versions"):
        keeper.prev_versions = (version,)
    else:
        keeper.prev_version = version
    keeper.__exit__(None, None, None)


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Whether operators on this tensor run Python code of its class (fake, DTensor, jagged)."""
    own = getattr(type(tensor), "__torch_dispatch__", None)
    return own is not None and own is not torch.Tensor.__torch_dispatch__


@contextlib.contextmanager
def without_dispatch_modes(tensor: torch.Tensor) -> Iterator[None]:
    """Run operators on a plain tensor unseen by dispatch modes (FLOP counters, loggers).

    A tensor with a dispatcher of its own (a fake tensor) needs it, so for those
    nothing is switched off. Falls back to letting the modes see the call.
    """
    guard = getattr(torch._C, "_DisableTorchDispatch", None)
    if guard is None or has_own_dispatch(tensor):
        yield
        return
    with guard():
        yield


def keep_whole_in_graph(*functions: Callable[..., Any]) -> None:
    """Let Dynamo put a call of each function into its graph as one node, untraced.

    The backend traces it, as it does torch's own functions. Dynamo is told when it
    is imported: ``torch.compiler.allow_in_graph`` itself would import it.
    """

    def tell(_: Any) -> None:
        for function in functions:
            torch.compiler.allow_in_graph(function)

    wrapt.register_post_import_hook(tell, "torch._dynamo")


_INTERPRETERS: Any = getattr(torch._C, "_functorch", None)


def under_functorch() -> bool:
    """Whether this runs inside a transformation such as ``torch.func.vmap``."""
    peek = getattr(_INTERPRETERS, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def skip_frames(code: CodeType) -> None:
    """Tell Dynamo to run this code, and what is defined inside it, as it is.

    After a graph break the interpreter calls a patched method from code that
    Dynamo watches; without this the replacement and whatever it calls would be
    compiled as frames of their own and counted as graphs. It marks code objects;
    Dynamo itself is not imported. Where neither spelling exists, only that count
    differs.
    """
    hooks: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if hasattr(hooks, "skip_code"):  # torch 2.6
        hooks.skip_code(code)
    elif hasattr(hooks, "set_code_exec_strategy"):
        action = hooks._FrameAction
        hooks.set_code_exec_strategy(code, hooks._FrameExecStrategy(action.SKIP, action.DEFAULT))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            skip_frames(constant)


def fake_of(variable: Any) -> torch.Tensor | None:
    """Return the fake tensor behind what Dynamo calls a TensorVariable; None if it has none."""
    node = getattr(getattr(variable, "proxy", None), "node", None)
    fake = getattr(node, "meta", {}).get("example_value")
    return fake if isinstance(fake, torch.Tensor) else None


@contextlib.contextmanager
def tracing_unseen() -> Iterator[None]:
    """Let Dynamo trace something of ours as in a fresh thread, and forget that it did.

    No modes and no inference mode, gradients on; what Dynamo counts (graphs, breaks)
    is as before afterwards.
    """
    utilities: Any = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utilities, "counters", {})
    before = {name: dict(counted) for name, counted in counters.items()}
    modes = torch_function_modes()
    replace_torch_function_modes([])
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        replace_torch_function_modes(modes)
        for name in list(counters):
            counters[name].clear()
            counters[name].update(before.get(name, {}))
            if name not in before:
                del counters[name]


def torch_function_modes() -> list[TorchFunctionMode]:
    """Return the modes on this thread's stack, the outermost first."""
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def replace_torch_function_modes(modes: list[TorchFunctionMode]) -> None:
    """Put these modes on the stack instead of those that are there."""
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and values; the public ones refuse a tensor that is not coalesced."""
    return tensor._indices(), tensor._values()


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd tracks the tensor as a view, which can't be detached in place."""
    return tensor._is_view()


def refuses_writes(tensor: torch.Tensor) -> bool:
    """Whether autograd refuses to write to it in place, before anything is written.

    That is so for a leaf that requires grad, and for a view of one.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    return tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)


def overriding(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return those values whose ``__torch_function__`` torch would call."""
    return tuple(
        value
        for value in values
        if type(value) is not torch.Tensor
        and getattr(type(value), "__torch_function__", torch._C._disabled_torch_function_impl)
        is not torch._C._disabled_torch_function_impl
    )


def schemas_of(operator: object) -> list[Any] | None:
    """Return the schemas of something from ``torch.ops``; None if it is nothing of the kind."""
    if isinstance(operator, torch._ops.OpOverload):
        return [operator._schema]
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return [getattr(operator, name)._schema for name in operator.overloads()]
    return None


def paths_behind_python(*names: str) -> list[str]:
    """Return the paths of builtins that functions written in Python call."""
    return [f"torch._VF.{name}" for name in names if hasattr(torch._VF, name)]


def operator_schemas(name: str) -> list[Any]:
    """Return the schemas of ``aten::name``; none if there is no such operator.

    ``torch.ops.aten.name`` would do, but leaves the operator behind as a new
    attribute, and in TorchScript's table.
    """
    schemas: list[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return schemas


def has_python_out(function: Callable[..., Any]) -> bool:
    """Whether a builtin of torch takes ``out=``.

    Its operator has an overload with an output argument. Overloads that the code
    generator added on its own have no Python binding, so those don't count.
    """
    return any(
        argument.is_out and not _is_generated(schema)
        for schema in operator_schemas(function.__name__)
        for argument in schema.arguments
    )


def _is_generated(schema: Any) -> bool:
    _, _, tags = torch._C._get_operation_overload(schema.name, schema.overload_name)
    return torch.Tag.generated in tags


def fill_tables() -> None:
    """Fill tables that know torch's functions by identity; call it while they are torch's own.

    ``torch.device`` as a context manager looks up what makes tensors in one, and
    ``torch.overrides`` the names of functions in another.
    """
    tables: tuple[Any, ...] = (
        getattr(torch.overrides, "_get_overridable_functions", None),
        getattr(importlib.import_module("torch.utils._device"), "_device_constructors", None),
    )
    for table in tables:
        if table is not None:
            table()


def dynamo_is_imported() -> bool:
    """Whether Dynamo is there; an import that another thread has begun is waited for."""
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._dynamo")
    return hasattr(sys.modules.get("torch._dynamo"), "optimize")


def rebuild_dynamo_tables() -> None:
    """Let Dynamo look up torch's functions again; call it while they are torch's own.

    Dynamo knows functions by identity, in tables it fills once: a table filled
    while a replacement stands in torch's place would not know the original.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    handlers = sys.modules.get("torch._dynamo.variables.torch")
    variable = getattr(handlers, "TorchInGraphFunctionVariable", None)
    tables: tuple[Any, ...] = (
        getattr(rules, "get_torch_obj_rule_map", None),
        getattr(rules, "get_tensor_method", None),
        getattr(variable, "_get_handlers", None),
    )
    for table in tables:
        if hasattr(table, "cache_clear"):
            table.cache_clear()
            table()


def follow_in_dynamo(replacement: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let Dynamo trace ``original`` where it meets ``replacement``.

    It is the attribute that torch's own decorators set for the same purpose.
    Without it Dynamo would trace through the replacement, with more guards.
    """
    replacement._torchdynamo_inline = original  # type: ignore[attr-defined]


def follow_in_torchscript(replacement: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let ``torch.jit.script`` compile ``original`` where it meets ``replacement``."""
    builtin = _torchscript_builtins().get(id(original))
    if builtin is not None:
        _torchscript_builtins()[id(replacement)] = builtin


def forget_in_torchscript(replacement: Callable[..., Any]) -> None:
    """Undo :func:`follow_in_torchscript`; ids are used again once an object is gone."""
    _torchscript_builtins().pop(id(replacement), None)


def _torchscript_builtins() -> dict[int, str]:
    table = getattr(torch.jit._builtins, "_get_builtin_table", None)
    return {} if table is None else table()


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of which autograd tracks this one as a view, or None."""
    return tensor._base


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether somebody's hooks see the tensor's gradient."""
    return bool(tensor._backward_hooks)


def has_saved_tensors_hooks() -> bool:
    """Whether somebody's hooks see the tensors that autograd saves; True where nobody can say."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None  # True: those that tracing sees too


def operator_name(function: object) -> str | None:
    """Return ``aten::add`` or ``higher_order::cond`` for what is of ``torch.ops``, else None."""
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name
    if isinstance(function, torch._ops.OpOverloadPacket):
        return function._qualified_op_name
    if isinstance(function, torch._ops.HigherOrderOperator):
        return f"higher_order::{function.__name__}"
    return None


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


@contextlib.contextmanager
def tracing_again(context: Any) -> Iterator[None]:
    """Compile once more for a graph whose context was kept from when Dynamo traced it.

    No other thread compiles meanwhile.
    """
    frames = importlib.import_module("torch._dynamo.convert_frame")
    with getattr(frames, "compile_lock", contextlib.nullcontext()), torch._guards.tracing(context):
        yield


def shape_guards(context: Any) -> int | None:
    """Count the guards on symbolic sizes so far; None where nobody can say."""
    environment = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    return None if environment is None else len(environment.guards)


def settings_of_compiled(compiled: Any) -> dict[str, Any] | None:
    """Return how ``torch.compile`` was called to make this, or None where it can't be told.

    The keys: ``function`` (a function, or a module), ``fullgraph``, ``dynamic`` and
    ``compiler`` (what turns a graph into a callable).
    """
    frames = importlib.import_module("torch._dynamo.eval_frame")
    if isinstance(compiled, frames.OptimizedModule):
        function, context = compiled._orig_mod, compiled.dynamo_ctx
    else:
        function = getattr(compiled, "_torchdynamo_orig_callable", None)
        cells = getattr(compiled, "__closure__", None) or ()
        contexts = [cell.cell_contents for cell in cells if not _is_empty(cell)]
        kinds = (frames.OptimizeContext, frames.OptimizeContext.__base__)
        context = next((value for value in contexts if isinstance(value, kinds)), None)
    compiler: Any = getattr(context, "callback", None)
    one_graph = getattr(context, "fullgraph", None)
    while compiler is not None:
        one_graph = getattr(compiler, "_one_graph", one_graph)
        inner = getattr(compiler, "_torchdynamo_orig_backend", None)
        inner = inner or getattr(compiler, "_torchdynamo_orig_callable", None)
        if inner is None:
            break
        compiler = inner
    if function is None or not isinstance(compiler, torch._TorchCompileInductorWrapper):
        return None
    dynamic = getattr(context, "_dynamic", None)
    return {
        "function": function,
        "fullgraph": bool(one_graph),
        "dynamic": dynamic,
        "compiler": compiler,
    }


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


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading it is the question
    except ValueError:
        return True
    return False


# ---- what torch.compile keeps about a compiled function ----


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

    What it raises comes out of ``backward()``. torch 2.6 does not tell, so there it isn't called.
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


def mark_untraced(function: Callable[..., Any]) -> None:
    """Let Dynamo break its graph at a call of this function, as ``torch.compiler.disable`` does.

    It is the mark that ``disable`` leaves; its wrapper would cost each call some microseconds.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "torchguard.bucketed"  # type: ignore[attr-defined]


def inside_compiled() -> bool:
    """Whether Dynamo is watching the frames of this thread: a compiled function has called us."""
    hooks: Any = getattr(torch._C._dynamo, "eval_frame", None)
    callback = getattr(hooks, "get_eval_frame_callback", None)
    return callback is not None and callback() not in {None, False}


autocast_is_on: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled
)
"""Whether autocast is on for any device; the public function is asked for one at a time."""


class SymbolicSizes:
    """A scope in which tensors have no data and sizes are symbols.

    What is computed in it tells how sizes of outputs depend on sizes of inputs. Nothing
    public does that without tracing a whole graph.

    Args:
        hints: for each name an example of its size, 2 or more; none for sizes that are numbers.
    """

    def __init__(self, hints: dict[str, int]) -> None:
        shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
        source: Any = importlib.import_module("torch._dynamo.source")
        environment: Any = shapes.ShapeEnv()
        self._shapes: Any = environment if hints else None
        self._mode = fake.FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self._symbols: dict[str, Any] = {}
        self._sizes: dict[str, Any] = {}
        for name, hint in hints.items():
            where = source.ConstantSource(f"size_of_{len(self._symbols)}")
            symbol = environment.create_symbol(
                hint, source=where, dynamic_dim=shapes.DimDynamic.DYNAMIC, constraint_dim=None
            )
            self._symbols[name] = symbol
            self._sizes[name] = environment.create_symintnode(symbol, hint=hint, source=where)

    def __enter__(self) -> Self:
        self._mode.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._mode.__exit__(*failure)

    def empty(self, shape: tuple[int | str, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a tensor without data; a name in ``shape`` stands for its symbol."""
        sizes = [self._sizes[size] if isinstance(size, str) else size for size in shape]
        return torch.empty(
            sizes, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )

    def conditions(self) -> list[Any]:
        """Return what was assumed about the symbols on the way."""
        return [] if self._shapes is None else [guard.expr for guard in self._shapes.guards]

    def expression(self, size: Any) -> Any:
        """Return the expression behind a size; a plain number is its own."""
        if isinstance(size, torch.SymInt):
            return size.node.expr
        return size

    def value(self, expression: Any, sizes: dict[str, int]) -> int | bool | None:
        """Put sizes in; None if something else is in the expression too."""
        if isinstance(expression, int):
            return expression
        result = expression.subs({self._symbols[name]: size for name, size in sizes.items()})
        if result.free_symbols:
            return None
        return bool(result) if result.is_Boolean else int(result)
