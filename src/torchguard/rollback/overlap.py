"""An operation that reads what it writes computes what the code says, as numpy does.

``x -= x[:, :1]`` and ``x[:, 1:] = x[:, :-1]`` depend in torch on how a loop walks over the memory.
Here each operand that overlaps what is written is cloned first, and the line is named once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.overrides import has_torch_function

from torchguard._torch import (
    computing_unseen,
    has_python_out,
    operator_schemas,
    original_of,
    overriding,
    patch,
    show_overriding,
    shown_for,
    without_torch_function,
)
from torchguard.equivalence.mutation import DUNDERS, writes_of
from torchguard.equivalence.operands import PLAIN, are_apart, is_elementwise, separated
from torchguard.equivalence.reference import Said
from torchguard.errors import OverlapWarning

SWITCH = patch.Switch()
"""Whether the guard "overlap" is on."""

_NO_MEMORY = frozenset((float, int, bool, complex, str, slice, type(None), type(...), torch.dtype))
LISTS = ("_foreach_", "_fused_", "_amp_")
NAMESPACES = (torch, torch.linalg, torch.special, torch.fft, torch.sparse, torch.nn.functional)


def computed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Callable[..., Any] | None = None,
    *,
    is_seen: bool = False,
) -> Any:
    """Call a function so that it computes what the code says, and warn if an operand was copied.

    Args:
        function: what is called, whose schema says what it writes.
        args: what it is called with.
        kwargs: what it is called with.
        call: called in its place.
        is_seen: whether a mode or a subclass sees the call. A subclass copies what it wants.

    Raises:
        OverlapWarning: where filters make it an error; nothing is written then.
    """
    call = function if call is None else call
    if is_seen and overriding((*args, *kwargs.values())):
        return call(*args, **kwargs)
    with without_torch_function() if is_seen else _SEEN_BY_ALL:
        given, named, overlap = separated(function, args, kwargs)
    if overlap is None:
        return call(*given, **named)
    said = Said(function, overlap)
    try:
        said.warn()
    except OverlapWarning:
        _call_with_copies(function, given, named)  # a call that PyTorch refuses raises here
        said.record()
        raise
    result = call(*given, **named)
    said.record()
    return result


_SEEN_BY_ALL = contextlib.nullcontext()


def _call_with_copies(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise what the call would raise, and write nothing that it is given."""
    memo: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [copied(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        new = copy.deepcopy(value.detach(), memo)  # with its storage
        return new.requires_grad_(value.requires_grad and value.is_leaf)

    with computing_unseen((*args, *kwargs.values())):
        new = [tuple(copied(each)) if isinstance(each, tuple) else copied(each) for each in args]
        function(*new, **{name: copied(value) for name, value in kwargs.items()})


# ---- install("overlap") ----


def _all_apart(written: Any, operands: tuple[Any, ...], *, elementwise: bool = False) -> bool:
    """Whether none of these can share memory with a tensor: the quick answer, else False."""
    if type(written) not in PLAIN:
        return False
    for each in operands:
        kind = type(each)
        if kind in PLAIN:
            if not (elementwise and each is written) and not are_apart(written, each):
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


def guard_method(  # noqa: C901  in one frame: a traceback gains one line
    name: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Let a method of ``Tensor`` that writes compute as if its operands were copied first."""
    elementwise = is_elementwise(original)
    is_operator = name in DUNDERS and name != "__setitem__"
    # The replacement below, if there is one, shows the call.
    shown = shown_for(name) if original_of(original) is original else None
    plain, switch = PLAIN, SWITCH

    def method(*args: Any, **kwargs: Any) -> Any:  # noqa: C901, PLR0911  the quick answers first
        if has_torch_function(args) or kwargs:
            if has_torch_function((*args, *kwargs.values())):
                call = original
                if shown is not None:
                    call = show_overriding(shown, args, kwargs, is_operator=is_operator)
                if not switch.on:
                    return call(*args, **kwargs)
                return computed(original, args, kwargs, call, is_seen=True)
            if not switch.on:
                return original(*args, **kwargs)
        elif not switch.on:
            return original(*args)
        elif len(args) == 2:  # noqa: PLR2004
            one, other = args
            kind = type(other)
            if kind is float or kind is int or (elementwise and other is one):
                return original(one, other)
            if kind in plain and are_apart(one, other):
                return original(one, other)
        elif len(args) == 1 or _all_apart(args[0], args[1:]):
            return original(*args)
        return computed(original, args, kwargs)

    return method


def guard_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that writes to an argument, and may have ``out=``, do so."""
    lists, switch = original.__name__.startswith(LISTS), SWITCH

    def function(*args: Any, **kwargs: Any) -> Any:
        if not switch.on:
            return original(*args, **kwargs)
        # What torch's optimizers hand over, their states, they have made themselves.
        if lists and str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.optim."):
            return original(*args, **kwargs)
        seen = has_torch_function((*args, *kwargs.values()))
        return computed(original, args, kwargs, is_seen=seen)

    return function


def guard_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that writes to ``out=``, and to nothing else, do so."""
    elementwise = is_elementwise(original)
    switch = SWITCH

    def function(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return original(*args, **kwargs)
        if not switch.on:
            return original(*args, out=out, **kwargs)
        if has_torch_function((*args, out, *kwargs.values())):
            return computed(original, args, {**kwargs, "out": out}, is_seen=True)
        if not kwargs and _all_apart(out, args, elementwise=elementwise):
            return original(*args, out=out)
        return computed(original, args, {**kwargs, "out": out})

    return function


def _reads_others(name: str) -> bool:
    """Whether an operation that writes its first argument takes another tensor: relu_ does not."""
    schemas = operator_schemas(name)
    return not schemas or any(
        sum("Tensor" in str(argument.type) for argument in schema.arguments) > 1
        for schema in schemas
    )


@functools.cache
def replacements() -> patch.Replacements:
    """Return what ``install("overlap")`` replaces."""
    found: dict[str, patch.Make | property] = {}
    for name in dir(torch.Tensor):
        if name in DUNDERS or (name.endswith("_") and not name.endswith("__")):
            writes = writes_of(getattr(torch.Tensor, name))
            if writes is not None and writes.elements and _reads_others(name):
                found[f"torch.Tensor.{name}"] = functools.partial(guard_method, name)
    for module in NAMESPACES:
        for name, value in sorted(vars(module).items()):
            function = original_of(value)
            if isinstance(function, BuiltinFunctionType) and not name.startswith("__"):
                writes_it = writes_of(function) is not None and _reads_others(name)
                if writes_it or has_python_out(function):
                    found[f"{module.__name__}.{name}"] = guard_function if writes_it else guard_out
    return found
