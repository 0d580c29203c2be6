"""What ``torch.utils.checkpoint`` calls, and what it keeps to itself of a block."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch.utils.checkpoint

_MODULE = "torch.utils.checkpoint"
_has_impl = hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator_impl")

# `checkpoint` looks both up in its module when it is called, so that code which took `checkpoint`
# before is reached too. Since torch 2.15 the first hands its arguments on to a second generator.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py#L514
GENERATOR = f"{_MODULE}._checkpoint_without_reentrant_generator" + "_impl" * _has_impl
REENTRANT = f"{_MODULE}.CheckpointFunction.forward"

_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
IMPORTED_BY = {_COMPOSABLE: GENERATOR.replace(_MODULE, _COMPOSABLE)}
"""By module that takes the generator into its own names, the path there."""


def given_to(given: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], bool]:
    """Return what the generator's block is called with, and whether RNG states are kept."""
    if _has_impl:  # since torch 2.15 (fn, args, kwargs, *, preserve_rng_state, ...)
        args, kwargs = given
        return [*args, kwargs], options.get("preserve_rng_state", True)
    # Before it (fn, preserve_rng_state, ..., *args, **kwargs).
    return [*given, options], bool(given[0] if given else True)


def called_by(function: Any) -> Any:
    """Return the module whose call or ``forward`` this is, else the function."""
    while isinstance(function, functools.partial):
        function = function.func
    names = ("__call__", "_wrapped_call_impl", "_call_impl", "forward")
    if isinstance(function, MethodType) and function.__name__ in names:
        return function.__self__
    return function
