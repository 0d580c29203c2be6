"""One compiled callable per combination of static sizes.

Dynamo keeps what it knows about a function with its code object: the compiled variants, of
which it makes 8 and then runs eager, and the sizes seen, which it makes symbolic when they
change. So every bucket has a code object of its own, with a name of its own (the sizes seen
are kept by file, line and name).
https://github.com/pytorch/pytorch/issues/128071
https://github.com/pytorch/pytorch/issues/190631
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch

from torchguard import _torch

__all__ = ["COMPILING", "Compiler", "Source", "Variant", "alone", "compiler_for", "separated"]

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

COMPILING = threading.RLock()
"""Held while something compiles for the first time or is checked: both change settings of
the whole process for a moment."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Compile as often as it takes, while no other thread compiles a bucket.

    A call waits here while another thread compiles. The recompile limit is thread-local from
    torch 2.13 on and the whole process's before, so it has to be lifted by each thread, and by
    one at a time.
    """
    with COMPILING, _torch.without_recompile_limit():
        yield


@dataclass
class Variant:
    """What runs for one combination of static sizes."""

    run: Callable[..., Any]
    code: CodeType | None = None
    compiles: bool = False
    """Whether there is a compiler at all."""
    cuda_graphs: bool = False
    compiled_for: set[Any] = field(default_factory=set)
    """Circumstances in which it has run: in others it is compiled anew."""
    warmed_for: set[Any] = field(default_factory=set)
    """Those in which its backward has run too."""
    seconds: float = 0.0
    """Of the first call in each, and of warming up."""
    first_graphs: int = 0
    first_entries: int = 0

    @property
    def graphs(self) -> int:
        """How many graphs were compiled for it."""
        if self.code is None:
            return self.first_graphs
        later = _torch.compiled_variants(self.code) - self.first_entries
        return self.first_graphs + max(later, 0)


@dataclass(frozen=True)
class Source:
    """What to run, and how to compile it."""

    function: Callable[..., Any]
    """Not compiled."""
    static: Compiler | None
    dynamic: Callable[..., Any]
    """For sizes without a bucket."""


def compiler_for(given: Any, options: bool | Mapping[str, Any] | None) -> tuple[Any, Any, Any]:
    """Split what the user wraps into what runs and what compiles it.

    Returns:
        The function or module itself, not compiled; its compiler for static sizes, or None;
        and a compiler for dynamic sizes, or None.

    Raises:
        ValueError: compiled twice, or with ``dynamic=True``.
        TypeError: ``compile`` is no dict and no bool.
    """
    found = _torch.compiler_of(given)
    if found is None:
        if not options:
            return given, None, None
        return given, *_compilers(options)
    original, settings = found
    if options:
        raise ValueError(
            "bucketed: compile= is given, but the function is compiled already: wrap the function "
            "itself"
        )
    if _torch.compiles_dynamic(settings):
        raise ValueError(
            "bucketed: the function is compiled with dynamic=True, which makes static sizes "
            "symbolic: compile it without, or pass the function itself and compile={...}"
        )
    # Without dynamic=False a second size above the buckets makes it symbolic.
    return original, settings, settings


def _compilers(options: bool | Mapping[str, Any]) -> tuple[Compiler, Compiler]:
    if options is not True and not isinstance(options, Mapping):
        raise TypeError(
            f"bucketed: compile is {options!r}, expected True or a dict of torch.compile's "
            "arguments"
        )
    arguments = {} if options is True else dict(options)
    if arguments.get("dynamic"):
        raise ValueError(
            "bucketed: compile={'dynamic': True} makes static sizes symbolic: leave it out"
        )
    arguments.pop("dynamic", None)

    def static(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False, **arguments)
        return compiled

    def dynamic(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function, dynamic=True, **arguments)
        return compiled

    return static, dynamic


def separated(function: Callable[..., Any], suffix: str) -> FunctionType:
    """Return a copy of ``function`` with a code object and a name of its own.

    What Dynamo does not trace, such as ``nn.Sequential.forward``, is called by a function that
    it does: the frame that ``torch.compile`` would put around it is shared by all buckets, and
    so would be the recompile limit.
    """
    if not isinstance(function, FunctionType) or not _torch.traced(function):
        function = _trampoline(function)
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{suffix}")
    copied = FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__module__ = function.__module__
    return copied


def _trampoline(function: Callable[..., Any]) -> FunctionType:
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        owner, method = function.__self__, function.__func__

        def call(*args: Any, **kwargs: Any) -> Any:
            return method(owner, *args, **kwargs)

    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]
