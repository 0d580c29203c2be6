"""Readable names, signatures and docstrings for functions made at run time.

``inspect.signature`` raises on torch's builtins and on whatever
``functools.wraps`` copies from them, so a replacement has to carry its own.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

__all__ = ["describe", "describe_as", "signature_of"]

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
