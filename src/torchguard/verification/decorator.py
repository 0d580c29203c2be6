"""``verified``, around a function or a module; ``install("verified")``, for the process."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, overload, runtime_checkable

import torch
from typing_extensions import ParamSpec, Self

from torchguard._public import public
from torchguard._torch import (
    backend_of_compiled,
    compile_in_place,
    compiled_call,
    default_backend,
    inductor_backend,
    patch,
)
from torchguard.verification.backend import OnMismatch, Options, VerifiedBackend
from torchguard.verification.report import VerificationReport

_Arguments = ParamSpec("_Arguments")
_Module = TypeVar("_Module", bound=torch.nn.Module)
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)

Settings = Callable[[Any, "bool | Mapping[str, Any] | None"], dict[str, Any]]
"""Makes arguments for ``torch.compile`` from a function and those it was compiled with."""


@runtime_checkable
class CompilesInside(Protocol):
    """What compiles functions of its own, such as what is bucketed, once for each bucket."""

    def __torchguard_compile__(self, settings: Settings) -> Any:
        """Return the same with other settings for ``torch.compile``."""
        ...


class Verified(Protocol[_Arguments, _Result_co]):
    """A function or a method, and what was found when it was checked.

    Example:
        >>> import torch, torchguard
        >>> double = torchguard.verified(backend="aot_eager")(lambda x: 2 * x)
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
        >>> double.stats().mismatched
        0
    """

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


# A module is a callable too, and the first that fits is meant.
@overload
def verified(function: _Module, /, **options: Any) -> _Module: ...
@overload
def verified(
    function: Callable[_Arguments, _Result], /, **options: Any
) -> Verified[_Arguments, _Result]: ...
@overload
def verified(
    function: None = None,
    /,
    *,
    calls: int = 1,
    on_mismatch: OnMismatch = "fallback",
    max_bytes: int | None = None,
    against: Literal["python"] | None = None,
    every: int | None = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **compile_options: Any,
) -> Decorator: ...
@public
def verified(
    function: Any = None,
    /,
    *,
    calls: int = 1,
    on_mismatch: OnMismatch = "fallback",
    max_bytes: int | None = None,
    against: Literal["python"] | None = None,
    every: int | None = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **compile_options: Any,
) -> Any:
    """Compile a function or module and verify each graph against eager.

    ``verified(f)`` equals ``torch.compile(f)`` where inductor is right. A module is compiled in
    place, as ``module.compile()`` does, and returned: to a type checker it is of its own class.
    The result has a method ``stats()``, unless a module has a ``stats`` of its own. What is
    verified already is returned as it is.

    Each graph is run on copies of its first real inputs, once as Dynamo traced it and once
    compiled: values, gradients, strides and sharing of memory have to be the same. If they are
    not, one warning says so, and the graph runs in eager from then on. A graph with dynamic shapes
    is checked again when it is called with sizes that are new to it, up to 256 combinations. While
    one thread checks a graph, others that call it run it eagerly.

    What is ``bucketed`` is compiled inside, once for each bucket, and keeps its own ``stats()``;
    :func:`verification_report` has the graphs.

    Args:
        function: what to compile; left out, ``verified(...)`` returns a decorator.
        calls: how many calls of each graph are checked; of a graph with dynamic shapes, how
            many with each combination of sizes.
        on_mismatch: ``"fallback"``: run the graph in eager. ``"warn"``: run the wrong graph all
            the same. ``"raise"``: raise a ``MiscompilationError`` when it is called.
        max_bytes: leave a graph unverified if its inputs' storages have more bytes.
        against: ``"python"``: compare each call that compiles with the same call as plain Python,
            on the same inputs, for functions that compute. Both runs are rolled back first.
        every: compare one of so many calls too, for constants that Dynamo should have guarded.
        backend: what compiles, by name or itself.
        mode: as for ``torch.compile``.
        options: as for ``torch.compile``.
        **compile_options: further arguments of ``torch.compile``: ``fullgraph``, ``dynamic``.

    Raises:
        TypeError: no function or module; an async function; something that was compiled already,
            or that is verified already with other options.
        ValueError: an argument is none of those it can be.

    Upstream: https://github.com/pytorch/pytorch/pull/197039

    Cost:
        Each graph runs three times instead of once in its first call, on copies of its inputs.

    Example:
        >>> import torch, torchguard
        >>> double = torchguard.verified(backend="aot_eager")(lambda x: 2 * x)
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
        >>> double.stats().graphs[0].status
        'verified'
    """
    dynamic = compile_options.get("dynamic")
    asked = Options(calls, on_mismatch, max_bytes, against, every, backend, mode, options, dynamic)
    decorator = Decorator(asked, compile_options)
    return decorator if function is None else decorator(function)


@dataclass(frozen=True)
class Decorator:
    """What ``verified(...)`` is before it gets something to check."""

    options: Options
    compile_options: dict[str, Any]
    """Further arguments of ``torch.compile``."""

    def __post_init__(self) -> None:
        """Refuse what ``torch.compile`` does not take, in words about its own parts."""
        known = inspect.signature(patch.original("torch.compile")).parameters
        for name, value in self.compile_options.items():
            if name not in known:
                raise TypeError(
                    f"verified: there is no argument {name}; an option of inductor is given as "
                    f"options={{{name!r}: {value!r}}}"
                )

    # A module is a callable too, and the first of the two that fits is meant.
    @overload
    def __call__(self, function: _Module, /) -> _Module: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, function: Callable[_Arguments, _Result], /
    ) -> Verified[_Arguments, _Result]: ...
    def __call__(self, function: Any, /) -> Any:
        """Compile and check it."""
        _check_function(function, self.options.against)
        # A protocol and no class: this room does not import the one of bucketed.
        if isinstance(function, CompilesInside):
            return function.__torchguard_compile__(self.settings)
        present = _backend_of(function)
        if present is not None:
            if self._has_own or self.options != replace(present.options, **_NO_OWN):
                raise TypeError(
                    f"verified: {_name_of(function)} is verified already, with other options; "
                    "give all of them to the first verified()"
                )
            return _with_stats(function, present)
        settings = self.settings(function, None)
        made: Any = function
        if isinstance(function, torch.nn.Module):
            compile_in_place(function, **settings)
        else:
            made = torch.compile(function, **settings)
        made = _compared(made, function, settings["backend"])
        return _with_stats(made, settings["backend"])

    def settings(self, given: Any, compiled: bool | Mapping[str, Any] | None) -> dict[str, Any]:
        """Return arguments for ``torch.compile``, by which ``given`` may be compiled already."""
        if compiled_call(given) is not None:
            raise TypeError(
                f"verified: {_name_of(given)} was compiled already; pass the function or the "
                "module itself: verified(mode=...)(function)"
            )
        if self._has_own and compiled:
            raise TypeError(
                "verified: this keeps the backend, mode and options that bucketed() was given; "
                "give all of them to one of the two"
            )
        asked = dict(compiled) if isinstance(compiled, Mapping) else dict(self.compile_options)
        chosen = replace(
            self.options,
            backend=asked.pop("backend", self.options.backend),
            mode=asked.pop("mode", self.options.mode),
            options=asked.pop("options", self.options.options),
            dynamic=asked.get("dynamic"),
        )
        checked = VerifiedBackend(chosen, _name_of(given))
        checked.inner()  # looked up by name now, as torch.compile does
        return {**asked, "backend": checked}

    @property
    def _has_own(self) -> bool:
        """Whether it was given more than checks."""
        return bool(self.compile_options) or self.options != replace(self.options, **_NO_OWN)


_NO_OWN: dict[str, Any] = {"backend": "inductor", "mode": None, "options": None, "dynamic": None}
"""The options of one that says nothing of what compiles."""


def _compared(made: Any, function: Any, backend: VerifiedBackend) -> Any:
    """Compare the calls of what was compiled with Python, if that is asked for."""
    if backend.options.against is None:
        return made
    # Here and not above: most programs do not ask for it.
    from torchguard.verification.against import compare_with_python  # noqa: PLC0415

    return compare_with_python(made, function, backend)


class _Stats:
    """The method ``stats`` of what is compiled; a copy of a module, not compiled, has no graphs."""

    def __init__(self, backend: VerifiedBackend | None = None) -> None:
        self._backend = backend

    def __call__(self) -> VerificationReport:
        """Return what was checked so far."""
        return VerificationReport(()) if self._backend is None else self._backend.stats()

    def __reduce__(self) -> tuple[type[_Stats], tuple[()]]:
        return _Stats, ()


def _check_function(function: Any, against: str | None) -> None:
    """Refuse what can't be compiled, with what to write instead."""
    if isinstance(function, str):
        raise TypeError(
            f"verified: expected a function or a module, got {function!r}; "
            f"for a backend write verified(backend={function!r})"
        )
    if isinstance(function, (staticmethod, classmethod, property)):
        kind = type(function).__name__
        raise TypeError(f"verified: got a {kind}; write @{kind} above @verified, not below it")
    if not callable(function):
        raise TypeError(f"verified: expected a function or a module, got {type(function).__name__}")
    if against is not None and isinstance(function, CompilesInside):
        raise TypeError(
            "verified: against= is not for what is bucketed, whose check runs it as Python already"
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        # torch.compile takes one; with 2.13 the process dies after its first call.
        raise TypeError(
            f"verified: {_name_of(function)} is async, which torch.compile can't compile; "
            "decorate the function that computes and call it from there"
        )


def _name_of(function: Any) -> str:
    """Return the name of a function or of a module's class; a partial has no name of its own."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _with_stats(made: Any, backend: VerifiedBackend) -> Any:
    if isinstance(getattr(made, "stats", None), _Stats) or not hasattr(made, "stats"):
        made.stats = _Stats(backend)
    return made


def _backend_of(function: Any) -> VerifiedBackend | None:
    """Return the backend of what is verified already: by this, by name, or by ``install``."""
    made = compiled_call(function)
    compiler = None if made is None else backend_of_compiled(made)
    return compiler if isinstance(compiler, VerifiedBackend) else None


# ---- install("verified") ----

AGAINST_VARIABLE = "TORCHGUARD_VERIFIED"
"""``python``: compare calls that compile with Python, as ``verified(against="python")`` does."""

# Options that torch.compile keeps for itself.
_NOT_INDUCTORS = {"guard_filter_fn", "use_aoti"}


def guard_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a ``torch.compile`` that checks what inductor compiles; other backends stay as they are.

    https://github.com/pytorch/pytorch/issues/197829
    """

    def compile(model: Any = None, **settings: Any) -> Any:  # noqa: A001 - torch's name
        options = settings.get("options") or {}
        backend = settings.get("backend") or default_backend()
        if backend != "inductor" or options.get("use_aoti"):
            return original(model, **settings)
        mode, dynamic = settings.get("mode"), settings.get("dynamic")
        if mode is None or settings.get("options") is None:
            # What inductor does not know it refuses now, as torch.compile does.
            known = {name: value for name, value in options.items() if name not in _NOT_INDUCTORS}
            inductor_backend(mode, known or None, dynamic)
        against: Any = os.environ.get(AGAINST_VARIABLE) or None
        checked = VerifiedBackend(Options(against=against, dynamic=dynamic))
        made = original(model, **{**settings, "backend": checked})
        if model is None:
            return lambda model: _compared(made(model), model, checked)
        return _compared(made, model, checked)

    return compile
