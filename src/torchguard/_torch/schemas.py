"""torch's operators and functions: schemas, tables that know them by identity, signatures."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

import torch

__all__ = [
    "C_NAMESPACE",
    "OPERATOR_CLASSES",
    "PYTHON_NAMESPACE",
    "describe",
    "describe_as",
    "fill_tables",
    "has_only_results",
    "has_out",
    "has_python_out",
    "is_torchs_own",
    "is_wrapped_builtin",
    "operator_name",
    "operator_schemas",
    "paths_behind_python",
    "schema_of",
    "schemas_of",
    "signature_of",
]


PYTHON_NAMESPACE: Any = torch._VF
"""The namespace in which functions of torch written in Python find their builtins."""

C_NAMESPACE: Any = torch._C._nn
"""The namespace in which ``torch.nn.functional`` finds its builtins."""

OPERATOR_CLASSES: tuple[type, ...] = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""What ``torch.ops.aten.add.Tensor`` and ``torch.ops.aten.add`` are."""


def operator_schemas(name: str) -> list[Any]:
    """Return the schemas of ``aten::name``; none if there is no such operator.

    ``torch.ops.aten.name`` would do, but leaves the operator behind as a new
    attribute, and in TorchScript's table.
    """
    schemas: list[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return schemas


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
    """Whether an operator's schema and its token promise that its results are its only effect.

    ``torch.library.custom_op(mutates_args=())`` promises it, and AOTAutograd and inductor
    act on it: they drop, merge and move such calls. An operator that prints or sends has a
    token, see ``register_effect`` in
    https://github.com/pytorch/pytorch/blob/main/torch/_higher_order_ops/effects.py. One that
    returns nothing would be of no use without an effect, and a ScriptObject has a state.
    """
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


def has_out(function: Callable[..., Any]) -> bool:
    """Whether the operator behind a builtin has an overload with an output argument.

    It may be one without a Python binding, as that of ``relu``. (That of ``alias_copy`` has one.)
    """
    return bool(_schemas_with_out(function))


def has_python_out(function: Callable[..., Any]) -> bool:
    """Whether a builtin of torch takes ``out=``.

    Its operator has an overload with an output argument. Overloads that the code
    generator added on its own have no Python binding, so those don't count.
    """
    return not all(map(_is_generated, _schemas_with_out(function)))


def _schemas_with_out(function: Callable[..., Any]) -> list[Any]:
    schemas = operator_schemas(function.__name__)
    return [each for each in schemas if any(argument.is_out for argument in each.arguments)]


def _is_generated(schema: Any) -> bool:
    _, _, tags = torch._C._get_operation_overload(schema.name, schema.overload_name)
    return torch.Tag.generated in tags


def is_torchs_own(function: Any) -> bool:
    """Whether a function is torch's or ours, and not what other code has put around it."""
    if isinstance(function, FunctionType):  # functools.wraps copies __module__, but no globals
        module = function.__globals__.get("__name__", "").partition(".")[0]
        return module in {"torch", "torchguard"}
    return isinstance(function, (BuiltinFunctionType, MethodDescriptorType))


def is_wrapped_builtin(namespace: ModuleType, name: str) -> bool:
    """Whether torch has a builtin with ``out=`` there, and other code (a profiler, a mock) another.

    Of ``torch.nn.functional.logsigmoid`` it sees that only where the wrapper has ``__wrapped__``.
    """
    function = vars(namespace)[name]
    if not callable(function) or isinstance(function, type) or is_torchs_own(function):
        return False
    wrapped = inspect.unwrap(function)
    if not is_torchs_own(wrapped):
        short = namespace.__name__.rpartition(".")[2]
        in_c = getattr(torch._C, "_nn" if short == "functional" else f"_{short}", None)
        wrapped = getattr(in_c, name if short == "functional" else f"{short}_{name}", None)
        wrapped = wrapped or getattr(torch._C._VariableFunctions, name, None)
    return isinstance(wrapped, BuiltinFunctionType) and has_python_out(wrapped)


def paths_behind_python(*names: str) -> list[str]:
    """Return the paths of builtins that functions written in Python call."""
    return [f"torch._VF.{name}" for name in names if hasattr(torch._VF, name)]


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


# ---- signatures of functions that are made at run time ----
#
# inspect.signature raises on torch's builtins and on whatever functools.wraps copies from them, so
# a replacement has to carry a signature of its own.


_ANYTHING = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


class _Shown(str):
    """A default value that prints as the words it was written in."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def describe(
    function: Callable[..., Any], *, name: str, module: str, signature: str, doc: str | None
) -> Any:
    """Name a closure, and give it a signature (in words) and a docstring."""
    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    function.__doc__ = doc
    found = _parse(signature, annotated=True) or _ANYTHING
    function.__signature__ = found  # type: ignore[attr-defined]
    return function


def describe_as(
    function: FunctionType, original: Callable[..., Any], path: str, *, is_method: bool
) -> None:
    """Let a replacement look like the function at ``path`` (``torch.Tensor.resize_``).

    Module and qualified name are those of the place, so that pickle finds the
    replacement by name, and finds torch's own function where nothing is installed.
    """
    owner, _, name = path.rpartition(".")
    module, _, kind = owner.rpartition(".") if is_method else (owner, "", "")
    function.__name__ = name
    function.__qualname__ = f"{kind}.{name}" if is_method else name
    function.__module__ = module
    function.__doc__ = original.__doc__
    signature = signature_of(original, is_method=is_method)
    names = signature.parameters
    if "out" in (function.__kwdefaults__ or {}) and not {"out", "kwargs"} & names.keys():
        # torch.nn.functional.gelu takes an out that its docstring does not show.
        out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None)
        signature = signature.replace(parameters=[*names.values(), out])
    function.__signature__ = signature  # type: ignore[attr-defined]


def signature_of(original: Callable[..., Any], *, is_method: bool) -> inspect.Signature:
    """Return the signature of a torch function: its own, or that of its docstring.

    A docstring that shows several (``torch.max``) has no one signature that takes
    every valid call, so ``(*args, **kwargs)`` is the honest answer.
    """
    try:
        return inspect.signature(original)
    except (TypeError, ValueError):
        pass
    # A builtin of torch.linalg is named linalg_inv, and its docstring says linalg.inv.
    name = re.escape(re.sub("^(linalg|special|fft)_", "", getattr(original, "__name__", "")))
    shown = re.findall(
        rf"^(?:\s*\.\. \w+:: )?(?:[\w.]+\.)?{name}\s*(\(.*\))\s*(?:->.*)?$",
        original.__doc__ or "",
        flags=re.MULTILINE,
    )
    parsed = _parse(shown[0]) if len(shown) == 1 else None
    if parsed is None:
        return _ANYTHING
    if is_method and "self" not in parsed.parameters:
        self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parsed = parsed.replace(parameters=[self, *parsed.parameters.values()])
    return parsed


def _parse(parameters: str, *, annotated: bool = False) -> inspect.Signature | None:
    """Read ``(input, *, out=None)``; None where it is no Python parameter list."""
    try:
        tree = ast.parse(f"def function{parameters}: ...").body[0]
        assert isinstance(tree, ast.FunctionDef)
        signature = _signature(tree.args)
    except (SyntaxError, ValueError):
        return None
    return _annotated(signature, tree) if annotated else signature


def _annotated(signature: inspect.Signature, tree: ast.FunctionDef) -> inspect.Signature:
    """Add the annotations, as the words they were written in: a page shows them."""
    written = {
        argument.arg: _Shown(ast.unparse(argument.annotation))
        for argument in ast.walk(tree.args)
        if isinstance(argument, ast.arg) and argument.annotation is not None
    }
    parameters = [
        parameter.replace(annotation=written.get(parameter.name, parameter.empty))
        for parameter in signature.parameters.values()
    ]
    returns = signature.empty if tree.returns is None else _Shown(ast.unparse(tree.returns))
    return signature.replace(parameters=parameters, return_annotation=returns)


def _signature(arguments: ast.arguments) -> inspect.Signature:
    kind = inspect.Parameter
    positional = [
        *((argument.arg, kind.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument.arg, kind.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*missing, *arguments.defaults]
    found = [
        kind(name, which, default=_default(value))
        for (name, which), value in zip(positional, defaults, strict=True)
    ]
    if arguments.vararg is not None:
        found.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    found += [
        kind(argument.arg, kind.KEYWORD_ONLY, default=_default(value))
        for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg is not None:
        found.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(found)


def _default(value: ast.expr | None) -> Any:
    if value is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(value)
    except ValueError:
        return _Shown(ast.unparse(value))
