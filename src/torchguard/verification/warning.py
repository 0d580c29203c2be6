"""A warning at the line that called compiled code, not at one of torch or torchguard."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

from torchguard.errors import MiscompilationWarning

__all__ = ["warn_of"]

_NOT_THE_CALLERS = tuple(
    str(folder) + "/" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent)
)
_DYNAMO = str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py")


def warn_of(text: str) -> None:
    """Warn where compiled code was called; each graph has a text of its own."""
    frame = _caller(sys._getframe(1))
    if frame is None:
        warnings.warn(text, MiscompilationWarning, stacklevel=2)
        return
    # No registry: one line may call two wrong graphs, and each has its own warning.
    warnings.warn_explicit(text, MiscompilationWarning, frame.f_code.co_filename, frame.f_lineno)


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called into Dynamo; the innermost ones are the compiled function's."""
    compiled = frame = _first_of_user(frame)
    while frame is not None and frame.f_code.co_filename != _DYNAMO:
        frame = frame.f_back
    return _first_of_user(frame) or compiled


def _first_of_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None and (frame.f_code.co_filename.startswith((*_NOT_THE_CALLERS, "<"))):
        frame = frame.f_back
    return frame
