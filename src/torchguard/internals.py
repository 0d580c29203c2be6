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
import wrapt
from torch.overrides import TorchFunctionMode, has_torch_function_unary

__all__ = [
    "coo_parts",
    "dynamo_is_imported",
    "fake_of",
    "fill_tables",
    "follow_in_dynamo",
    "follow_in_torchscript",
    "forget_in_torchscript",
    "has_own_dispatch",
    "has_python_out",
    "has_torch_function_unary",
    "is_view",
    "keep_whole_in_graph",
    "operator_schemas",
    "overriding",
    "paths_behind_python",
    "rebuild_dynamo_tables",
    "refuses_writes",
    "replace_torch_function_modes",
    "schemas_of",
    "set_version",
    "skip_frames",
    "torch_function_modes",
    "tracing_unseen",
    "under_functorch",
    "version_of",
    "without_dispatch_modes",
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
