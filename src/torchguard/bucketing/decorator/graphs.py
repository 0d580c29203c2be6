"""What runs a bucket: a compiled copy of the function, with a code object of its own.

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
from typing import Any, TypeAlias

import torch

from torchguard import _torch
from torchguard.bucketing.decorator.shape import Shape, Specialization

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

COMPILE_LOCK = threading.RLock()
"""Held while a graph is compiled for the first time, and during a check: both change settings of
the whole process for a moment."""

RECOMPILE_LIMIT = 8
"""As often as torch compiles a function anew before it gives up and runs it uncompiled."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Compile as often as it takes, while no other thread compiles a bucket.

    A call waits here while another thread compiles. The recompile limit is thread-local from
    torch 2.13 on and the whole process's before, so it has to be lifted by each thread, and by
    one at a time.
    """
    with COMPILE_LOCK, _torch.without_recompile_limit():
        yield


@dataclass
class Graph:
    """What runs a bucket's inputs of certain padded shapes, in one global state."""

    run: Callable[..., Any]
    code: CodeType | None = None  # of its own, where it is compiled for static sizes
    cuda_graphs: bool = False
    compiled_for: set[Specialization] = field(default_factory=set)
    """What it has run for: for anything else it is compiled anew."""
    warmed_for: set[Specialization] = field(default_factory=set)
    """What its backward has run for too."""
    seconds: float = 0.0  # what the first call in each took, and warming up
    first_graphs: int = 0
    first_entries: int = 0

    @classmethod
    def compiled(cls, function: Callable[..., Any], compiler: Compiler, shape: Shape) -> Graph:
        """Compile a function for the padded shapes of a call."""
        # Dynamo keeps the sizes it has seen under this name, in a file too.
        sizes = "_".join("x".join(map(str, each)) for _, each in shape.padded)
        copied = _separated(function, f"bucket_{sizes}")
        run = _torch.compiles_inside(compiler(copied), alone)
        return cls(run, copied.__code__, cuda_graphs=_torch.records_cuda_graphs(run))

    @property
    def count(self) -> int:
        """How many graphs were compiled for it."""
        if self.code is None:
            return 0
        # Dynamo's own count: guards that fail later compile anew without asking us.
        later = _torch.compiled_variants(self.code) - self.first_entries
        return self.first_graphs + max(later, 0)

    @contextlib.contextmanager
    def compiling(self, specialization: Specialization) -> Iterator[None]:
        """Note the seconds and graphs that a first call takes."""
        with alone():
            graphs, begun = _torch.graphs_compiled(), time.perf_counter()
            yield
            self.seconds += time.perf_counter() - begun
            self.first_graphs += max(_torch.graphs_compiled() - graphs, 0)
            if self.code is not None:
                self.first_entries = _torch.compiled_variants(self.code)
            self.compiled_for.add(specialization)


def compiler_for(
    given: Any, options: bool | Mapping[str, Any] | None
) -> tuple[Any, Compiler | None]:
    """Split what the user wraps into the function itself and what compiles it, if anything does."""
    found = _torch.compiler_of(given)
    if found is None:
        return given, _compiler(options) if options else None
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
    return original, settings


def _compiler(options: Any) -> Compiler:
    """Return what ``compile=`` asks for, with static sizes."""
    if options is not True and not isinstance(options, Mapping):
        raise TypeError(
            f"bucketed: compile is {options!r}, expected True or a dict of torch.compile's "
            "arguments, such as {'mode': 'max-autotune'} or {'backend': 'inductor'}"
        )
    arguments = {} if options is True else dict(options)
    if arguments.pop("dynamic", None):
        raise ValueError(
            "bucketed: compile={'dynamic': True} makes static sizes symbolic: leave it out"
        )
    # torch.compile is looked up when a bucket compiles: install("verified") replaces it.
    return lambda function: torch.compile(function, dynamic=False, **arguments)


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
