"""What users see of torchguard: its version, and the mark of what they import from it."""

from __future__ import annotations

from typing import TypeVar

__version__ = "0.1.0"
"""The one place that says which version this is."""

_Object = TypeVar("_Object")


def public(named: _Object) -> _Object:
    """Let a function or a class say that it is ``torchguard``'s, wherever its code moves."""
    home = named.__module__
    named.__module__ = "torchguard"
    if isinstance(named, type):  # the docs build reads it of methods too
        for member in vars(named).values():
            function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if getattr(function, "__module__", None) == home:
                function.__module__ = "torchguard"
    return named
