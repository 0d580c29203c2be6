"""What :func:`verified` gives back, for type checkers: a module as it is, a function with stats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

import torch
from typing_extensions import ParamSpec, Self

from torchguard.verification.report import VerificationReport

__all__ = ["Checked", "Decorator"]

_Arguments = ParamSpec("_Arguments")
_Module = TypeVar("_Module", bound=torch.nn.Module)
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)


class Checked(Protocol[_Arguments, _Result_co]):
    """A function or a method as it was, and what was found when it was checked."""

    __name__: str

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result_co:
        """Call it."""
        ...

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., _Result_co]: ...

    def stats(self) -> VerificationReport:
        """Return what was checked so far."""
        ...


class Decorator(Protocol):
    """What ``verified(...)`` is before it gets something to check."""

    # A module is a callable too, and the first of the two that fits is meant.
    @overload
    def __call__(self, function: _Module, /) -> _Module: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, function: Callable[_Arguments, _Result], /
    ) -> Checked[_Arguments, _Result]: ...
    def __call__(self, function: Any, /) -> Any:
        """Compile and check it."""
        ...
