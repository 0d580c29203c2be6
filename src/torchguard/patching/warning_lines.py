"""PyTorch's own warnings are shown at the line that called a replaced function.

C++ code warns at the innermost frame of Python code, and that is a replacement's. Python would
show the warning there, and only once for all lines of the program.

Python asks each filter of warnings for text, module and category. An entry in that list warns
again at the caller's line, with the caller's registry, and the filters after it decide there. A
call that does not warn costs nothing.
"""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Any

_PACKAGE = __name__.partition(".")[0] + "."


class _Asked(threading.local):
    text = ""
    is_ours = False


_asked = _Asked()


class Text:
    """Stands for the pattern of a text; keeps the text."""

    def match(self, text: str) -> bool:
        """Match every text."""
        _asked.text = text
        return True


class Module:
    """Stands for the pattern of a module."""

    def match(self, module: str) -> bool:
        """Match the modules of torchguard."""
        _asked.is_ours = module.startswith(_PACKAGE)
        return _asked.is_ours


class _Categories(type):
    def __subclasscheck__(cls, category: type) -> bool:
        # Python asks for the category last, whatever the answers before were.
        is_ours, _asked.is_ours = _asked.is_ours, False
        return is_ours and _warn_at_caller(_asked.text, category)


class Category(Warning, metaclass=_Categories):
    """Stands for a category: a warning belongs to it if it has been shown at another line."""


ENTRY: Any = ("ignore", Text(), Category, Module(), 0)
"""The item of ``warnings.filters``."""


def show_warnings_at_callers() -> None:
    """Put the entry in front of all filters that there are now."""
    show_warnings_where_raised()
    warnings.filters.insert(0, ENTRY)  # type: ignore[attr-defined]


def show_warnings_where_raised() -> None:
    """Remove the entry."""
    if ENTRY in warnings.filters:
        warnings.filters.remove(ENTRY)  # type: ignore[attr-defined]


def _warn_at_caller(text: str, category: Any) -> bool:
    """Warn at the innermost frame that is not of torchguard; say whether there is one."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module, code = frame.f_globals.get("__name__"), frame.f_code
    warnings.warn_explicit(text, category, code.co_filename, frame.f_lineno, module, registry)
    return True
