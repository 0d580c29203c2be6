"""Every private torch API that torchguard uses, each with what it falls back to.

Nothing public reads or writes a tensor's version counter, steps around
``__torch_function__`` without a call, or tells whether a tensor class has a
dispatcher of its own. ``tests/test_internals.py`` checks each name here on the
torch at hand, and that nothing private is used anywhere else.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, has_torch_function_unary
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

__all__ = [
    "SymbolicSizes",
    "TorchDispatchMode",
    "compiled_variants",
    "compiler_of",
    "compiles_dynamic",
    "coo_parts",
    "fill_tables",
    "follow_in_dynamo",
    "follow_in_torchscript",
    "forget_in_torchscript",
    "graphs_compiled",
    "has_own_dispatch",
    "has_python_out",
    "has_torch_function_unary",
    "inside_compiled",
    "inside_transform",
    "is_view",
    "mark_untraced",
    "operator_schemas",
    "overriding",
    "paths_behind_python",
    "rebuild_dynamo_tables",
    "records_cuda_graphs",
    "refuses_writes",
    "replace_torch_function_modes",
    "schemas_of",
    "set_version",
    "skip_frames",
    "torch_function_modes",
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


def inside_transform() -> bool:
    """Whether a transform of ``torch.func`` is running around this call."""
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


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
