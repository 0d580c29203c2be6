"""What users see of torchguard: its version, its texts, and the mark of what they import."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

__version__ = "0.1.0.dev0"
"""The one place that says which version this is."""

DOCUMENTATION = "https://torchguard.github.io/torchguard/"

_Object = TypeVar("_Object")


def address(entry: str) -> str:
    """Return where a message is explained: a heading of ``docs/reference/messages.md``."""
    return f"{DOCUMENTATION}reference/messages.html#{entry}"


def message(entry: str, text: str) -> str:
    """Return the text of a warning or of a line of the log, with the address of its entry."""
    end = "\n" if "\n" in text else ". "
    return f"torchguard: {text}{end}See {address(entry)}"


def html_table(rows: Sequence[Sequence[str]], below: str = "") -> str:
    """Return a table for a notebook, with its head as the first row, and a text below."""
    lines = [
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th"] + ["td"] * len(rows), rows, strict=False)
    ]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{table}</table>{html.escape(below)}"


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


def called(example: str) -> Callable[[_Object], _Object]:
    """Let a function say that it is called, to whom writes ``with torchguard.install:``."""

    def of(function: _Object) -> _Object:
        return cast("_Object", _Called(function, example))

    return of


class _Called:
    """A function, as itself but for ``with``, which asks for methods that functions lack."""

    def __init__(self, function: Any, example: str) -> None:
        functools.update_wrapper(self, function)
        self._function, self._example = function, example

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)

    def __enter__(self) -> NoReturn:
        name = self._function.__name__
        raise TypeError(f"{name}: expected a call, `with torchguard.{name}({self._example}):`")

    def __exit__(self, *_: object) -> None: ...

    def __reduce__(self) -> str:
        return str(self._function.__qualname__)
