"""A scope covers eager code: where compiled code begins, it steps aside, and comes back after.

What the compiler does on its way (running the graph on fake tensors, lowering it) and what it has
made are not to be guarded. Every compiled function, on torch 2.6 to 2.15, hands its callback to the
interpreter through ``torch._dynamo.eval_frame._maybe_set_eval_frame``, once on the way in and, from
the same Python frame, once on the way out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import wrapt

from torchguard._torch import patch
from torchguard.rollback.scopes import Scope, current, hold

__all__ = ["begin", "end"]

_DYNAMO = "torch._dynamo.eval_frame"
_HOOK = f"{_DYNAMO}._maybe_set_eval_frame"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frame: FrameType | None = None
        """Where the compiled code began in which this thread is."""

        self.scope: Scope | None = None
        """The innermost scope there."""


_thread = _Thread()
_users = 0
_hooked = False
_waiting_for_dynamo = False


def begin() -> None:
    """Put a hook into Dynamo, now or when it is imported."""
    global _users, _waiting_for_dynamo
    with patch.lock:
        _users += 1
        if _is_imported(_DYNAMO):
            _put_hook()
        elif not _waiting_for_dynamo:
            _waiting_for_dynamo = True
            wrapt.register_post_import_hook(_dynamo_was_imported, _DYNAMO)


def end() -> None:
    """Take the hook away."""
    global _users, _hooked
    with patch.lock:
        _users -= 1
        if _users == 0 and _hooked:
            # Where somebody has patched on top the hook stays; without a scope it does nothing.
            patch.undo([_HOOK], leave_conflicts=True)
            _hooked = False


def _is_imported(name: str) -> bool:
    """Whether a module is there as a whole; one that is being imported is among the modules too."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _dynamo_was_imported(_: Any) -> None:
    with patch.lock:
        if _users:
            _put_hook()


def _put_hook() -> None:
    global _hooked
    if not _hooked and hasattr(sys.modules[_DYNAMO], "_maybe_set_eval_frame"):
        patch.apply([(_HOOK, _hook)])
        _hooked = True


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
