"""One compiled callable per combination of static sizes, and a scope in which none may compile.

Dynamo keeps what it knows about a function with its code object: the compiled variants, of
which it makes 8 and then runs eager, and the sizes seen, which it makes symbolic when they
change. So every bucket has a code object of its own, with a name of its own (the sizes seen
are kept by file, line and name).
https://github.com/pytorch/pytorch/issues/128071
https://github.com/pytorch/pytorch/issues/190631
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, overload

import torch

from torchguard import _torch
from torchguard._public import public
from torchguard.errors import RecompileError

if TYPE_CHECKING:
    from torchguard.bucketing.decorator.plan import Plan, Specialization

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Label and padded shape of each input."""


class Compilers(NamedTuple):
    """What compiles a function, by kind of graph; None where it runs uncompiled."""

    static: Compiler | None = None
    """For static sizes."""
    dynamic: Compiler | None = None
    """For the sizes above the largest bucket."""


RECOMPILE_LIMIT = 8
"""As often as torch compiles a function anew before it gives up and runs it uncompiled."""

COMPILE_LOCK = threading.RLock()
"""Held while a graph is compiled for the first time, and during a check: both change settings of
the whole process for a moment."""


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
    """One variant for each combination of padded shapes and of what Dynamo guards on."""

    def __init__(self, function: Callable[..., Any], compilers: Compilers) -> None:
        self.function = function
        self.static = compilers.static
        self.variants: dict[Any, Variant] = {}
        self.eager = Variant(function)
        self._above = Variant(function)
        if compilers.dynamic is not None:
            above = compilers.dynamic(_separated(function, "beyond_buckets"))
            self._above = Variant(_torch.keep_settings(above), compiles=True)

    def variant_for(self, shapes: Shapes | None, specialization: Specialization) -> Variant:
        """Return what runs inputs of these padded shapes; None for sizes above the buckets."""
        key: Any = None
        if specialization.transformed:
            # torch.compile runs what is inside a transform of torch.func uncompiled.
            key = "transformed"
        elif shapes is not None:
            # Dynamo compiles anew for each of these anyway. With a function of its own a call
            # finds one entry in Dynamo's cache: in a list of several, threads walk past theirs.
            key = (shapes, specialization.global_state)
        found = self.variants.get(key)
        if found is None:
            found = self.variants[key] = self._new(key)
        return found

    def _new(self, key: Any) -> Variant:
        if self.static is None or key == "transformed":
            return Variant(self.function)
        if key is None:
            return self._above
        # Dynamo keeps the sizes it has seen under this name, in a file too.
        sizes = "_".join("x".join(map(str, shape)) for _, shape in key[0])
        copied = _separated(self.function, f"bucket_{sizes}")
        compiled = _torch.compiles_inside(self.static(copied), alone)
        return Variant(
            compiled,
            copied.__code__,
            compiles=True,
            cuda_graphs=_torch.records_cuda_graphs(compiled),
        )


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
    """Split what the user wraps into the function itself and what compiles it.

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
    return original, Compilers(settings, settings)


def _compilers(options: bool | Mapping[str, Any]) -> Compilers:
    if options is not True and not isinstance(options, Mapping):
        raise TypeError(
            f"bucketed: compile is {options!r}, expected True or a dict of torch.compile's "
            "arguments"
        )
    arguments = {} if options is True else dict(options)
    if arguments.pop("dynamic", None):
        raise ValueError(
            "bucketed: compile={'dynamic': True} makes static sizes symbolic: leave it out"
        )

    def compiler(*, dynamic: bool | None) -> Compiler:
        # torch.compile is looked up when a bucket compiles: install("verified") replaces it.
        return lambda function: torch.compile(function, dynamic=dynamic, **arguments)

    return Compilers(compiler(dynamic=False), compiler(dynamic=True))


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


# ---- no_recompile ----

_Function = TypeVar("_Function", bound=Callable[..., Any])

_QUOTED = 3
_MODES = ("whether gradients are on", "inference mode", "autocast", "a transform of torch.func")

_scopes = threading.local()


@overload
def no_recompile(function: _Function, /) -> _Function: ...
@overload
def no_recompile(function: None = None, /) -> contextlib.AbstractContextManager[None]: ...
@public
def no_recompile(function: Any = None, /) -> Any:
    """Raise where anything would be compiled, for a loop that has to run at full speed.

    Equals ``with torch.compiler.set_stance("fail_on_recompile"):``, and the error names the
    arguments and quotes what changed. That setting is the whole process's, so it holds for
    other threads too. Something that is bucketed raises :class:`RecompileError` where it is
    called; for any other compiled function torch raises a ``RuntimeError`` there, which leaves
    this scope as a ``RecompileError``, so inside of it ``except RuntimeError`` catches both.

    Also a decorator, ``@no_recompile`` or ``@no_recompile()``: each call is such a scope.

    Args:
        function: what to decorate; left out, a scope is returned.

    Raises:
        TypeError: ``function`` can't be called.
        RecompileError: something in the scope was about to compile, for the first time or again.

    Example:
        >>> import torch
        >>> from torchguard import no_recompile
        >>> double = torch.compile(lambda x: 2 * x, backend="eager")
        >>> with no_recompile():  # doctest: +ELLIPSIS
        ...     double(torch.ones(3))
        Traceback (most recent call last):
        torchguard.RecompileError: no_recompile: <lambda> was about to compile with x ...
    """
    if function is not None and not callable(function):
        raise TypeError(
            f"no_recompile: function is {type(function).__name__}, expected a function: write "
            "@no_recompile, or `with no_recompile():` around the calls"
        )
    return _scope() if function is None else _scope()(function)


@contextlib.contextmanager
def _scope() -> Iterator[None]:
    before = getattr(_scopes, "count", 0)
    _scopes.count = before + 1
    try:
        # Compiled frames ask for the stance; a backward, compiled when it first runs, does not.
        # https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html
        with torch.compiler.set_stance("fail_on_recompile"), _torch.before_backward(_refuse):
            yield
    except RuntimeError as error:
        if isinstance(error, RecompileError) or "fail_on_recompile" not in str(error):
            raise
        raise RecompileError(_describe(error)) from error
    except AssertionError as error:  # what some releases make of an error of _refuse
        if isinstance(error.__context__, RecompileError):
            raise error.__context__ from None
        raise
    finally:
        _scopes.count = before


def compiling_is_refused() -> bool:
    """Whether this thread is in such a scope."""
    return getattr(_scopes, "count", 0) > 0


def failed_guards(error: RuntimeError) -> str | None:
    """Return the guards of Dynamo that failed, empty where it does not say; None if none did."""
    text = str(error)
    if "fail_on_recompile" not in text:
        return None
    _, found, rest = text.partition("guard failure(s):")
    # Behind a guard comes the line of source that asked for it, and a stack of such lines.
    rest = rest.partition("User stack trace:")[0]
    lines = [line.partition("  #")[0].strip().lstrip("- ") for line in rest.splitlines() if found]
    # "0/3: tensor 'x' dtype mismatch": the number of the compiled variant says nothing here.
    lines = [line.partition(": ")[2] or line for line in lines if line]
    return "; ".join(dict.fromkeys(lines[:_QUOTED]))


def recompile_reason(plan: Plan, cache: CompileCache) -> str:
    """Return what a call has that no variant of the cache was compiled for."""
    # Whoever imports no_recompile alone need not wait for what pads.
    from torchguard.bucketing.decorator.plan import sizes_of  # noqa: PLC0415

    inputs = {each.label: each.padded(plan.buckets or plan.sizes) for each in plan.inputs}
    state = plan.specialization.global_state
    compiled = [key for key, each in cache.variants.items() if each.compiled_for and key]
    others = [(dict(shapes), then) for shapes, then, *_ in compiled]
    # The nearest reason is given: a bucket, then the global state, then other dims.
    same_bucket = [
        (known, then)
        for known, then in others
        if known.keys() == inputs.keys()
        and all(
            known[e.label][dim] == inputs[e.label][dim] for e in plan.inputs for dim, _ in e.axes
        )
    ]
    if not same_bucket:
        return f"{sizes_of(plan)}, a bucket that is not compiled yet: warmup() compiles all"
    then = next((then for known, then in same_bucket if known == inputs), None)
    if then is not None:
        index = next(i for i, (a, b) in enumerate(zip(state, then, strict=True)) if a != b)
        what = _MODES[index] if index < len(_MODES) else "the training mode of a module"
        return f"{sizes_of(plan)}: {what} is another than where this bucket was compiled"
    known, _ = same_bucket[0]
    changed = [
        f"{label} is {shape} after padding, compiled was {known[label]}"
        for label, shape in inputs.items()
        if shape != known[label]
    ]
    return f"{', '.join(changed)} ({sizes_of(plan)})"


def _refuse(graph: str) -> None:
    raise RecompileError(
        f"no_recompile: the backward of compiled graph {graph} was about to compile: run it once "
        "before, as warmup() does"
    )


def _describe(error: RuntimeError) -> str:
    """Return what was about to compile: the frame that called it knows the function and its input.

    Dynamo's own object for the frame to compile, also in the traceback, is not to be touched:
    it reads memory that is gone by now.
    """
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # What torch.compile has returned: _fn in 2.6, compile_wrapper in later releases.
        # https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/eval_frame.py
        if frame.f_code.co_name in {"compile_wrapper", "_fn"}:
            values = frame.f_locals
            if callable(values.get("fn")) and "args" in values:
                found = (values["fn"], values["args"], values.get("kwargs", {}))
    if found is None:
        return f"no_recompile: something was about to compile: {error}"
    function, args, kwargs = found
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    shapes = ", ".join(
        f"{name} of shape {tuple(value.shape)} and {value.dtype}"
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
    )
    name = getattr(function, "__qualname__", type(function).__name__)
    because = failed_guards(error)
    return (
        f"no_recompile: {name} was about to compile with "
        f"{shapes or 'no tensor among its arguments'}"
        + (f", because {because}" if because else "")
        + ": call it with these before"
    )
