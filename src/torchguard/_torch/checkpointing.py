"""What ``torch.utils.checkpoint`` calls, and what it keeps to itself of a block."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

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
    """Return what the generator's block is called with, and whether random states are kept.

    The generator is called with ``(fn, args, kwargs, *, preserve_rng_state, ...)`` since torch
    2.15 and with ``(fn, preserve_rng_state, ..., *args, **kwargs)`` before.
    """
    if _has_impl:
        args, kwargs = given
        return [*args, *kwargs.values()], options.get("preserve_rng_state", True)
    return [*given, *options.values()], bool(given[0] if given else True)


def run_to_the_end(generator: Generator[Any, Any, Any] | None) -> None:
    """Switch the early stop off for the block whose generator is suspended in its first run.

    Falls back to leaving it on, where torch keeps its notes of a block under another name.
    """
    frame = getattr(generator, "gi_frame", None)
    notes: Any = None if frame is None else frame.f_locals.get("new_frame")
    if hasattr(notes, "early_stop"):
        notes.early_stop = False


def generator_of_caller(depth: int) -> Generator[Any, Any, Any] | None:
    """Return the generator of ``checkpoint``, which has called the function that asks."""
    found = sys._getframe(depth + 1).f_locals.get("gen")
    return found if isinstance(found, Generator) else None


class RefuseToUse(TorchDispatchMode):
    """A scope that calls ``refuse(tensor)`` before an operator takes one of these tensors."""

    supports_higher_order_operators = True

    def __init__(self, tensors: dict[int, Any], refuse: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors, self._refuse = tensors, refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in (*args, *kwargs.values()):
            for value in each if isinstance(each, (list, tuple)) else (each,):
                if id(value) in self._tensors:
                    self._refuse(value)
        return func(*args, **kwargs)
