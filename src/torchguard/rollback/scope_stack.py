"""Which guarded() scopes are open where this runs: in this thread, task or context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


class Scope:
    """One ``with guarded():`` that has been entered, and the scope around it.

    A context that is copied (a task that is started inside) takes the scope along; it ends
    everywhere when it is left.
    """

    __slots__ = ("around", "data", "open", "owner", "plain")

    def __init__(self, *, data: bool, owner: object, around: Scope | None) -> None:
        self.data = data
        self.owner = owner
        self.around = around
        self.open = True
        self.plain: bool = not data and (around is None or around.plain)
        """Open, and no scope around it asks for copies: the common case, in one attribute."""

    def copies(self) -> bool | None:
        """Whether elements are copied first; None if this scope and all around it are closed."""
        found: bool | None = None
        scope: Scope | None = self
        while scope is not None:
            if scope.open:
                if scope.data:
                    return True
                found = False
            scope = scope.around
        return found


_innermost: ContextVar[Scope | None] = ContextVar("torchguard.rollback", default=None)

current = _innermost.get
"""The innermost scope, which may be closed already, or None; costs 20 ns."""


def enter(*, data: bool, owner: object) -> Scope:
    """Open a scope in this context."""
    scope = Scope(data=data, owner=owner, around=_open())
    _innermost.set(scope)
    return scope


def leave(scope: Scope) -> None:
    """Close a scope, in whatever order scopes are left: those of generators overlap."""
    scope.open = scope.plain = False
    inner = _innermost.get()
    while inner is not None:
        if inner.around is scope:
            inner.around = scope.around
        inner.plain = inner.open and inner.copies() is False
        inner = inner.around
    _innermost.set(_open())


def innermost_of(owner: object) -> Scope | None:
    """Return the innermost open scope of this owner in this context."""
    scope = _innermost.get()
    while scope is not None and not (scope.open and scope.owner is owner):
        scope = scope.around
    return scope


def _open() -> Scope | None:
    scope = _innermost.get()
    while scope is not None and not scope.open:
        scope = scope.around
    return scope


def hold(scope: Scope | None) -> Scope | None:
    """Let this scope be the innermost one, None for no scope at all; returns the one before."""
    before = _innermost.get()
    _innermost.set(scope)
    return before


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Run something as if no scope were open."""
    before = hold(None)
    try:
        yield
    finally:
        hold(before)
