"""torch's operators and functions, and their schemas."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch


def private(path: str, default: Any) -> Any:
    """Return ``torch.<path>``, or a default where this release of torch has no such thing."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return default


C_NAMESPACE: Any = private("_C._nn", ModuleType("torch._C._nn"))
"""The namespace in which ``torch.nn.functional`` finds its builtins."""

OPERATOR_CLASSES: tuple[type, ...] = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""What ``torch.ops.aten.add.Tensor`` and ``torch.ops.aten.add`` are."""


def operator_schemas(name: str) -> list[Any]:
    """Return the schemas of ``aten::name``; none if torch lacks the operator."""
    # Not torch.ops.aten.name: that stays behind as an attribute, and in TorchScript's table.
    schemas: list[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return schemas


STATISTICS: dict[str, tuple[int, str | None]] = {
    "batch_norm": (3, "training"),
    "native_batch_norm": (3, "training"),
    "_batch_norm_impl_index": (3, "training"),
    "cudnn_batch_norm": (3, "training"),
    "miopen_batch_norm": (3, "training"),
    "instance_norm": (3, "use_input_stats"),
    # What nn.SyncBatchNorm calls.
    "batch_norm_update_stats": (1, None),
    "batch_norm_gather_stats": (3, None),
    "batch_norm_gather_stats_with_counts": (3, None),
}
"""Of operators that normalise, what their schemas leave out: where ``running_mean`` is among the
arguments, which is written, and the flag after ``running_var`` that makes them write it."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of an overload, ``torch.ops.aten.add.Tensor``; dispatch modes get those."""


def schemas_of(operator: object) -> list[Any] | None:
    """Return the schemas of something from ``torch.ops``; None if it is nothing of the kind."""
    if isinstance(operator, torch._ops.OpOverload):
        return [operator._schema]
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return [getattr(operator, name)._schema for name in operator.overloads()]
    return None


def operator_name(function: object) -> str | None:
    """Return ``aten::add`` or ``higher_order::cond`` for what is of ``torch.ops``, else None."""
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name
    if isinstance(function, torch._ops.OpOverloadPacket):
        return function._qualified_op_name
    if isinstance(function, torch._ops.HigherOrderOperator):
        return f"higher_order::{function.__name__}"
    return None


def has_only_results(function: object) -> bool:
    """Whether an operator's schema and its token promise that its results are its only effect."""
    # AOTAutograd and inductor act on it: they drop, merge and move such calls. An operator that
    # prints or sends has a token, one that returns nothing is called for an effect, and a
    # ScriptObject has a state.
    # https://github.com/pytorch/pytorch/blob/main/torch/_higher_order_ops/effects.py
    schemas = schemas_of(function)
    return bool(schemas) and all(
        schema.returns
        and not schema.is_mutable
        and all(argument.type.kind() != "ClassType" for argument in schema.arguments)
        and not _has_effect_token(schema)
        for schema in schemas or []
    )


def _has_effect_token(schema: Any) -> bool:
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    effect_of = getattr(effects, "_get_effect", None)
    if effect_of is not None:
        return effect_of(schema.name) is not None
    table = getattr(effects, "SIDE_EFFECTS", None)  # up to torch 2.9, by overload
    return table is None or any(
        isinstance(known, torch._ops.OpOverload) and known._schema.name == schema.name
        for known in table
    )


def has_python_out(function: Callable[..., Any]) -> bool:
    """Whether a builtin of torch takes ``out=``."""
    # By name: torch.mm and torch.dsmm are one function, and compare equal.
    return _has_python_out(function.__name__, function)


@functools.cache  # install("out") asks for some 800 builtins each time
def _has_python_out(name: str, function: Callable[..., Any]) -> bool:
    # Of the overloads that the code generator adds, Python has those of the *_copy family alone.
    return any(
        torch.Tag.generated not in tags_of(schema) or _is_taken(function, schema)
        for schema in _schemas_with_out(name)
    )


class _Asked:
    """Taken for a tensor by what reads the arguments of a builtin, which then calls this."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> type[_Asked]:
        return cls


# In the place of a required argument of each type.
_ANY_VALUE = {"IntType": 1, "FloatType": 1.0, "BoolType": True, "StringType": "", "NumberType": 1}


def _is_taken(function: Callable[..., Any], schema: Any) -> bool:
    """Whether a builtin reads the arguments of this overload; nothing is computed."""
    required = [each for each in schema.arguments if not each.has_default_value()]
    given = [_any_value_of(each.type) for each in required if not each.kwarg_only]
    named = {each.name: _any_value_of(each.type) for each in required if each.kwarg_only}
    outs = [named.pop(each.name) for each in required if each.is_out]
    named["out"] = outs[0] if len(outs) == 1 else outs
    with contextlib.ExitStack() as stack, contextlib.suppress(Exception):
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        return function(*given, **named) is _Asked
    return False


def _any_value_of(kind: Any) -> Any:
    if kind.kind() == "TensorType":
        return _Asked()
    if kind.kind() == "ListType":
        return [_any_value_of(kind.getElementType())]
    return _ANY_VALUE.get(kind.kind())


def _schemas_with_out(name: str) -> list[Any]:
    schemas = operator_schemas(name)
    return [each for each in schemas if any(argument.is_out for argument in each.arguments)]


def tags_of(schema: Any) -> list[torch.Tag]:
    """Return the tags of an overload."""
    _, _, tags = torch._C._get_operation_overload(schema.name, schema.overload_name)
    return tags


def is_torchs_own(function: Any) -> bool:
    """Whether a function is torch's or ours, and not what other code has put around it."""
    if isinstance(function, FunctionType):  # functools.wraps copies __module__, but no globals
        module = function.__globals__.get("__name__", "").partition(".")[0]
        return module in {"torch", "torchguard"}
    return isinstance(function, (BuiltinFunctionType, MethodDescriptorType))


def paths_behind_python(*names: str) -> list[str]:
    """Return the paths of builtins that functions written in Python call."""
    return [f"torch._VF.{name}" for name in names if hasattr(torch._VF, name)]
