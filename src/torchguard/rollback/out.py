"""Operators with ``out=``: a call that fails leaves ``out`` as it was.

An ``out=`` operator resizes its output first and computes afterwards, so on
storage that can't grow, and whenever the computation itself fails, ``out`` keeps
a shape that is not its own (https://github.com/pytorch/pytorch/issues/170298).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchguard.rollback.block import Saved
from torchguard.rollback.metadata import capture
from torchguard.rollback.mutation import writes_statistics
from torchguard.rollback.operation import Attempt, undo_out
from torchguard.rollback.shared_memory import lacks_allocator

__all__ = ["guard_out"]


def guard_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``original``, a builtin with ``out=``, exception-safe where it has an ``out``.

    Equals ``original(*args, out=out, **kwargs)`` on success. On failure ``out``
    has its shape, stride, storage offset and storage back; if its elements may
    have been overwritten, its version counter moves on, and so does that of running
    statistics that the call writes beside it. Without ``out`` the call goes straight
    through.
    """
    tensor_type = torch.Tensor
    # What somebody has put around a builtin (a mock, a partial) may have no name.
    statistics = writes_statistics(getattr(original, "__name__", ""))

    def guarded(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        if out is None:
            return original(*args, **kwargs)
        if type(out) is tensor_type:  # the common case, without the general machinery
            metadata = capture(out)
            if metadata is not None and not lacks_allocator(metadata.storage):
                try:
                    try:
                        return original(*args, out=out, **kwargs)
                    except BaseException as error:
                        undo_out(Saved(out, metadata, None), error)
                        raise
                except (
                    BaseException
                ) as error:  # an interrupt in the clause above: see interrupts.py
                    undo_out(Saved(out, metadata, None), error)
                    raise
        attempt = Attempt(statistics, args, {**kwargs, "out": out}, data=False)
        try:
            try:
                return attempt.finish(original(*attempt.args, **attempt.kwargs))
            except BaseException as error:
                attempt.undo(error)
                raise
        except BaseException as error:  # an interrupt in the clause above: see interrupts.py
            attempt.undo(error)
            attempt.explain(error)
            raise

    return guarded
