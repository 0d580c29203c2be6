"""Operators with ``out=``: a call that fails leaves ``out`` as it was.

An ``out=`` operator resizes its output first and computes afterwards, so on
storage that can't grow, and whenever the computation itself fails, ``out`` keeps
a shape that is not its own (https://github.com/pytorch/pytorch/issues/170298).
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from torchguard.attempt import Attempt, undo_out
from torchguard.internals import skip_frame
from torchguard.metadata import capture
from torchguard.rollback import Saved
from torchguard.shared_memory import is_shared
from torchguard.writes import OutPlace, place_of_out

__all__ = ["guard_out"]


def guard_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``original``, an operator with ``out=``, exception-safe where it has an ``out``.

    Equals ``original(*args, out=out, **kwargs)`` on success. On failure ``out``
    has its shape, stride, storage offset and storage back; if its elements may
    have been overwritten, its version counter moves on. Without ``out`` the call
    goes straight through.
    """
    guarded = _guard_by_name(original)
    if isinstance(original, FunctionType):
        place = place_of_out(original)
        if place is not None:
            guarded = _guard_by_place(original, place)
    skip_frame(guarded)
    return guarded


def _guard_by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    tensor_type = torch.Tensor

    def guarded(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return original(*args, **kwargs)
        if type(out) is tensor_type:  # the common case, without the general machinery
            metadata = capture(out)
            if metadata is not None and not is_shared(metadata.storage):
                try:
                    return original(*args, out=out, **kwargs)
                except BaseException as error:
                    undo_out(Saved(out, metadata, None), error)
                    raise
        attempt = Attempt(None, args, kwargs, out, data=False)
        try:
            result = original(*args, out=attempt.out, **kwargs)
        except BaseException as error:
            attempt.undo(error)
            raise
        return attempt.finish(result)

    return guarded


def _guard_by_place(original: FunctionType, place: OutPlace) -> Callable[..., Any]:
    by_name = _guard_by_name(original)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = place.by_name(args, kwargs)
        return by_name(*args, **kwargs)

    # TorchScript compiles an overloaded function (torch.norm) from the source of
    # __wrapped__, but looks its names up in the globals of what it was given.
    guarded = FunctionType(guarded.__code__, original.__globals__, closure=guarded.__closure__)
    guarded.__wrapped__ = original  # type: ignore[attr-defined]
    return guarded
