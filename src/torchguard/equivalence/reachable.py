"""Which modules and tensors a function can reach: through arguments, closure, globals, ``self``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from torchguard._pytree import children

__all__ = ["all_reachable_modules", "reachable_modules", "reachable_tensors"]


def reachable_modules(function: Any, arguments: Iterable[Any]) -> list[torch.nn.Module]:
    """Return the modules a function can reach, without what is inside them.

    Arguments, what it is bound to, its closure and the globals it names, and what is right
    inside these: a model in a list, or an attribute of the object a method belongs to.
    """
    found = {
        id(each): each
        for each in _candidates(function, arguments)
        if isinstance(each, torch.nn.Module)
    }
    return list(found.values())


def reachable_tensors(function: Any, arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors a function can reach, as :func:`reachable_modules` the modules."""
    return [each for each in _candidates(function, arguments) if isinstance(each, torch.Tensor)]


def _candidates(function: Any, arguments: Iterable[Any]) -> list[Any]:
    candidates = [*_around(function), *arguments]
    for candidate in list(candidates):
        inside = children(candidate)
        if inside is not None:
            candidates += [part for _, part in inside]
        elif not isinstance(candidate, (type, torch.Tensor, torch.nn.Module, ModuleType)):
            candidates += vars(candidate).values() if hasattr(candidate, "__dict__") else ()
    return candidates


def _around(function: Any) -> list[Any]:
    """Return a function and what it holds."""
    if isinstance(function, functools.partial):
        return [*_around(function.func), *function.args, *function.keywords.values()]
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    found = [function, owner]
    code = getattr(function, "__code__", None)
    if code is not None:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                found.append(cell.cell_contents)
        found += [function.__globals__.get(name) for name in code.co_names]
    return found


def all_reachable_modules(function: Any, arguments: Iterable[Any]) -> list[torch.nn.Module]:
    """Return every module a function can reach, those inside others too."""
    found = {id(m): m for top in reachable_modules(function, arguments) for m in top.modules()}
    return list(found.values())
