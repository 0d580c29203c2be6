"""What ``torch.utils.checkpoint`` calls, and what it keeps to itself of a block."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator
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


def run_checkpointed(
    block: torch.fx.GraphModule, function: Callable[..., Any], args: Any, options: dict[str, Any]
) -> Any:
    """Run the block of such a node as eager does: ``function`` is what runs its graph.

    Run by itself, the operator draws other random numbers in its second run: it leaves the state of
    the generators to the partitioner.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_higher_order_ops/wrap.py
    """
    context = block.meta.get("_checkpoint_context_fn")  # of selective checkpointing
    given = options if context is None else {**options, "context_fn": context}
    return torch.utils.checkpoint.checkpoint(function, *args, **{**given, "use_reentrant": False})


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


def run_to_the_end(generator: Generator[Any, Any, Any]) -> bool:
    """Switch the early stop off for the block whose generator is suspended in its first run.

    Returns whether torch has the notes there that say when to stop.
    """
    # A local variable; by its kind, since only its attribute is named elsewhere in torch too.
    frame: Any = getattr(generator, "gi_frame", None)
    held = () if frame is None else frame.f_locals.values()
    notes: Any = next((each for each in held if hasattr(each, "early_stop")), None)
    if notes is not None:
        notes.early_stop = False
    return notes is not None


def generator_of_caller(depth: int) -> Generator[Any, Any, Any] | None:
    """Return the generator of the ``checkpoint`` call ``depth`` frames above the caller."""
    held = sys._getframe(depth + 1).f_locals.values()
    return next((each for each in held if isinstance(each, Generator)), None)
