"""What a guarded() scope does about torch.compile: it covers eager code, and repairs tracing.

Pop the scope while a compiled function runs, and push it back afterwards: neither what the
compiler does on its way (running the graph on fake tensors, lowering it) nor what it has made is
to be guarded. On torch 2.6 to 2.15 every compiled function hands its callback to the interpreter
through ``torch._dynamo.eval_frame._maybe_set_eval_frame``, once on the way in and, from the same
Python frame, once on the way out
(https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/eval_frame.py).

While at least one scope is open, code that is compiled has the guards "setitem" and
"slice_scatter" that ``install()`` gives; what was compiled before stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchguard._torch import DYNAMO, EVAL_FRAME_HOOK, patch
from torchguard._torch.overlays import overlays_by_owner
from torchguard.assignment import dynamo_scatter, dynamo_setitem
from torchguard.rollback.scope_stack import Scope, current, hold


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frame: FrameType | None = None
        """Where the compiled code began in which this thread is."""

        self.scope: Scope | None = None
        """The innermost scope there."""


_thread = _Thread()


def overlays() -> tuple[patch.Overlay, ...]:
    """Return what stands over Dynamo while a scope is open; nothing until Dynamo is imported."""
    dynamo = sys.modules.get(DYNAMO)
    return _overlays() if hasattr(dynamo, "optimize") else ()  # else it is being imported


@functools.cache
def _overlays() -> tuple[patch.Overlay, ...]:
    # "setitem" finds out in every single case whether it is needed, so nothing is tried first.
    replacements: dict[str, patch.Make | patch.Computed] = dict(dynamo_setitem.replacements())
    if dynamo_scatter.not_needed() is None:
        replacements.update(dynamo_scatter.replacements())
    found: list[patch.Overlay] = []
    for each in ({EVAL_FRAME_HOOK: _hook}, replacements):
        with contextlib.suppress(AttributeError):  # a Dynamo that is built differently
            found += overlays_by_owner(each)
    return tuple(found)


def _hook(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def _maybe_set_eval_frame(callback: Any) -> Any:
        thread = _thread
        if thread.frame is None and current() is None:
            return original(callback)
        caller = sys._getframe(1)
        if thread.frame is caller:  # the way out
            prior = original(callback)
            thread.frame = None
            if current() is None:
                hold(thread.scope)
            thread.scope = None
            return prior
        # False runs what is compiled already. __enter__ is the old with-statement
        # form: its way out has another frame.
        begins = callable(callback) or callback is False
        if begins and thread.frame is None and caller.f_code.co_name != "__enter__":
            thread.frame = caller
            thread.scope = hold(None)
        return original(callback)

    return _maybe_set_eval_frame
