"""A warning at the user's line, not at one of torch or torchguard."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

__all__ = ["warn_user"]

_NOT_THE_USERS = tuple(
    str(folder) + "/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)


def warn_user(text: str) -> None:
    """Warn at the innermost line that is neither of torch nor of torchguard."""
    frame, level = sys._getframe(1), 2
    while frame.f_code.co_filename.startswith((*_NOT_THE_USERS, "<")) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
