"""A mode of ours leaves the stack while compiled code runs, and comes back after.

Dynamo guards on the modes on the stack and traces through them: a function
compiled outside ``guarded()`` would be compiled again inside. So the mode steps
aside where a compiled function begins. Every compiled function, on torch 2.6 to
2.15, hands its callback to the interpreter through
``torch._dynamo.eval_frame._maybe_set_eval_frame``, once on the way in and, from
the same Python frame, once on the way out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import wrapt
from torch.overrides import TorchFunctionMode

from torchguard import patching
from torchguard.internals import replace_torch_function_modes, torch_function_modes

__all__ = ["add", "begin", "end", "is_aside", "remove"]

_DYNAMO = "torch._dynamo.eval_frame"
_HOOK = f"{_DYNAMO}._maybe_set_eval_frame"


class _Thread(threading.local):
    def __init__(self) -> None:
        self.modes: list[TorchFunctionMode] = []
        self.frame: FrameType | None = None
        self.stack: list[TorchFunctionMode] = []


_thread = _Thread()
_users = 0
_hooked = False
_waiting_for_dynamo = False


def begin() -> bool:
    """Count one more scope; False if this torch has no such hook."""
    global _users, _waiting_for_dynamo
    with patching.lock:
        _users += 1
        if _is_imported(_DYNAMO):
            return _put_hook()
        if not _waiting_for_dynamo:
            _waiting_for_dynamo = True
            wrapt.register_post_import_hook(_dynamo_was_imported, _DYNAMO)
        return True


def end() -> None:
    """Count one scope less; the last one takes the hook away."""
    global _users, _hooked
    with patching.lock:
        _users -= 1
        if _users == 0 and _hooked:
            # Where somebody has patched on top the hook stays; without a scope it does nothing.
            patching.undo([_HOOK], leave_conflicts=True)
            _hooked = False


def add(mode: TorchFunctionMode) -> None:
    """Make a mode on this thread's stack step aside."""
    _thread.modes.append(mode)


def remove(mode: TorchFunctionMode) -> None:
    """Let go of a mode."""
    _thread.modes.remove(mode)


def is_aside() -> bool:
    """Whether this thread runs compiled code, and its modes are off the stack."""
    return _thread.frame is not None


def _is_imported(name: str) -> bool:
    """Whether a module is there as a whole; one that is being imported is among the modules too."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _dynamo_was_imported(_: Any) -> None:
    with patching.lock:
        if _users:
            _put_hook()


def _put_hook() -> bool:
    global _hooked
    if not _hooked and hasattr(sys.modules[_DYNAMO], "_maybe_set_eval_frame"):
        patching.apply([(_HOOK, _hook)])
        _hooked = True
    return _hooked


def _hook(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def _maybe_set_eval_frame(callback: Any) -> Any:
        thread = _thread
        if not thread.modes:
            return original(callback)
        caller = sys._getframe(1)
        if thread.frame is caller:  # the way out
            prior = original(callback)
            thread.frame = None
            _put_back(thread)
            return prior
        # False runs what is compiled already. __enter__ is the old with-statement
        # form: its way out has another frame.
        begins = callable(callback) or callback is False
        if begins and thread.frame is None and caller.f_code.co_name != "__enter__":
            thread.frame = caller
            thread.stack = torch_function_modes()
            replace_torch_function_modes(_without_ours(thread))
        return original(callback)

    return _maybe_set_eval_frame


def _without_ours(thread: _Thread) -> list[TorchFunctionMode]:
    return [mode for mode in thread.stack if mode not in thread.modes]


def _put_back(thread: _Thread) -> None:
    stack, now = thread.stack, torch_function_modes()
    if now != _without_ours(thread):  # compiled code has set a default device, for one
        stack = now + [mode for mode in thread.stack if mode in thread.modes]
    thread.stack = []
    replace_torch_function_modes(stack)
