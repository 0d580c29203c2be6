"""bucketed(): pad to static sizes, run, slice the output."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    get_args,
    overload,
)

import torch
from typing_extensions import ParamSpec, Required, Unpack

from torchguard import _torch
from torchguard._public import public
from torchguard.bucketing.decorator.wrappers import Bucketed, BucketedModule, module_around
from torchguard.bucketing.padding import Side

# ---- the options, listed once ----


class NamedDim(Protocol):
    """A ``torch.export.Dim``, which has a name."""

    __name__: str


AxisName: TypeAlias = str | NamedDim | None
DimsOfArgument: TypeAlias = (
    Mapping[int, AxisName]
    | Mapping[str, "DimsOfArgument"]
    | Sequence["DimsOfArgument | AxisName"]
    | None
)
Dims: TypeAlias = Mapping[str, DimsOfArgument] | Sequence[DimsOfArgument]
"""``{argument: {dim: name}}``, or a sequence in the order of the arguments; containers nest."""

Overflow: TypeAlias = Literal["error", "eager", "grow"]
CheckPadding: TypeAlias = Literal["first", "always", "never"]


class Options(TypedDict, total=False):
    """The options of :func:`bucketed`, which says what they mean."""

    dims: Required[Dims]
    buckets: Any
    fill: Mapping[str, Any] | None
    outputs: Any
    side: Side
    overflow: Overflow
    check_padding: CheckPadding
    compile: bool | Mapping[str, Any] | None


class MaskingOptions(Options, total=False):
    """Options with the arguments that are made where the caller leaves them out."""

    lengths: Any
    mask: Any


DEFAULTS: Any = {
    "dims": None,
    "buckets": None,
    "fill": None,
    "lengths": None,
    "mask": None,
    "outputs": None,
    "side": "right",
    "overflow": "error",
    "check_padding": "first",
    "compile": None,
}


def checked_options(options: Mapping[str, Any]) -> MaskingOptions:
    """Return the options with the defaults filled in.

    Raises:
        TypeError: one that there is not, or none for ``dims``.
        ValueError: a word that is not one of those it can be.
    """
    # Python's own words: the signature shows each option, though **options takes any.
    unknown = sorted(options.keys() - DEFAULTS.keys())
    if unknown:
        near = difflib.get_close_matches(unknown[0], DEFAULTS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"bucketed() got an unexpected keyword argument {unknown[0]!r}{hint}")
    if "dims" not in options:
        raise TypeError(
            "bucketed() missing 1 required keyword-only argument: 'dims', which dimension of which "
            "argument varies. Write bucketed(function, dims={'x': {1: 't'}}, buckets=[64, 128])"
        )
    dims = options["dims"]
    of_a_tensor = isinstance(dims, Mapping) and dims and all(type(key) is int for key in dims)
    if not isinstance(dims, (Mapping, Sequence)) or isinstance(dims, str) or of_a_tensor:
        raise TypeError(
            f"bucketed: dims is {dims!r}, expected {{argument: {{dim: name}}}}, such as "
            "{'x': {1: 't'}}"
        )
    checked: Any = {**DEFAULTS, **options}
    for name, words in (("side", Side), ("overflow", Overflow), ("check_padding", CheckPadding)):
        if checked[name] not in get_args(words):
            listed = ", ".join(map(repr, get_args(words)))
            raise ValueError(f"bucketed: {name} is {checked[name]!r}, expected one of {listed}")
    if checked["fill"] is not None and not isinstance(checked["fill"], Mapping):
        raise TypeError(
            f"bucketed: fill is {checked['fill']!r}, expected {{argument: value}}, such as "
            "{'labels': -100}"
        )
    return checked  # type: ignore[no-any-return]


# ---- bucketed() ----

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


if TYPE_CHECKING:

    class _Decorator(Protocol):
        """What ``bucketed(...)`` is before it gets something to wrap."""

        # A module is a callable too, and the first of the two that fits is meant.
        @overload
        def __call__(self, function: torch.nn.Module, /) -> BucketedModule: ...  # type: ignore[overload-overlap]
        @overload
        def __call__(
            self, function: Callable[_Arguments, _Result], /
        ) -> Bucketed[_Arguments, _Result]: ...
        def __call__(self, function: Any, /) -> Any: ...

    class _MaskingDecorator(Protocol):
        """A decorator with ``mask=`` or ``lengths=``: the caller may leave these arguments out."""

        @overload
        def __call__(self, function: torch.nn.Module, /) -> BucketedModule: ...  # type: ignore[overload-overlap]
        @overload
        def __call__(self, function: Callable[..., _Result], /) -> Bucketed[..., _Result]: ...
        def __call__(self, function: Any, /) -> Any: ...


# The options are listed once, in Options. Type checkers read them through Unpack, people in
# the docstring, and inspect.signature() in the signature below.
@overload
def bucketed(  # type: ignore[overload-overlap]  # a module is callable, and the first that fits
    function: torch.nn.Module, /, **options: Unpack[MaskingOptions]
) -> BucketedModule: ...
@overload
def bucketed(
    function: Callable[_Arguments, _Result], /, **options: Unpack[Options]
) -> Bucketed[_Arguments, _Result]: ...
@overload
def bucketed(
    function: Callable[..., _Result], /, **options: Unpack[MaskingOptions]
) -> Bucketed[..., _Result]: ...
@overload
def bucketed(function: None = None, /, **options: Unpack[Options]) -> _Decorator: ...
@overload
def bucketed(function: None = None, /, **options: Unpack[MaskingOptions]) -> _MaskingDecorator: ...
@public
def bucketed(function: Any = None, /, *positional: Any, **options: Any) -> Any:  # noqa: D417 - each is described
    """Pad named dims to a few static sizes, run, and slice the outputs back to size.

    Equals ``function(*args, **kwargs)`` if padding does not change the answer, which is checked
    once per bucket. With ``compile=``, K buckets are K graphs of static sizes.
    https://github.com/pytorch/pytorch/issues/190631

    Args:
        function: a function, a method, an ``nn.Module`` or what ``torch.compile`` made of one;
            left out, a decorator is returned. A module gives a module that shares
            everything with it: parameters, hooks, ``training``.
        dims: which dims vary, in the form of ``torch.export``'s ``dynamic_shapes``:
            ``{"ids": {1: "t"}, "batch": {"audio": {2: "s"}}}``. Inputs that share a name are
            equally long.
        buckets: a :class:`Buckets` or a list of sizes for every axis, or ``{axis: Buckets}``.
            Left out, they are powers of two as they are needed.
        fill: what padding holds, by argument: a number, ``"repeat-last"``, ``"arange"`` or a
            function, as ``value`` of :func:`pad_to_bucket`; 0 for all others. Say it if the
            function may rely on it (labels: -100; a sum: 0): the check varies what is not named.
        lengths: the argument that takes the true size, a 0-d integer tensor, made if the caller
            gives none; with several axes ``{axis: argument}``. If he gives it, 0-d or (B,), it
            says how much of a call that arrives padded is real.
        mask: the argument that takes a mask (B, S), True where data is real. Made if the caller
            gives none or None, extended if he does; then it says how much of a call that arrives
            padded is real. ``{argument: "padding"}`` for True where padding is, ``"additive"`` for
            0 and -inf, ``(axis, kind)`` with several axes.
        outputs: sizes of the outputs, in their structure: ``{dim: axis}`` or ``{dim: lambda t:
            t // 2}``. Left out, they are derived from the function.
        side: where padding goes, ``"right"`` or ``"left"``.
        overflow: above the largest bucket: ``"error"``; ``"eager"``, without compiling;
            ``"grow"``, a new bucket, at least twice the largest.
        check_padding: ``"first"``: once per bucket (and with gradients on and off, in training and
            not) the function runs without compiling on the real inputs, padded, and padded with
            values above and below all data: outputs, gradients and buffers have to agree.
            ``"always"``: in every call. ``"never"``.
        compile: True, or a dict of ``torch.compile``'s arguments, to compile it as well. False
            says that it runs uncompiled on purpose, also if ``torch.compile`` is around it.

    Returns:
        A callable, or a module, with ``stats()``, ``warmup(*example)`` and ``verify(*inputs)``.

    Raises:
        TypeError, ValueError: the options don't fit the function or each other; when called:
            a size above the largest bucket, sizes of one axis that disagree, an output whose
            size can't be derived, a function that writes to a padded input (the check finds it).
        KeyError, IndexError: when called: an argument lacks a part or a dim that ``dims`` names.
        PaddingLeakError: when called: padding changes the answer or a gradient.

    Example:
        >>> import torch
        >>> from torchguard import Buckets, bucketed
        >>> @bucketed(dims={"x": {0: "t"}}, buckets=Buckets([4, 8]))
        ... def double(x):
        ...     return 2 * x
        >>> double(torch.ones(3))
        tensor([2., 2., 2.])
        >>> double.stats().hits
        {(4,): 1}
    """
    if positional:
        shown = ", ".join(type(each).__name__ for each in positional)
        raise TypeError(
            f"bucketed: got {shown} by position, expected options by name: "
            "bucketed(function, dims={'x': {1: 't'}}, buckets=[64, 128])"
        )
    checked = checked_options(options)
    if function is None:
        return functools.partial(_wrap, options=checked)
    return _wrap(function, checked)


# help() and editors without a type checker show each option in place of **options.
_signature = inspect.signature(bucketed)
_options = [
    inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if name == "dims" else DEFAULTS[name],
        annotation=MaskingOptions.__annotations__[name],
    )
    for name in DEFAULTS
]
bucketed.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[_signature.parameters["function"], *_options]
)


def _wrap(function: Any, options: MaskingOptions) -> Any:
    reason = _refused(function)
    if isinstance(function, (Bucketed, BucketedModule, staticmethod, classmethod)):
        reason = f"of type {type(function).__name__}: wrap what is inside"
    if reason is not None:
        raise TypeError(f"bucketed: function is {reason}")
    if isinstance(function, torch.nn.Module):
        return module_around(function, options)
    return Bucketed(function, options)


def _refused(function: Any) -> str | None:
    """Say what a function is, and what to pass instead, if its output can't be sliced."""
    name = getattr(function, "__qualname__", type(function).__name__)
    if isinstance(function, type):
        return (
            f"the class {name}: pass an instance, bucketed({name}(...), ...), or decorate its "
            "forward or __call__"
        )
    if not callable(function):
        return f"of type {type(function).__name__}, expected something to call"
    if isinstance(function, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return (
            f"{name}, made by torch.jit: pass the module or the function it was made from, and "
            "compile=True in place of torch.jit"
        )
    compiled = _torch.compiler_of(function)
    called = function if compiled is None else compiled[0]
    if isinstance(called, torch.nn.Module):
        called = type(called).forward
    for each in (called, getattr(type(called), "__call__", None)):  # noqa: B004 - looked into
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            return (
                f"{name}, which is async: what it returns can't be sliced. Wrap the function "
                "that runs the model, and call that from the async one"
            )
        if inspect.isgeneratorfunction(each):
            return (
                f"{name}, which is a generator: what it yields can't be sliced. Wrap the "
                "function that makes one item, or return a list"
            )
    return None
