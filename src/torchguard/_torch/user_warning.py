"""Warn at a line of the user's, not at one of torch or torchguard."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

__all__ = ["warn_at_compiled_call", "warn_user"]

_NOT_THE_USERS = tuple(
    str(folder) + "/" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent)
)
# The frames of every call into compiled code have one of this file among them. Where torch renames
# it, the warning is at the innermost line of the user's, which is in the compiled function.
_DYNAMO = str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py")


def warn_user(text: str) -> None:
    """Warn at the innermost line that is neither of torch nor of torchguard."""
    frame, level = sys._getframe(1), 2
    while _is_not_the_users(frame) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def warn_at_compiled_call(text: str, category: type[Warning]) -> None:
    """Warn at the line that has called into compiled code; the inner lines are the code's own."""
    frame: FrameType | None = sys._getframe(1)
    innermost = frame = _first_of_user(frame)
    while frame is not None and frame.f_code.co_filename != _DYNAMO:
        frame = frame.f_back
    frame = _first_of_user(frame) or innermost
    if frame is None:
        warnings.warn(text, category, stacklevel=2)
        return
    # No registry: one line may call two wrong graphs, and each has its own warning.
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno)


def _first_of_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _is_not_the_users(frame):
        frame = frame.f_back
    return frame


def _is_not_the_users(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_NOT_THE_USERS, "<"))
