"""What :func:`bucketed` gives back, for type checkers: a module as it is, a function with stats."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

import torch
from typing_extensions import ParamSpec, Self

from torchguard.bucketing.decorator.stats import Report, Statistics

__all__ = ["Decorator", "MaskingDecorator", "Wrapped"]

_Arguments = ParamSpec("_Arguments")
_Module = TypeVar("_Module", bound=torch.nn.Module)
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)


class Wrapped(Protocol[_Arguments, _Result_co]):
    """A function or a method as it was, run in buckets."""

    __name__: str

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result_co:
        """Pad, run, cut."""
        ...

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Wrapped[..., _Result_co]: ...

    def stats(self) -> Statistics:
        """Return what has run so far: calls, buckets, waste, compile time, graphs."""
        ...

    def report(self, path: str | os.PathLike[str] | None = None) -> Report:
        """Return what other buckets would change; with ``path``, draw it (extra ``plot``)."""
        ...

    def warmup(self, *example: Any, progress: bool | None = None, **keywords: Any) -> None:
        """Compile every bucket, with the example cut or padded to its size."""
        ...

    def verify(self, *inputs: Any, **keywords: Any) -> None:
        """Raise unless padding leaves answer and gradients of these inputs as they are."""
        ...

    def save_plan(self, path: str | os.PathLike[str]) -> None:
        """Write the buckets, and the sizes seen, to a file for ``plan=``."""
        ...


class Decorator(Protocol):
    """What ``bucketed(...)`` is before it gets something to wrap."""

    # A module is a callable too, and the first of the two that fits is meant.
    @overload
    def __call__(self, function: _Module, /) -> _Module: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, function: Callable[_Arguments, _Result], /
    ) -> Wrapped[_Arguments, _Result]: ...
    def __call__(self, function: Any, /) -> Any:
        """Wrap it."""
        ...


class MaskingDecorator(Protocol):
    """Likewise, with ``mask=`` or ``lengths=``: the caller may leave these arguments out."""

    @overload
    def __call__(self, function: _Module, /) -> _Module: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[..., _Result], /) -> Wrapped[..., _Result]: ...
    def __call__(self, function: Any, /) -> Any:
        """Wrap it."""
        ...
