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
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from torchguard import _torch

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.plan import Specialization

__all__ = [
    "COMPILING",
    "CompileCache",
    "Compilers",
    "RangesKey",
    "Variant",
    "alone",
    "compiler_for",
    "compiling",
]

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Label and padded shape of each input."""


class Compilers(NamedTuple):
    """What compiles a function; None in each place where nothing does."""

    static: Compiler | None = None
    """For static sizes."""
    ranges: Compiler | None = None
    """For sizes that are marked, each with its bounds."""
    dynamic: Compiler | None = None
    """For the sizes above the largest bucket."""


class RangesKey(NamedTuple):
    """What one graph with symbolic sizes is compiled for."""

    shapes: tuple[tuple[str, tuple[int | str, ...]], ...]
    """Label and shape of each input, with the name of an axis for a size that is a symbol."""
    around: tuple[Any, ...]
    """As in ``Specialization``."""
    bounds: tuple[tuple[str, int, int | None], ...]
    """(axis, smallest, largest) of each symbol, None where the ladder may grow."""


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
    compiled_for: set[Specialization] = field(default_factory=set)
    """What it has run for: for anything else it is compiled anew."""
    warmed_for: set[Specialization] = field(default_factory=set)
    """What its backward has run for too."""
    seconds: float = 0.0
    """Of the first call in each, and of warming up."""
    first_graphs: int = 0
    first_entries: int = 0

    @property
    def graphs(self) -> int:
        """How many graphs were compiled for it."""
        if self.code is None:
            return self.first_graphs
        # Dynamo's own count: guards that fail later compile anew without asking us.
        later = _torch.compiled_variants(self.code) - self.first_entries
        return self.first_graphs + max(later, 0)


class CompileCache:
    """One variant for each combination of padded shapes and of what Dynamo guards on.

    Args:
        function: what runs, not compiled.
        compilers: what compiles it.
    """

    def __init__(self, function: Callable[..., Any], compilers: Compilers) -> None:
        self.function = function
        self.static = compilers.static
        self.variants: dict[Any, Variant] = {}
        self.eager = Variant(function)
        self._ranges = compilers.ranges
        self._above: Callable[..., Any] = function
        self._compiles_above = compilers.dynamic is not None
        if compilers.dynamic is not None:
            above = compilers.dynamic(_separated(function, "beyond_buckets"))
            self._above = _torch.keep_settings(above)

    def variant_for(self, shapes: Shapes | None, specialization: Specialization) -> Variant:
        """Return what runs inputs of these padded shapes; None for sizes above the buckets."""
        key: Any = None
        if specialization.transformed:
            # torch.compile runs what is inside a transform of torch.func uncompiled.
            key = "transformed"
        elif shapes is not None:
            # Dynamo compiles anew for each of these anyway. With a function of its own a call
            # finds one entry in Dynamo's cache: in a list of several, threads walk past theirs.
            key = (shapes, specialization.around)
        return self.variant(key)

    def variant(self, key: Any) -> Variant:
        """Return what runs for a key of the cache; it is made where there is none yet."""
        found = self.variants.get(key)
        if found is None:
            found = self.variants[key] = self._new(key)
        return found

    def _new(self, key: Any) -> Variant:
        ranges = isinstance(key, RangesKey)
        compiler = self._ranges if ranges else self.static
        if compiler is None or key == "transformed":
            return Variant(self.function)
        if key is None:
            return Variant(self._above, compiles=self._compiles_above)
        # Dynamo keeps the sizes it has seen under this name, in a file too.
        sizes = "_".join("x".join(map(str, shape)) for _, shape in key[0])
        bounds = "".join(f"_{low}_to_{high}" for _, low, high in key.bounds) if ranges else ""
        copied = _separated(self.function, f"bucket_{sizes}{bounds}")
        compiled = _torch.compiles_inside(compiler(copied), alone)
        return Variant(
            compiled,
            copied.__code__,
            compiles=True,
            cuda_graphs=_torch.records_cuda_graphs(compiled),
        )

    def keys_compiled(self) -> list[Any]:
        """Return (shapes, around) of each variant that was compiled."""
        return [key for key, each in self.variants.items() if each.compiled_for and key]


@contextlib.contextmanager
def compiling(variant: Variant, specialization: Specialization) -> Iterator[None]:
    """Note the seconds and graphs that the first call of a variant takes."""
    with alone():
        graphs, begun = _torch.graphs_compiled(), time.perf_counter()
        yield
        variant.seconds += time.perf_counter() - begun
        variant.first_graphs += max(_torch.graphs_compiled() - graphs, 0)
        if variant.code is not None:
            variant.first_entries = _torch.compiled_variants(variant.code)
        variant.compiled_for.add(specialization)


def compiler_for(given: Any, options: bool | Mapping[str, Any] | None) -> tuple[Any, Compilers]:
    """Split what the user wraps into what runs, not compiled, and what compiles it.

    Raises:
        ValueError: compiled twice, or with ``dynamic=True``.
        TypeError: ``compile`` is no dict and no bool.
    """
    found = _torch.compiler_of(given)
    if found is None:
        if not options:
            return given, Compilers()
        return given, _compilers(options)
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
    return original, Compilers(settings, settings, settings)


def _compilers(options: bool | Mapping[str, Any]) -> Compilers:
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

    def compiler(*, dynamic: bool | None) -> Compiler:
        def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
            compiled: Callable[..., Any] = torch.compile(function, dynamic=dynamic, **arguments)
            return compiled

        return compile_

    # Marks make sizes symbols with any dynamic=. None does so behind a graph break too, where
    # nothing is marked: with False each size would be compiled there.
    return Compilers(compiler(dynamic=False), compiler(dynamic=None), compiler(dynamic=True))


def _separated(function: Callable[..., Any], suffix: str) -> FunctionType:
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
    # FunctionType takes all but these.
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
