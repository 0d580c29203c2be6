"""An operation that reads what it writes computes what the code says, as numpy does.

``x -= x[:, :1]`` and ``x[:, 1:] = x[:, :-1]`` depend in torch on how a loop walks over the memory.
Here each operand that overlaps what is written is cloned first, and the line is named once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.overrides import has_torch_function

from torchguard._torch import (
    are_apart,
    has_python_out,
    operator_schemas,
    overriding,
    patch,
    register_in_dynamo,
    separated,
    show_overriding,
    shown_for,
    without_torch_function,
)
from torchguard._torch.mutation import DUNDERS, writes_of
from torchguard._torch.overlap import INSTALLED, is_elementwise
from torchguard._torch.overlays import AttributeOverlay
from torchguard._torch.schemas import describe_as
from torchguard.equivalence.reference import warn_of

PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_MEMORY = frozenset((float, int, bool, complex, str, slice, type(None), type(...), torch.dtype))
LISTS = ("_foreach_", "_fused_", "_amp_")


def cloned(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the call computes what the code says.

    Raises:
        OverlapWarning: where filters make it an error; nothing is written then.
    """
    return separated(function, args, kwargs, functools.partial(warn_of, function))


def _cloned_unseen(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same for a call that a mode sees, such as that of a default device.

    A call that a subclass of ``Tensor`` sees is left to its ``__torch_function__``.
    """
    if overriding((*args, *kwargs.values())):
        return args, kwargs
    with without_torch_function():
        return cloned(function, args, kwargs)


# ---- install("overlap") ----


def _all_apart(written: Any, operands: tuple[Any, ...]) -> bool:
    """Whether none of these can share memory with a tensor: the quick answer, else False."""
    if type(written) not in PLAIN:
        return False
    for each in operands:
        kind = type(each)
        if kind in PLAIN:
            if not are_apart(written, each):
                return False
        elif kind is tuple:  # an index
            for part in each:
                if type(part) not in _NO_MEMORY and not (
                    type(part) in PLAIN and are_apart(written, part)
                ):
                    return False
        elif kind not in _NO_MEMORY:
            return False
    return True


def guard_method(name: str, shown: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of ``Tensor`` that writes compute as if its operands were copied first."""
    elementwise = is_elementwise(original)
    is_operator = name in DUNDERS and name != "__setitem__"
    plain = PLAIN

    def method(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function(args) or kwargs:
            if has_torch_function((*args, *kwargs.values())):
                args, kwargs = _cloned_unseen(original, args, kwargs)
                call = show_overriding(shown, args, kwargs, is_operator=is_operator)
                return call(*args, **kwargs)
        elif len(args) == 2:  # noqa: PLR2004
            one, other = args
            kind = type(other)
            if kind is float or kind is int or (elementwise and other is one):
                return original(one, other)
            if kind in plain and are_apart(one, other):
                return original(one, other)
        elif len(args) == 1 or _all_apart(args[0], args[1:]):
            return original(*args)
        args, kwargs = cloned(original, args, kwargs)
        return original(*args, **kwargs)

    return method


def guard_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that writes to an argument, and may have ``out=``, do so."""
    lists = original.__name__.startswith(LISTS)

    def function(*args: Any, **kwargs: Any) -> Any:
        # What torch's optimizers hand over, their states, they have made themselves.
        if lists and str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.optim."):
            return original(*args, **kwargs)
        seen = has_torch_function((*args, *kwargs.values()))
        args, kwargs = (_cloned_unseen if seen else cloned)(original, args, kwargs)
        return original(*args, **kwargs)

    return function


def guard_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that writes to ``out=``, and to nothing else, do so."""
    elementwise = is_elementwise(original)
    plain = PLAIN

    def function(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return original(*args, **kwargs)
        if has_torch_function((*args, out, *kwargs.values())):
            args, kwargs = _cloned_unseen(original, args, {**kwargs, "out": out})
            return original(*args, **kwargs)
        if type(out) in plain:
            for each in args:
                kind = type(each)
                if kind is int or kind is float or (elementwise and each is out):
                    continue
                if kind not in plain or not are_apart(out, each):
                    break
            else:
                if not kwargs:
                    return original(*args, out=out)
        args, kwargs = cloned(original, args, {**kwargs, "out": out})
        return original(*args, **kwargs)

    return function


def _reads_others(name: str) -> bool:
    """Whether an operation that writes its first argument takes another tensor: relu_ does not."""
    schemas = operator_schemas(name)
    return not schemas or any(
        sum("Tensor" in str(argument.type) for argument in schema.arguments) > 1
        for schema in schemas
    )


@functools.cache
def _overlays() -> tuple[AttributeOverlay, ...]:
    with patch.originals_in_place():
        return _looked_up()


# Its loops are not in the `with` statement: see block.py.
def _looked_up() -> tuple[AttributeOverlay, ...]:
    from torchguard.rollback import interception  # noqa: PLC0415 - it imports this

    methods: dict[str, patch.Make] = {}
    for name in dir(torch.Tensor):
        if name in DUNDERS or (name.endswith("_") and not name.endswith("__")):
            writes = writes_of(getattr(torch.Tensor, name))
            if writes is not None and writes.elements and _reads_others(name):
                make = functools.partial(guard_method, name, shown_for(name))
                methods[name] = functools.partial(_named, f"torch.Tensor.{name}", make)
    found = [AttributeOverlay(torch.Tensor, methods)]
    for module in interception.NAMESPACES:
        makes = {
            name: functools.partial(_named, path, guard_function if writes_it else guard_out)
            for name, function in sorted(vars(module).items())
            if isinstance(function, BuiltinFunctionType) and not name.startswith("__")
            if (path := f"{module.__name__}.{name}") != INSTALLED
            if (writes_it := writes_of(function) is not None and _reads_others(name))
            or (has_python_out(function) or name.endswith("_copy"))
        }
        if makes:
            found.append(AttributeOverlay(module, makes))
    return tuple(found)


def _named(path: str, make: patch.Make, original: Callable[..., Any]) -> Callable[..., Any]:
    function: Any = make(original)
    describe_as(function, original, path, is_method=path.startswith("torch.Tensor."))
    register_in_dynamo(function, original)
    return function  # type: ignore[no-any-return]


_applied: list[AttributeOverlay] = []


def replacements() -> dict[str, patch.Make]:
    """Return what ``install("overlap")`` patches by itself; :func:`changed` does the rest."""
    return {INSTALLED: guard_function}


def changed() -> None:
    """Put the overlays on when the guard is installed, or take them off."""
    with patch.lock:
        if patch.patched(INSTALLED) and not _applied:
            patch.overlay(_overlays())
            _applied.extend(_overlays())
        elif not patch.patched(INSTALLED) and _applied:
            patch.remove_overlay(list(_applied))
            _applied.clear()


def not_needed() -> str | None:
    """Try the defect: ``x -= x[:, :1]``."""
    x = torch.arange(12.0, device="cpu").reshape(3, 4)
    expected = x - x[:, :1]
    patch.original("torch.Tensor.sub_")(x, x[:, :1])
    right = "an operation that reads what it writes is right on this torch"
    return right if x.equal(expected) else None
